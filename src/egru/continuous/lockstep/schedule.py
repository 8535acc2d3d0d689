"""The schedule of each sample: its input events and readouts, and the end, in the order they happen."""

from typing import NamedTuple

import torch
from torch import Tensor

from egru.continuous.problem import Problem

# Kinds of steps. At the same time, the smaller number comes first in a schedule.
INPUT, READOUT, END = 0, 1, 2
INTERNAL, DELIVERY, NOTHING = 3, 4, 5


class Schedule(NamedTuple):
    """Times (float64), kinds and indices, one row per sample, ``(B, L)``. Rows are padded with ``END``."""

    times: Tensor
    kinds: Tensor
    indices: Tensor


def make_schedule(problem: Problem) -> Schedule:
    """Return the schedule of ``problem``: inputs before readouts before the end, where times are equal."""
    device = problem.c0.device
    (B, R), K = problem.readouts.shape, len(problem.input_times)
    sizes = problem.input_offsets.diff()
    samples = torch.arange(B, device=device)
    longest = int(sizes.max()) if B else 0
    times = problem.horizons[:, None].repeat(1, longest + R + 1)
    kinds = torch.full_like(times, END, dtype=torch.int64)
    indices = torch.zeros_like(kinds)
    row = torch.repeat_interleave(samples, sizes)
    index = torch.arange(K, device=device)
    column = index - problem.input_offsets[row]
    times[row, column], kinds[row, column], indices[row, column] = problem.input_times.double(), INPUT, index
    times[:, longest : longest + R] = problem.readouts.double()
    kinds[:, longest : longest + R] = READOUT
    indices[:, longest : longest + R] = torch.arange(R, device=device)
    # Stable sorts, from the last criterion to the first: list order, kind, time.
    order = kinds.argsort(dim=1, stable=True)
    order = order.gather(1, times.gather(1, order).argsort(dim=1, stable=True))
    return Schedule(times.gather(1, order), kinds.gather(1, order), indices.gather(1, order))
