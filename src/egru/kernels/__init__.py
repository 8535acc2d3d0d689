"""The sequence operation: one interface, several kernels, and a ``torch.library`` operator."""

from egru.kernels.problem import Backward, Forward, Kernel, Problem
from egru.kernels.registry import choose, get, info
from egru.kernels.sequence import begin_sequence, run_sequence

__all__ = [
    "Backward",
    "Forward",
    "Kernel",
    "Problem",
    "begin_sequence",
    "choose",
    "get",
    "info",
    "run_sequence",
]
