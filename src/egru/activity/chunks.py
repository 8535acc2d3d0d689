"""Splitting of long sequences of states, to limit temporary memory and to stay in the cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

_CPU_STATES = 1 << 18
_GPU_STATES = 1 << 23


def time_chunks(states: Tensor) -> Iterator[slice]:
    """Iterate over slices of the first dimension of ``states``, ``(T, B, H)``.

    A slice covers at most 2**18 states on a CPU and 2**23 on a GPU, but at least one step. While compiling, one slice
    covers all steps.
    """
    T = len(states)
    if torch.compiler.is_compiling():
        steps = T
    else:
        limit = _GPU_STATES if states.is_cuda else _CPU_STATES
        steps = limit * T // max(1, states.numel())
    steps = max(1, steps)
    return (slice(start, min(T, start + steps)) for start in range(0, T, steps))
