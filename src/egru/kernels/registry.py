"""The registered kernels, and the choice of one for a problem."""

import torch

from egru import compiled
from egru._warn import warn_user
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
    """Return a kernel.

    Args:
        name: Its name; see :func:`info`.

    Example:
        >>> kernel = egru.kernels.get("reference")
        >>> kernel.unsupported(problem)  # None: the reference runs every problem
    """
    return _KERNELS[name]


def unsupported(name: str, problem: Problem) -> str | None:
    """Return why the kernel called ``name`` cannot run ``problem``, or None if it can."""
    device, received = _KERNELS[name].device, problem.input.device.type
    if device is None or device == received:
        return unsupported_options(name, problem)
    return _refused_option(name, problem) or f"it requires {device.upper()} tensors, got {received}"


def unsupported_options(name: str, problem: Problem) -> str | None:
    """Return why the kernel called ``name`` cannot run ``problem`` on its device, or None if it can."""
    return _refused_option(name, problem) or _KERNELS[name].unsupported(problem)


def _refused_option(name: str, problem: Problem) -> str | None:
    for option, default in _REFUSED_OPTIONS[name]:
        if (value := getattr(problem, option)) != default:
            return (
                f"it does not support {option}={value!r}" if isinstance(value, str) else f"it does not support {option}"
            )
    return None


def choose(backend: str, problem: Problem) -> str:
    """Return the name of the kernel that runs ``problem``.

    Args:
        backend: A kernel's name, or ``"auto"`` for the fastest one that supports the problem.
        problem: The problem to run.

    Raises:
        ValueError: If no kernel, or not the one that ``backend`` names, supports the problem.

    Returns:
        The name of a kernel; see :func:`info`.

    Example:
        >>> egru.kernels.choose("reference", problem)  # problem: an egru.kernels.Problem
        'reference'
    """
    if backend == "auto":
        for name in _KERNELS:
            if unsupported(name, problem) is None:
                if name == "reference" and not torch.compiler.is_compiling():
                    warn_declined(problem)
                return name
        raise ValueError(f"no kernel can run this: {unsupported('reference', problem)}")
    reason = unsupported(backend, problem)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot run this: {reason}; use backend='auto' to pick one that can")
    return backend


def warn_declined(problem: Problem) -> None:
    """Warn if the kernel for the device of ``problem`` does not run it, so that plain torch has to."""
    device = problem.input.device.type
    name = next((name for name, kernel in _KERNELS.items() if kernel.device == device), None)
    if device == "meta":
        return
    layer = layer_name(problem)
    if name is None:
        warn_plain_torch(layer, f"there is no kernel for {device} tensors")
    elif (reason := unsupported(name, problem)) not in (None, compiled.missing):  # a missing core has its own warning
        warn_plain_torch(layer, f"the {name} kernel cannot run it, because {reason}")


def layer_name(problem: Problem) -> str:
    """Return the name of the class of layers that run ``problem``."""
    return {"gru": "EGRU", "lstm": "ELSTM"}[problem.cell]


_warned: set[tuple[str, str]] = set()


def warn_plain_torch(layer: str, reason: str) -> None:
    """Warn that a layer runs in plain torch, once per reason.

    Args:
        layer: Name of the layer's class.
        reason: Why no kernel runs it.
    """
    if (layer, reason) in _warned:
        return
    _warned.add((layer, reason))
    warn_user(
        f"{layer} runs in plain torch, which is slow (about 20 operations per step, 60 in training, on all units): "
        f"{reason}; egru doctor lists what the kernels support",
        RuntimeWarning,
    )


def info() -> dict[str, str]:
    """Describe the kernels.

    Returns:
        What each kernel runs on, how it was built, or why it is not available; by name, fastest first.

    Example:
        >>> sorted(egru.kernels.info())
        ['cpu', 'cuda', 'reference']
    """
    return {name: kernel.describe() for name, kernel in _KERNELS.items()}
