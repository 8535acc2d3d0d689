"""States may fill gigabytes: what is computed of them goes piece by piece, and stays in a cache on the way."""

from collections.abc import Iterator

import torch
from torch import Tensor

_PIECE = {False: 1 << 18, True: 1 << 23}
"""States in a piece, on a CPU and on a GPU."""


def pieces(states: Tensor) -> Iterator[slice]:
    """Parts of the first dimension; all of it in a compiled graph."""
    T = len(states)
    most = T if torch.compiler.is_compiling() else max(1, _PIECE[states.is_cuda] * T // max(1, states.numel()))
    return (slice(start, min(T, start + most)) for start in range(0, T, max(1, most)))
