"""What the eager route and the ``torch.library`` route share: checks, autocast, the choice of a kernel, masking."""

from collections.abc import Sequence

import torch
from torch import Tensor

from egru.kernels.problem import Backward, Forward, Problem
from egru.kernels.registry import choose, get


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
    with NoAutocast(problem.input.device.type):
        return get(kernel).forward(problem, save)


def backward(
    problem: Problem,
    kernel: str,
    saved: tuple[Tensor | None, Tensor, Tensor],
    grads: Sequence[Tensor | None],
    input_gradient: bool,
    state_gradient: bool = True,
) -> Backward:
    """Run a kernel's backward pass on what :func:`tensors_to_save` returned."""
    grad_y, grad_c, grad_c_last, grad_y_last = grads
    with NoAutocast(problem.input.device.type):
        return get(kernel).backward(
            problem, *saved, grad_y, grad_c, grad_c_last, grad_y_last, input_gradient, state_gradient
        )


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
