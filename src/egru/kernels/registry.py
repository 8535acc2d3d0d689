"""The registered kernels, and the choice of one for a problem."""

from egru.kernels.cpu.kernel import CPUKernel
from egru.kernels.cuda import CUDAKernel
from egru.kernels.problem import FIELDS, Kernel, Problem
from egru.kernels.reference import ReferenceKernel

_CUDA = CUDAKernel()
_KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CPUKernel(), _CUDA, ReferenceKernel())}
"""Fastest first; the reference supports every problem."""
_REFUSED_OPTIONS = {
    name: tuple((option, default) for option, default in FIELDS.defaults.items() if option not in kernel.options)
    for name, kernel in _KERNELS.items()
}
"""Per kernel, the options that it does not implement, with their defaults."""

begin = _CUDA.begin  # no other kernel gains from starting early


def get(name: str) -> Kernel:
    """Return the kernel called ``name``."""
    return _KERNELS[name]


def unsupported(name: str, problem: Problem) -> str | None:
    """Return why the kernel called ``name`` cannot run ``problem``, or None if it can."""
    for option, default in _REFUSED_OPTIONS[name]:
        if getattr(problem, option) != default:
            return f"it does not support {option}"
    return _KERNELS[name].unsupported(problem)


def choose(backend: str, problem: Problem) -> str:
    """Return the name of the kernel that runs ``problem``.

    Args:
        backend: A kernel's name, or ``"auto"`` for the fastest one that supports the problem.
        problem: The problem to run.

    Raises:
        ValueError: If no kernel, or not the one that ``backend`` names, supports the problem.
    """
    if backend == "auto":
        for name in _KERNELS:
            if unsupported(name, problem) is None:
                return name
        raise ValueError(f"no kernel can run this: {unsupported('reference', problem)}")
    reason = unsupported(backend, problem)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot run this: {reason}; use backend='auto' to pick one that can")
    return backend


def info() -> dict[str, str]:
    """Describe each kernel, fastest first: what it runs on, how it was built, or why it is not available."""
    return {name: kernel.describe() for name, kernel in _KERNELS.items()}
