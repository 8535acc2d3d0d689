"""The sequence operation, behind one interface: a registry of implementations and a ``torch.library`` operator."""

from egru.kernels.problem import Backward, Forward, Kernel, Problem
from egru.kernels.registry import backends, choose, get, info
from egru.kernels.run import begin_sequence, run_sequence

__all__ = [
    "Backward",
    "Forward",
    "Kernel",
    "Problem",
    "backends",
    "begin_sequence",
    "choose",
    "get",
    "info",
    "run_sequence",
]
