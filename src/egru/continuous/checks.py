"""Validation of arguments before a run. Every error names the argument and what it received."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from egru.continuous.inputs import InputEvents
from egru.continuous.limits import MAX_PANELS, panel_bound
from egru.continuous.problem import TIE, Problem
from egru.layers.checks import same_dtype_and_device

LARGEST = {torch.float64: 1e50, torch.float32: 1e15}
"""The largest magnitude of weights, biases, activations and input values. Larger ones could overflow."""


def positive_number(owner: str, name: str, value: Any) -> float:
    """Return ``value`` as a float, or raise if it is not a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} must be a number, got {type(value).__name__} {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{owner}: {name} must be positive and finite, got {value!r}")
    return float(value)


def connection_mask(
    owner: str, name: str, mask: Any, shape: tuple[int, int], device: torch.device | str | None
) -> Tensor | None:
    """Return ``mask`` on ``device``, or raise if it is neither None nor a bool tensor of this shape."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != shape:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{owner}: {name} must be a bool tensor of shape {shape}, got {got}")
    return mask.to(device)


def input_events(owner: str, events: Any, channels: int, horizon: float, like: Tensor) -> InputEvents:
    """Return ``events``, or raise if they do not fit one another, the layer or the horizon."""
    if not isinstance(events, tuple) or len(events) != 4 or not all(isinstance(x, Tensor) for x in events):
        raise TypeError(
            f"{owner}: input must be InputEvents(times, channels, values, offsets), got {type(events).__name__}; "
            "create it with InputEvents.from_lists, from_padded, from_series or from_irregular"
        )
    times, channel, values, offsets = events
    for name, x in (("input.times", times), ("input.values", values)):
        same_dtype_and_device(owner, name, x, like)
    for name, x in (("input.channels", channel), ("input.offsets", offsets)):
        if x.dtype != torch.int64 or x.device != like.device:
            raise TypeError(f"{owner}: {name} must be int64 on {like.device}, got {x.dtype} on {x.device}")
    if times.dim() != 1 or channel.shape != times.shape or values.shape != times.shape:
        raise ValueError(
            f"{owner}: input.times, channels and values must all have shape (events,), "
            f"got {tuple(times.shape)}, {tuple(channel.shape)} and {tuple(values.shape)}"
        )
    if (
        offsets.dim() != 1
        or len(offsets) < 2
        or int(offsets[0]) != 0
        or int(offsets[-1]) != len(times)
        or bool((offsets.diff() < 0).any())
    ):
        raise ValueError(
            f"{owner}: input.offsets must have shape (batch + 1,) and ascend from 0 to the number of events, "
            f"{len(times)}; got {offsets.tolist()}"
        )
    sample_of = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())

    def at(x: Tensor, k: int) -> str:
        return f"got {x[k].item():g} at index {k} (sample {sample_of[k]})"

    _raise_if(owner, ~torch.isfinite(times), lambda k: f"input.times must be finite, {at(times, k)}")
    _raise_if(owner, ~torch.isfinite(values), lambda k: f"input.values must be finite, {at(values, k)}")
    _raise_if(owner, times < 0, lambda k: f"input.times must be at least 0, {at(times, k)}")
    _raise_if(owner, times > horizon, lambda k: f"input.times must be at most the horizon {horizon:g}, {at(times, k)}")
    _raise_if(
        owner,
        (times.diff() < 0) & (sample_of.diff() == 0),
        lambda k: (
            f"input.times must ascend within each sample, {at(times, k)} and {times[k + 1].item():g} after it; "
            "InputEvents.from_lists sorts them"
        ),
    )
    _raise_if(
        owner,
        (channel < 0) | (channel >= channels),
        lambda k: f"input.channels must be from 0 to {channels - 1}, {at(channel, k)}",
    )
    return InputEvents(times, channel, values, offsets)


def readout_times(owner: str, times: Any, horizon: float, like: Tensor) -> Tensor:
    """Return the readout times as a tensor, empty if ``times`` is None, or raise if they do not fit the horizon."""
    if times is None:
        return like.new_zeros(0)
    if not isinstance(times, Tensor):
        times = torch.as_tensor(times, dtype=like.dtype, device=like.device)
    same_dtype_and_device(owner, "readout_times", times, like)
    if times.dim() != 1:
        raise ValueError(f"{owner}: readout_times must have shape (readouts,), got {tuple(times.shape)}")
    if times.requires_grad:
        raise ValueError(f"{owner}: readout_times must not require gradients; pass readout_times.detach()")

    def at(k: int) -> str:
        return f"got {times[k].item():g} at index {k}"

    _raise_if(owner, ~torch.isfinite(times), lambda k: f"readout_times must be finite, {at(k)}")
    _raise_if(owner, times < 0, lambda k: f"readout_times must be at least 0, {at(k)}")
    _raise_if(owner, times > horizon, lambda k: f"readout_times must be at most the horizon {horizon:g}, {at(k)}")
    _raise_if(
        owner,
        times.diff() < 0,
        lambda k: f"readout_times must ascend, {at(k)} and {times[k + 1].item():g} after it",
    )
    return times


def check_problem(owner: str, problem: Problem) -> None:
    """Raise unless values are finite, time constants and thresholds positive, and states below thresholds.

    Also raise if values are too large to compute with, or ``tau_m`` is too small for the other times.
    """
    if problem.c0.dtype not in TIE:
        raise TypeError(f"{owner}: the dtype must be float64 or float32, got {problem.c0.dtype}")
    for name in ("V", "U", "b", "theta", "a0", "c0"):
        value = getattr(problem, name)
        if not bool(torch.isfinite(value).all()):
            index = (~torch.isfinite(value)).nonzero()[0].tolist()
            raise ValueError(f"{owner}: {name} must be finite, got {value[tuple(index)].item()} at index {index}")
    largest = LARGEST[problem.c0.dtype]
    for name in ("V", "U", "b", "a0", "input_values"):
        value = getattr(problem, name).detach()
        if value.numel() and float(value.abs().max()) > largest:
            raise ValueError(
                f"{owner}: {name} must be at most {largest:g} in magnitude in {value.dtype}, "
                f"got {float(value.abs().max()):g}"
            )
    for name in ("tau_s", "tau_m", "tau_o"):
        positive_number(owner, name, float(getattr(problem, name).detach()))
    panels = panel_bound(problem)
    if panels > MAX_PANELS:
        tau_s, tau_m = float(problem.tau_s.detach()), float(problem.tau_m.detach())
        raise ValueError(
            f"{owner}: tau_m={tau_m:g} is too small for tau_s={tau_s:g} and the horizon {problem.horizon:g}: a unit "
            f"may need {panels:.1e} panels between two events, more than {MAX_PANELS:.0e}; raise tau_m or shorten the "
            "horizon"
        )
    theta, c0 = problem.theta, problem.c0
    _raise_if(owner, theta <= 0, lambda n: f"thresholds must be positive, got {theta[n].item():g} for unit {n}")
    if problem.options.above_threshold == "raise":
        above = (c0 >= theta).nonzero()
        if len(above):
            s, n = above[0].tolist()
            raise ValueError(
                f"{owner}: state.c must be below the thresholds, got {c0[s, n].item():g} at index [{s}, {n}], where "
                f"the threshold is {theta[n].item():g}; above_threshold='fire' accepts it and emits an event at time 0"
            )


def _raise_if(owner: str, wrong: Tensor, message: Callable[[int], str]) -> None:
    """Raise a ValueError with ``message(k)`` for the first index ``k`` where ``wrong`` is True."""
    if bool(wrong.any()):
        raise ValueError(f"{owner}: {message(int(wrong.nonzero()[0]))}")
