"""Validation of arguments, with errors that name the argument, the value received and what is accepted.

The first two parameters of most functions are ``owner``, the name of the class or function that was called, and
``name``, the name of its argument.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from egru.events import EventState

Name = TypeVar("Name", bound=str)
Instance = TypeVar("Instance")


def positive_int(owner: str, name: str, value: Any) -> int:
    """Return ``value`` if it is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} must be an int, got {type(value).__name__} {value!r}")
    if value < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {value}")
    return value


def probability(owner: str, name: str, value: Any, *, include_one: bool = False) -> float:
    """Return ``value`` as a float if it lies in [0, 1), or in [0, 1] with ``include_one``."""
    accepted = "0 <= p <= 1" if include_one else "0 <= p < 1"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 <= value < 1 or (include_one and value == 1)):
        raise ValueError(f"{owner}: {name} must be a probability, {accepted}; got {value!r}")
    return float(value)


def choice(owner: str, name: str, value: Any, accepted: Sequence[Name]) -> Name:
    """Return ``value`` if it is one of the accepted strings."""
    if value not in accepted:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(accepted)}; got {value!r}")
    return value


def instance(owner: str, name: str, value: Any, expected: type[Instance]) -> Instance:
    """Return ``value`` if it is an instance of the class ``expected``."""
    if not isinstance(value, expected):
        raise TypeError(f"{owner}: {name} must be an egru.{expected.__name__}, got {type(value).__name__} {value!r}")
    return value


def scale(owner: str, name: str, value: Any) -> float:
    """Return ``value``, a number or a tensor with one element, as a finite float of at least 0."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} must be a number or a floating-point tensor with one element, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{owner}: {name} must be finite and not negative, got {value!r}")
    return float(value)


def positive_or_none(owner: str, name: str, value: Any) -> float | None:
    """Return ``value`` if it is None or a finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (number and 0 < value < math.inf):
        return value
    raise ValueError(f"{owner}: {name} must be a positive number or None, got {value!r}")


def sequence_input(owner: str, x: Any, features: int, like: Tensor, dims: tuple[int, ...], layout: str) -> None:
    """Check the input of a layer.

    Args:
        owner: Name of the layer's class.
        x: Input to check.
        features: Expected size of the last dimension.
        like: Parameter whose dtype and device the input must have.
        dims: Accepted numbers of dimensions.
        layout: Accepted shapes in words, for the error.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{owner}: input must be a Tensor or PackedSequence, got {type(x).__name__}")
    if x.dim() not in dims:
        raise ValueError(f"{owner}: input must have shape {layout}, got {tuple(x.shape)}")
    if x.shape[-1] != features:
        raise ValueError(f"{owner}: input has {x.shape[-1]} features (shape {tuple(x.shape)}), expected {features}")
    if 0 in x.shape:
        raise ValueError(
            f"{owner}: input is empty, shape {tuple(x.shape)}; it must have at least one step and one sequence"
        )
    same_dtype_and_device(owner, "input", x, like)


def same_dtype_and_device(owner: str, name: str, x: Tensor, like: Tensor) -> None:
    """Check that ``x`` has the dtype and device of ``like``; under autocast any floating dtype is accepted."""
    if x.device != like.device:
        raise ValueError(
            f"{owner}: {name} is on {x.device}, the parameters are on {like.device}; move one with .to(device)"
        )
    autocast = torch.is_autocast_enabled(x.device.type)
    if x.dtype != like.dtype and not (autocast and x.is_floating_point()):
        raise TypeError(f"{owner}: {name} is {x.dtype}, the parameters are {like.dtype}; convert one with .to(dtype)")


def event_state(
    owner: str, hx: Any, shape: tuple[int, ...], like: Tensor, emits_state: bool, names: tuple[str, str]
) -> EventState:
    """Return the initial state if both halves have this shape and the dtype and device of ``like``.

    Args:
        owner: Name of the layer's class.
        hx: State to check. For layers that emit their state, a tensor stands for both halves.
        shape: Expected shape of each half.
        like: Parameter whose dtype and device the state must have.
        emits_state: Whether the value of an event is the state. Other layers require an :class:`EventState`: a tensor
            would leave ``c`` open, and a plain tuple may be that of an LSTM, which is in the opposite order.
        names: What the caller calls the halves ``c`` and ``y``, for the error.
    """
    received = type(hx).__name__
    if isinstance(hx, Tensor) and emits_state:
        hx, names = EventState(hx, hx), ("hx", "hx")
    halves = cast(tuple[Any, ...], hx if isinstance(hx, tuple if emits_state else EventState) else ())
    if len(halves) != 2:
        accepted = "egru.EventState(c, y), the internal state and the last events"
        accepted += ", or a Tensor that stands for both" if emits_state else ""
        raise TypeError(f"{owner}: hx must be {accepted}; got {received}")
    for name, half in zip(names, halves, strict=True):
        if not isinstance(half, Tensor):
            raise TypeError(f"{owner}: {name} must be a Tensor, got {type(half).__name__}")
        if tuple(half.shape) != shape:
            raise ValueError(f"{owner}: {name} has shape {tuple(half.shape)}, expected {shape}")
        same_dtype_and_device(owner, name, half, like)
    return EventState(*halves)
