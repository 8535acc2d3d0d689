"""Everything a run may be refused for, said before it starts."""

import math
from typing import Any

import torch
from torch import Tensor

from egru.continuous.inputs import InputEvents
from egru.continuous.problem import TIE, Problem
from egru.layers.checks import same_dtype_and_device


def positive(owner: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} must be a number, got {type(value).__name__} {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{owner}: {name} must be positive and finite, got {value!r}")
    return float(value)


def connections(
    owner: str, name: str, mask: Any, shape: tuple[int, int], device: torch.device | str | None
) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != shape:
        got = f"{mask.dtype} of {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{owner}: {name} must be a bool tensor of shape {shape}, got {got}")
    return mask.to(device)


def input_events(owner: str, events: Any, channels: int, horizon: float, like: Tensor) -> InputEvents:
    """The four tensors of an :class:`InputEvents`, against one another, the layer and the horizon."""
    if not isinstance(events, tuple) or len(events) != 4 or not all(isinstance(x, Tensor) for x in events):
        raise TypeError(
            f"{owner}: input must be InputEvents(times, channels, values, offsets), got {type(events).__name__}; "
            "see InputEvents.from_lists, from_padded, from_series and from_irregular"
        )
    times, channel, values, offsets = events
    for name, x in (("input.times", times), ("input.values", values)):
        same_dtype_and_device(owner, name, x, like)
    for name, x in (("input.channels", channel), ("input.offsets", offsets)):
        if x.dtype != torch.int64 or x.device != like.device:
            raise TypeError(f"{owner}: {name} must be int64 on {like.device}, got {x.dtype} on {x.device}")
    if times.dim() != 1 or channel.shape != times.shape or values.shape != times.shape:
        raise ValueError(
            f"{owner}: input.times, channels and values must all be (events,), "
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
            f"{owner}: input.offsets must be (batch + 1,), ascending from 0 to the number of events {len(times)}; "
            f"got {offsets.tolist()}"
        )
    sample_of = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())
    _finite_events(owner, "input.times", times, sample_of)
    _finite_events(owner, "input.values", values, sample_of)
    _refuse(
        owner,
        times < 0,
        lambda k: f"input.times[{k}] is {times[k].item():g} in sample {sample_of[k]}; times start at 0",
    )
    _refuse(
        owner,
        times > horizon,
        lambda k: f"input.times[{k}] is {times[k].item():g} in sample {sample_of[k]}, past the horizon {horizon:g}",
    )
    wrong = (times.diff() < 0) & (sample_of.diff() == 0)
    _refuse(
        owner,
        wrong,
        lambda k: (
            f"input.times must ascend within each sample; times[{k}] = {times[k].item():g} and times[{k + 1}] = "
            f"{times[k + 1].item():g} in sample {sample_of[k]}; InputEvents.from_lists sorts them"
        ),
    )
    _refuse(
        owner,
        (channel < 0) | (channel >= channels),
        lambda k: f"input.channels[{k}] is {channel[k].item()}; channels go from 0 to {channels - 1}",
    )
    return InputEvents(times, channel, values, offsets)


def readout_times(owner: str, times: Any, horizon: float, like: Tensor) -> Tensor:
    if times is None:
        return like.new_zeros(0)
    if not isinstance(times, Tensor):
        times = torch.as_tensor(times, dtype=like.dtype, device=like.device)
    same_dtype_and_device(owner, "readout_times", times, like)
    if times.dim() != 1:
        raise ValueError(f"{owner}: readout_times must be (readouts,), got shape {tuple(times.shape)}")
    if times.requires_grad:
        raise ValueError(f"{owner}: readout_times have no gradient; pass readout_times.detach()")
    _refuse(owner, ~torch.isfinite(times), lambda k: f"readout_times[{k}] is {times[k].item()}; all must be finite")
    _refuse(owner, times < 0, lambda k: f"readout_times[{k}] is {times[k].item():g}; times start at 0")
    _refuse(
        owner, times > horizon, lambda k: f"readout_times[{k}] is {times[k].item():g}, past the horizon {horizon:g}"
    )
    _refuse(
        owner,
        times.diff() < 0,
        lambda k: f"readout_times must ascend; [{k}] is {times[k].item():g} and [{k + 1}] {times[k + 1].item():g}",
    )
    return times


def problem(owner: str, problem: Problem) -> None:
    """Parameters and state: types, finite values, thresholds above 0, states below them."""
    if problem.c0.dtype not in TIE:
        raise TypeError(f"{owner}: the continuous-time model computes in float64 and float32, got {problem.c0.dtype}")
    for name in ("V", "U", "b", "theta", "a0", "c0"):
        value = getattr(problem, name)
        if not bool(torch.isfinite(value).all()):
            bad = (~torch.isfinite(value)).nonzero()[0].tolist()
            raise ValueError(f"{owner}: {name}{bad} is {value[tuple(bad)].item()}; all of {name} must be finite")
    for name in ("tau_s", "tau_m", "tau_o"):
        positive(owner, name, float(getattr(problem, name).detach()))
    theta, c0 = problem.theta, problem.c0
    _refuse(owner, theta <= 0, lambda n: f"theta[{n}] is {theta[n].item():g}; thresholds must be above 0")
    if problem.options.above_threshold == "raise":
        above = (c0 >= theta).nonzero()
        if len(above):
            s, n = above[0].tolist()
            raise ValueError(
                f"{owner}: state.c[{s}, {n}] is {c0[s, n].item():g}, not below its threshold {theta[n].item():g}; "
                "above_threshold='fire' lets such units emit at once"
            )


def _finite_events(owner: str, name: str, values: Tensor, sample_of: Tensor) -> None:
    _refuse(
        owner,
        ~torch.isfinite(values),
        lambda k: f"{name}[{k}] is {values[k].item()} in sample {sample_of[k]}; all must be finite",
    )


def _refuse(owner: str, wrong: Tensor, message: Any) -> None:
    """Raise with ``message(k)`` of the first entry that is wrong."""
    if bool(wrong.any()):
        raise ValueError(f"{owner}: {message(int(wrong.nonzero()[0]))}")
