"""Which kernels exist, and which one a call gets."""

from egru.kernels.cpu.kernel import CPUKernel
from egru.kernels.cuda import CUDAKernel
from egru.kernels.problem import Kernel, Problem
from egru.kernels.reference import ReferenceKernel

_CUDA = CUDAKernel()
_KERNELS: dict[str, Kernel] = {k.name: k for k in (CPUKernel(), _CUDA, ReferenceKernel())}
"""Fastest first; the reference takes everything."""


def backends() -> tuple[str, ...]:
    """The accepted values of ``backend=``."""
    return ("auto", *_KERNELS)


def get(name: str) -> Kernel:
    """The kernel of that name."""
    return _KERNELS[name]


begin = _CUDA.begin  # the only kernel that gains by starting early


def choose(backend: str, problem: Problem) -> str:
    """The name of the kernel that runs ``problem``: the fastest that can, or the one asked for, or an error."""
    if backend == "auto":
        return next(name for name, kernel in _KERNELS.items() if kernel.unsupported(problem) is None)
    reason = get(backend).unsupported(problem)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot run this: {reason}; backend='auto' picks one that can")
    return backend


def info() -> dict[str, str]:
    """Each kernel and its standing, fastest first: what it runs on, how it was built, or why it is absent."""
    return {name: kernel.describe() for name, kernel in _KERNELS.items()}
