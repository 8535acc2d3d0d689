"""Delays of events on their way to their receivers: axonal, or one per connection."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.continuous.problem import Problem


class Delays(nn.Module):
    """Delays that are fixed, or trained as the softplus of a parameter, so that they stay positive.

    Args:
        value: The delays, not negative: one per source, ``(sources,)``, or one per connection, ``(H, sources)``.
        trainable: Whether they are trained.
    """

    def __init__(self, value: Tensor, trainable: bool) -> None:
        super().__init__()
        self.fixed: Tensor | None
        self.raw: nn.Parameter | None
        self.register_buffer("fixed", None if trainable else value)
        self.raw = nn.Parameter(value + torch.log(-torch.expm1(-value))) if trainable else None

    def forward(self) -> Tensor:
        """Return the delays."""
        if self.raw is not None:
            return F.softplus(self.raw)
        assert self.fixed is not None
        return self.fixed


def make_delays(
    owner: str, name: str, value: Any, units: int, sources: int, per_connection: bool, trainable: bool, like: Tensor
) -> Delays | None:
    """Return the delays of a layer, or raise if they are negative, not finite, or do not fit it."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise TypeError(f"{owner}: {name} must be a number or a tensor, got {type(value).__name__}")
    delays = torch.as_tensor(value).detach().to(like)
    delays = delays.expand(sources).clone() if delays.dim() == 0 else delays.clone()
    shapes = [(sources,), (units, sources)]
    if tuple(delays.shape) not in shapes:
        raise ValueError(
            f"{owner}: {name} must be a number or have shape {shapes[0]} or {shapes[1]}, got {tuple(delays.shape)}"
        )
    if delays.dim() == 2 and not per_connection:
        raise ValueError(
            f"{owner}: {name} must have shape {shapes[0]}, because the weights are a list of connections; got "
            f"{tuple(delays.shape)}; use a mask instead of the list"
        )
    wrong = ~(torch.isfinite(delays) & ((delays > 0) if trainable else (delays >= 0)))
    if bool(wrong.any()):
        index = wrong.nonzero()[0].tolist()
        sign = "positive, because they are trainable," if trainable else "non-negative"
        raise ValueError(f"{owner}: {name} must be {sign} and finite, got {delays[tuple(index)]:g} at index {index}")
    return Delays(delays, trainable)


def with_delays(problem: Problem, delays: Tensor | None, input_delays: Tensor | None) -> Problem:
    """Return ``problem`` with delays of internal events and of input events."""
    if input_delays is not None:
        problem = _with_input_delays(problem, input_delays)
    return problem if delays is None else _with_recurrent_delays(problem, delays)


def _with_recurrent_delays(problem: Problem, delays: Tensor) -> Problem:
    H, V, connections = problem.c0.shape[1], problem.V, problem.connections
    if connections is not None:
        if not problem.options.self_connections:
            keep = connections[0] != connections[1]
            V, connections = V[:, keep], connections[:, keep].contiguous()
        offsets = torch.arange(H + 1, device=V.device)
        return dataclasses.replace(problem, V=V, connections=connections, delays=delays, line_offsets=offsets)
    mask = torch.ones(H, H, dtype=torch.bool, device=V.device) if problem.mask is None else problem.mask
    if not problem.options.self_connections:
        mask = mask & ~torch.eye(H, dtype=torch.bool, device=V.device)
    if delays.dim() == 1:
        offsets = torch.arange(H + 1, device=V.device)
        return dataclasses.replace(problem, mask=mask, delays=delays, line_offsets=offsets)
    weights, lines, offsets, receivers, sources = _lines(V, mask)
    return dataclasses.replace(
        problem, V=weights, mask=None, connections=lines, delays=delays[receivers, sources], line_offsets=offsets
    )


def _with_input_delays(problem: Problem, delays: Tensor) -> Problem:
    times, channels, values = problem.input_times, problem.input_channels, problem.input_values
    B, U = len(problem.c0), problem.U
    samples = torch.repeat_interleave(torch.arange(B, device=U.device), problem.input_offsets.diff())
    if delays.dim() == 1:
        times = times + delays[channels]
    else:  # every connection becomes a channel with one receiver
        H, D = delays.shape
        mask = torch.ones(H, D, dtype=torch.bool, device=U.device) if problem.input_mask is None else problem.input_mask
        U, lines, offsets, receivers, sources = _lines(U, mask)
        counts = offsets.diff()[channels]
        event = torch.repeat_interleave(torch.arange(len(times), device=U.device), counts)
        ends = counts.cumsum(0)
        position = torch.arange(len(event), device=U.device) - (ends - counts)[event]
        channels = offsets[channels[event]] + position
        times, values, samples = times[event] + delays[receivers, sources][channels], values[event], samples[event]
        problem = dataclasses.replace(problem, U=U, input_mask=None, input_connections=lines, channels=len(receivers))
    late = times.detach() > problem.horizons[samples]
    order = times.detach().argsort(stable=True)
    order = order[samples[order].argsort(stable=True)]
    order = order[~late[order]]
    offsets = torch.zeros(B + 1, dtype=torch.int64, device=U.device)
    offsets[1:] = samples[order].bincount(minlength=B).cumsum(0)
    return dataclasses.replace(
        problem,
        input_times=times[order],
        input_channels=channels[order],
        input_values=values[order],
        input_offsets=offsets,
    )


def _lines(weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return one line per connection: weights ``(3, E)``, connections, offsets, receivers and sources."""
    sources, receivers = mask.T.nonzero(as_tuple=True)
    lines = torch.stack([receivers, torch.arange(len(receivers), device=mask.device)])
    offsets = torch.zeros(mask.shape[1] + 1, dtype=torch.int64, device=mask.device)
    offsets[1:] = sources.bincount(minlength=mask.shape[1]).cumsum(0)
    return weights[:, receivers, sources], lines, offsets, receivers, sources
