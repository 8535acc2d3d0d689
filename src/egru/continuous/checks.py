"""Validation of arguments before a run. Every error names the argument and what it received."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egru import compiled
from egru.continuous.inputs import InputEvents
from egru.continuous.limits import MAX_PANELS, panel_bound, panel_counts
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


def time_constant(owner: str, name: str, value: Any, units: int) -> Tensor:
    """Return a time constant as a float64 tensor, 0-dimensional or one per unit, or raise if it is not positive."""
    if not isinstance(value, Tensor):
        return torch.tensor(positive_number(owner, name, value), dtype=torch.float64)
    if not value.is_floating_point() or value.dim() > 1 or (value.dim() == 1 and len(value) != units):
        raise ValueError(
            f"{owner}: {name} must be a number or a floating-point tensor of shape ({units},), got {value.dtype} of "
            f"shape {tuple(value.shape)}"
        )
    value = value.detach().cpu().double()
    _check_time_constant(owner, name, value)
    return value


def adaptation_strength(owner: str, value: Any, units: int) -> Tensor:
    """Return the strength of the adaptation as a float64 tensor, 0-dimensional or one per unit, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise TypeError(f"{owner}: adaptation must be a number or a tensor, got {type(value).__name__} {value!r}")
    result = torch.as_tensor(value, device=None if isinstance(value, Tensor) else "cpu").detach().cpu()
    if isinstance(value, Tensor) and (not value.is_floating_point() or tuple(value.shape) not in ((), (units,))):
        raise ValueError(
            f"{owner}: adaptation must be a number or a floating-point tensor of shape ({units},), got {value.dtype} "
            f"of shape {tuple(value.shape)}"
        )
    _raise_if(
        owner,
        ~torch.isfinite(result).reshape(-1),
        lambda n: (
            f"adaptation must be finite, got {result.reshape(-1)[n].item():g}"
            + (f" for unit {n}" if result.dim() else "")
        ),
    )
    return result.double()


def _check_time_constant(owner: str, name: str, value: Tensor) -> None:
    if value.dim() == 0:
        positive_number(owner, name, float(value))
        return
    _raise_if(
        owner,
        ~(torch.isfinite(value) & (value > 0)),
        lambda n: f"{name} must be positive and finite, got {value[n].item():g} for unit {n}",
    )


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


def connection_list(
    owner: str, name: str, connections: Any, units: int, sources: int, device: torch.device | str | None
) -> Tensor | None:
    """Return ``connections``, sorted by source, then receiver, or raise if they are not pairs of existing units."""
    if connections is None:
        return None
    if not isinstance(connections, Tensor) or connections.dtype != torch.int64 or connections.dim() != 2:
        got = type(connections).__name__
        if isinstance(connections, Tensor):
            got = f"{connections.dtype} of shape {tuple(connections.shape)}"
        raise ValueError(f"{owner}: {name} must be an int64 tensor of shape (2, connections), got {got}")
    if len(connections) != 2:
        raise ValueError(f"{owner}: {name} must have shape (2, connections), got {tuple(connections.shape)}")
    for row, kind, count in ((0, "receivers", units), (1, "sources", sources)):
        _raise_if(
            owner,
            (connections[row] < 0) | (connections[row] >= count),
            lambda k, row=row, kind=kind, count=count: (
                f"{kind} of {name} must be from 0 to {count - 1}, got {connections[row, k]} at index [{row}, {k}]"
            ),
        )
    position = connections[1] * units + connections[0]
    order = position.argsort()
    _raise_if(
        owner,
        position[order].diff() == 0,
        lambda k: f"{name} must be distinct, got {connections[:, order[k]].tolist()} twice",
    )
    return connections[:, order].contiguous().to(device)


def horizons(owner: str, horizon: Any, events: Any, like: Tensor) -> Tensor:
    """Return the horizon of each sample ``(B,)``, or raise if one is not positive and finite.

    They are rounded to the dtype of the layer, so that no event time can be rounded past them.
    """
    if not isinstance(events, tuple) or len(events) != 4 or not all(isinstance(x, Tensor) for x in events):
        raise TypeError(
            f"{owner}: input must be InputEvents(times, channels, values, offsets), got {type(events).__name__}; "
            "create it with one of the constructors InputEvents.from_..."
        )
    batch = max(0, events[3].numel() - 1)
    if not isinstance(horizon, Tensor):
        horizon = positive_number(owner, "horizon", horizon)
        if like.dtype != torch.float64:
            positive_number(owner, f"horizon in {like.dtype}", torch.tensor(horizon, dtype=like.dtype).item())
        return torch.full((batch,), horizon, dtype=like.dtype, device=like.device)
    same_dtype_and_device(owner, "horizon", horizon, like)
    if horizon.requires_grad:
        raise ValueError(f"{owner}: horizon must not require gradients; pass horizon.detach()")
    if horizon.dim() == 0:
        horizon = horizon.expand(batch)
    if horizon.shape != (batch,):
        raise ValueError(
            f"{owner}: horizon must be a number or have shape ({batch},), one entry per sample, "
            f"got {tuple(horizon.shape)}"
        )
    _raise_if(
        owner,
        ~(torch.isfinite(horizon) & (horizon > 0)),
        lambda s: f"horizon must be positive and finite, got {horizon[s].item():g} for sample {s}",
    )
    return horizon


def input_events(owner: str, events: InputEvents, channels: int, horizons: Tensor, like: Tensor) -> InputEvents:
    """Return ``events``, or raise if they do not fit one another, the layer or the horizons."""
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
    if _are_valid(times, channel, values, offsets, channels, horizons):
        return events
    bounds = offsets.cpu().numpy()
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(times) or (np.diff(bounds) < 0).any():
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
    _raise_if(
        owner,
        times > horizons[sample_of],
        lambda k: (
            f"input.times must be at most the horizon {horizons[sample_of[k]].item():g}, {at(times, k)}; "
            "InputEvents.until drops later events"
        ),
    )
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
    return events


def _are_valid(
    times: Tensor, channels: Tensor, values: Tensor, offsets: Tensor, channel_count: int, horizons: Tensor
) -> bool:
    """Return whether the compiled core, which has less overhead than torch, has checked the events successfully."""
    core, batch, single = compiled.core, offsets.numel() - 1, times.dtype == torch.float32
    if core is None or offsets.dim() != 1 or batch < 1 or times.dtype != horizons.dtype or times.dtype not in TIE:
        return False
    if not _is_plain(times, channels, offsets, horizons) or not math.isfinite(_magnitude(values)):
        return False
    addresses = (x.data_ptr() for x in (times, channels, offsets, horizons))
    return core.valid_events(*addresses, batch, len(times), channel_count, single)


def _is_plain(*tensors: Tensor) -> bool:
    """Return whether the compiled core can read these tensors."""
    return all(x.device.type == "cpu" and x.is_contiguous() for x in tensors)


def readout_times(owner: str, times: Any, horizons: Tensor, like: Tensor) -> Tensor:
    """Return the readout times ``(B, R)``, or raise if they do not fit the horizons. If ``times`` is None, R is 0."""
    batch = len(horizons)
    if times is None:
        return like.new_zeros(batch, 0)
    if not isinstance(times, Tensor):
        times = torch.as_tensor(times, dtype=like.dtype, device=like.device)
    same_dtype_and_device(owner, "readout_times", times, like)
    shared = times.dim() == 1
    if not shared and (times.dim() != 2 or len(times) != batch):
        raise ValueError(
            f"{owner}: readout_times must have shape (readouts,) or ({batch}, readouts), got {tuple(times.shape)}"
        )
    if times.requires_grad:
        raise ValueError(f"{owner}: readout_times must not require gradients; pass readout_times.detach()")

    rows = times.expand(batch, times.shape[-1])
    if like.device.type == "cpu":
        r = rows.numpy()
        if (r >= 0).all() and (r <= horizons[:, None].numpy()).all() and (np.diff(r) >= 0).all():
            return rows

    def at(s: int, k: int) -> str:
        return f"got {rows[s, k].item():g} at index {k if shared else [s, k]}"

    _raise_if(owner, ~torch.isfinite(rows), lambda s, k: f"readout_times must be finite, {at(s, k)}")
    _raise_if(owner, rows < 0, lambda s, k: f"readout_times must be at least 0, {at(s, k)}")
    _raise_if(
        owner,
        rows > horizons[:, None],
        lambda s, k: f"readout_times must be at most the horizon {horizons[s].item():g}, {at(s, k)}",
    )
    _raise_if(
        owner,
        rows.diff(dim=1) < 0,
        lambda s, k: f"readout_times must ascend, {at(s, k)} and {rows[s, k + 1].item():g} after it",
    )
    return rows


def check_problem(owner: str, problem: Problem) -> None:
    """Raise unless values are finite, time constants and thresholds positive, and states below thresholds.

    Also raise if values are too large to compute with, or ``tau_m`` is too small for the other times.
    """
    if problem.c0.dtype not in TIE:
        raise TypeError(f"{owner}: the dtype must be float64 or float32, got {problem.c0.dtype}")
    fields = {name: name for name in ("V", "U", "b", "theta", "a0", "c0", "input_values")}
    if problem.options.adaptive:
        fields["adaptation"] = "beta"
    for name, field in fields.items():
        value = getattr(problem, field)
        magnitude = _magnitude(value)
        if not math.isfinite(magnitude):
            value = value.detach()
            index = (~torch.isfinite(value)).nonzero()[0].tolist()
            raise ValueError(f"{owner}: {name} must be finite, got {value[tuple(index)].item()} at index {index}")
        largest = LARGEST[value.dtype]
        if name not in ("theta", "c0") and magnitude > largest:
            raise ValueError(
                f"{owner}: {name} must be at most {largest:g} in magnitude in {value.dtype}, got {magnitude:g}"
            )
    for name in ("tau_s", "tau_m", "tau_o", "tau_a")[: 4 if problem.options.adaptive else 3]:
        _check_time_constant(owner, name, getattr(problem, name).detach())
    panels = panel_bound(problem)
    if panels > MAX_PANELS:
        worst = int(panel_counts(problem).argmax())
        names = ["tau_m", "tau_s", "tau_a"][: 3 if problem.options.adaptive else 2]
        taus = {name: float((tau := getattr(problem, name).detach().flatten())[worst % len(tau)]) for name in names}
        fastest = "tau_m" if not problem.options.adaptive else min(names, key=lambda name: taus[name])
        others = ", ".join(f"{name}={taus[name]:g}" for name in names if name != fastest)
        raise ValueError(
            f"{owner}: {fastest}={taus[fastest]:g} is too small for {others} and the horizon "
            f"{problem.longest_horizon:g}: a unit may need {panels:.1e} panels between two events, more than "
            f"{MAX_PANELS:.0e}; raise {fastest} or shorten the horizon"
        )
    theta, c0 = problem.theta.detach(), problem.c0.detach()
    core, single = compiled.core, c0.dtype == torch.float32
    if core is not None and _is_plain(theta, c0) and core.are_below(c0.data_ptr(), theta.data_ptr(), *c0.shape, single):
        return
    _raise_if(owner, theta <= 0, lambda n: f"thresholds must be positive, got {theta[n].item():g} for unit {n}")
    if problem.options.above_threshold == "raise":
        above = (c0 >= theta).nonzero()
        if len(above):
            s, n = above[0].tolist()
            raise ValueError(
                f"{owner}: state.c must be below the thresholds, got {c0[s, n].item():g} at index [{s}, {n}], where "
                f"the threshold is {theta[n].item():g}; above_threshold='fire' accepts it and emits an event at time 0"
            )


def _magnitude(value: Tensor) -> float:
    """Return the largest magnitude; it is not finite if a value is not."""
    if value.numel() == 0:
        return 0.0
    if compiled.core is not None and value.dtype in TIE and _is_plain(value):
        return compiled.core.largest_magnitude(value.data_ptr(), value.numel(), value.dtype == torch.float32)
    return float(torch.linalg.vector_norm(value.detach(), torch.inf))


def _raise_if(owner: str, wrong: Tensor, message: Callable[..., str]) -> None:
    """Raise a ValueError with ``message(*index)`` for the first index where ``wrong`` is True."""
    if bool(wrong.any()):
        raise ValueError(f"{owner}: {message(*wrong.nonzero()[0].tolist())}")
