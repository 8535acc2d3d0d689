"""The sequence operation for plain eager calls, without the operator's dispatcher.

``egru::sequence`` is what compilers and exporters see. Its way through ``torch.library`` takes longer than the kernels
of a short sequence on a GPU; an ``autograd.Function`` around the same kernels takes a fraction of it.
"""

from typing import Any

import torch
from torch import Tensor

from egru._autograd import refuse_double_backward
from egru.kernels.finite import check_finite, check_result
from egru.kernels.problem import TENSOR_FIELDS, Forward, Problem
from egru.kernels.registry import get


class _Unrounded:
    """Kernels round what they want to themselves: autocast off. Lighter than ``torch.autocast``, which takes longer."""

    __slots__ = ("before", "device")

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before = torch.is_autocast_enabled(self.device)
        torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.device, self.before)


def _forward(problem: Problem, backend: str, save: bool) -> Forward:
    check_finite(problem.input, problem.c0, problem.y0, problem.theta)
    with _Unrounded(problem.input.device.type):
        result = get(backend).forward(problem, save)
    check_result(result.c_last)
    return result


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, backend: str, *tensors: Tensor | None) -> Any:
        result = _forward(problem, backend, save=True)
        ctx.set_materialize_grads(False)
        input = tensors[0] if result.input is None else result.input
        y = result.y if get(backend).reads_y else None
        ctx.save_for_backward(y, result.c, result.reserve, input, *tensors[1:])
        ctx.options, ctx.backend = problem.options(), backend
        return result.y, result.c, result.c_last, result.y_last

    @staticmethod
    @refuse_double_backward
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, c, reserve, *tensors = ctx.saved_tensors
        problem = Problem(*tensors, *ctx.options)
        needs = ctx.needs_input_grad[2:]
        with _Unrounded(problem.input.device.type):
            found = get(ctx.backend).backward(problem, y, c, reserve, *grads[:4], input_gradient=needs[0])
        wanted = [g if need else None for g, need in zip(found, needs[: len(found)], strict=True)]
        return None, None, *wanted, *[None] * (TENSOR_FIELDS - len(wanted))


def sequence(problem: Problem, backend: str, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(y, c, c_last, y_last)``, differentiable."""
    if not save:
        return _forward(problem, backend, save)[:4]
    # Of Function.apply only what is left where is_plain: the rest looks at every argument, for transforms.
    apply: Any = super(torch.autograd.Function, _Sequence).apply  # pyright: ignore[reportAttributeAccessIssue]
    return apply(problem, backend, *problem.tensors())
