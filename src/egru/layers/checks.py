"""Errors that name the argument, what it got, and what is accepted."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from egru.events import EventState


def positive_int(owner: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} must be an int, got {type(value).__name__} {value!r}")
    if value < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {value}")
    return value


def probability(owner: str, name: str, value: Any, *, one: bool = False) -> float:
    accepted = "0 <= p <= 1" if one else "0 <= p < 1"
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < 1 or (one and value == 1)):
        raise ValueError(f"{owner}: {name} must be a probability, {accepted}; got {value!r}")
    return float(value)


def choice(owner: str, name: str, value: Any, accepted: Sequence[str]) -> str:
    if value not in accepted:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(accepted)}; got {value!r}")
    return value


def instance(owner: str, name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{owner}: {name} must be an egru.{kind.__name__}, got {type(value).__name__} {value!r}")
    return value


def scale(owner: str, name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} must be one number or a floating tensor of one element, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{owner}: {name} must be finite and not negative, got {value!r}")
    return float(value)


def bound(owner: str, name: str, value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (number and 0 < value < math.inf):
        return value
    raise ValueError(f"{owner}: {name} must be a positive number or None, got {value!r}")


def sequence_input(owner: str, x: Any, features: int, like: Tensor, dims: tuple[int, ...], layout: str) -> None:
    """Check an input tensor against the layer's parameters."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{owner}: input must be a Tensor or PackedSequence, got {type(x).__name__}")
    if x.dim() not in dims:
        raise ValueError(f"{owner}: input must have shape {layout}, got {tuple(x.shape)}")
    if x.shape[-1] != features:
        raise ValueError(f"{owner}: input has {x.shape[-1]} features (shape {tuple(x.shape)}), expected {features}")
    if 0 in x.shape:
        raise ValueError(f"{owner}: input is empty, shape {tuple(x.shape)}; at least one step and one row are needed")
    same_kind(owner, "input", x, like)


def same_kind(owner: str, name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(
            f"{owner}: {name} is on {x.device}, the parameters on {like.device}; move one with .to(device)"
        )
    autocast = torch.is_autocast_enabled(x.device.type)
    if x.dtype != like.dtype and not (autocast and x.is_floating_point()):
        raise TypeError(f"{owner}: {name} is {x.dtype}, the parameters are {like.dtype}; convert one with .to(dtype)")


def event_state(owner: str, state: Any, shape: tuple[int, ...], like: Tensor) -> EventState:
    """Check a carried state: both halves, right shape, type and device."""
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(
            f"{owner}: state must be egru.EventState(c, y), got {type(state).__name__}; "
            "an event layer carries its internal state and its last events, always both"
        )
    for name, half in zip(("state.c", "state.y"), state, strict=True):
        if not isinstance(half, Tensor):
            raise TypeError(f"{owner}: {name} must be a Tensor, got {type(half).__name__}")
        if tuple(half.shape) != shape:
            raise ValueError(f"{owner}: {name} has shape {tuple(half.shape)}, expected {shape}")
        same_kind(owner, name, half, like)
    return EventState(*state)
