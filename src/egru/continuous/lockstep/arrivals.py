"""Events on their way to their receivers, with delays."""

import torch
from torch import Tensor

from egru.continuous.problem import Problem


class Arrivals:
    """Delayed events that have yet to arrive, one row per sample, in any order; free places have infinite times.

    Attributes:
        times: When they arrive ``(B, P)``, float64.
        lines: The lines that carry them ``(B, P)``.
        events: Which event of its sample each of them is ``(B, P)``.
        a_r: The activation of the reset gate of the emitter, at its event ``(B, P)``.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.line_offsets is not None
        offsets, like = problem.line_offsets, problem.c0.detach()
        self.horizons, self.delays, self.line_units = problem.horizons, problem.delays.double(), problem.line_units
        columns = torch.arange(int(offsets.diff().max()), device=offsets.device)
        self.table = offsets[:-1, None] + columns
        self.exists = columns < offsets.diff()[:, None]
        self.times = torch.full((len(like), 0), torch.inf, dtype=torch.float64, device=like.device)
        self.lines = torch.zeros(len(like), 0, dtype=torch.int64, device=like.device)
        self.events, self.a_r = self.lines.clone(), like.new_zeros(len(like), 0)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the time of the next arrival of each sample, which may be infinite, and its place."""
        if self.times.shape[1] == 0:
            empty = torch.full((len(self.times),), torch.inf, dtype=torch.float64, device=self.times.device)
            return empty, torch.zeros_like(empty, dtype=torch.int64)
        return self.times.min(1)

    def send(self, rows: Tensor, units: Tensor, times: Tensor, events: Tensor, a_r: Tensor) -> None:
        """Add one event in each of ``rows``, on all lines of its unit. Those after the horizon are dropped."""
        lines = self.table[units].clamp(max=len(self.delays) - 1)
        arrival = times[:, None] + self.delays[lines]
        arrival = torch.where(self.exists[units] & (arrival <= self.horizons[rows, None]), arrival, torch.inf)

        def extended(values: Tensor, new: Tensor) -> Tensor:
            fill = torch.inf if values is self.times else 0
            block = torch.full((len(values), new.shape[1]), fill, dtype=values.dtype, device=values.device)
            block[rows] = new
            return torch.cat([values, block], 1)

        others = [extended(self.lines, lines), extended(self.events, events[:, None].expand_as(lines))]
        others.append(extended(self.a_r, a_r[:, None].expand(lines.shape)))
        # Sorting is stable, so events that arrive at the same time keep the order in which they were emitted.
        times, order = extended(self.times, arrival).sort(dim=1, stable=True)
        used = int(torch.isfinite(times).sum(1).max())
        self.times = times[:, :used]
        self.lines, self.events, self.a_r = (x.gather(1, order[:, :used]) for x in others)

    def take(self, rows: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Remove one arrival from each of ``rows`` and return its line, its event and ``a_r``."""
        self.times[rows, place] = torch.inf
        return self.lines[rows, place], self.events[rows, place], self.a_r[rows, place]
