"""What the eager route and the ``torch.library`` route share: checks, autocast, the choice of a kernel, masking."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from egru._autograd import in_transform
from egru.kernels.problem import Backward, Forward, Problem
from egru.kernels.registry import choose, get


def is_plain(x: Tensor) -> bool:
    """Return whether this is an ordinary eager call: no tracing, no transform, no tensor subclass."""
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()  # pyright: ignore[reportPrivateUsage]
        and not in_transform()
        and torch._C._len_torch_dispatch_stack() == 0  # pyright: ignore[reportPrivateUsage]
    )


def prepare(problem: Problem, backend: str) -> tuple[Problem, str, bool]:
    """Return the problem to run, the kernel that runs it, and whether to save what a backward pass needs."""
    save = problem.needs_gradient()
    if not save:
        problem = problem.without_backward_options()
    return problem, choose(backend, problem), save


def forward(problem: Problem, kernel: str, save: bool) -> Forward:
    """Run a kernel's forward pass.

    Raises:
        ValueError: If an argument or the final state is not finite (on the CPU only).
    """
    check_finite(problem.input, problem.c0, problem.y0, problem.theta)
    with NoAutocast(problem.input.device.type):
        result = get(kernel).forward(problem, save)
    check_result(result.c_last)
    return result


def backward(
    problem: Problem,
    kernel: str,
    saved: tuple[Tensor | None, Tensor, Tensor],
    grads: Sequence[Tensor | None],
    input_gradient: bool,
) -> Backward:
    """Run a kernel's backward pass on what :func:`tensors_to_save` returned."""
    grad_y, grad_c, grad_c_last, grad_y_last = grads
    with NoAutocast(problem.input.device.type):
        return get(kernel).backward(problem, *saved, grad_y, grad_c, grad_c_last, grad_y_last, input_gradient)


def tensors_to_save(kernel: str, y: Tensor, c: Tensor, reserve: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the outputs that ``kernel`` reads in its backward pass."""
    return (y if get(kernel).reads_y else None), c, reserve


def mask_gradients(gradients: Backward, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return one gradient per argument, or None for arguments that do not need one.

    ``needed`` is ``ctx.needs_input_grad``: the differentiable fields first, then arguments that have no gradient.
    """
    masked = [gradient if need else None for gradient, need in zip(gradients, needed, strict=False)]
    return *masked, *[None] * (len(needed) - len(masked))


class NoAutocast:
    """Disable autocast: kernels do their own rounding. Has less overhead than ``torch.autocast``."""

    __slots__ = ("device", "enabled")

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.enabled = torch.is_autocast_enabled(self.device)
        torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.device, self.enabled)


# NaN compares false, so an unchecked NaN would look like an inactive unit. On other devices than the CPU a check would
# wait for the device.


def check_finite(input: Tensor, c0: Tensor, y0: Tensor, theta: Tensor) -> None:
    """Raise ``ValueError`` if an argument on the CPU contains NaN or infinity."""
    if input.device.type != "cpu":
        return
    for name, value in (("input", input), ("state.c", c0), ("state.y", y0), ("the threshold", theta)):
        if not _all_finite(value):
            bad = value[~torch.isfinite(value)][0].item()
            raise ValueError(f"{name} contains {bad}; expected finite values")


def check_result(c_last: Tensor) -> None:
    """Raise ``ValueError`` if the final state on the CPU is not finite.

    A state that became NaN stays NaN, so the final state reveals NaN weights at any step of the sequence.
    """
    if c_last.device.type == "cpu" and not _all_finite(c_last):
        raise ValueError("the state became NaN or infinite: the weights or biases of this layer are not finite")


def _all_finite(value: Tensor) -> bool:
    # NumPy where possible: threads that torch wakes here would spin for longer than a short sequence takes.
    if value.dtype in (torch.float32, torch.float64) and is_plain(value):
        return bool(np.isfinite(value.detach().numpy()).all())
    return bool(torch.isfinite(value).all())
