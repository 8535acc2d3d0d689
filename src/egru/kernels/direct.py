"""The sequence operation for plain eager calls, without the operator's dispatcher.

``egru::sequence`` is what compilers and exporters see. Its way through ``torch.library`` takes longer than the kernels
of a short sequence on a GPU; an ``autograd.Function`` around the same kernels takes a fraction of it.
"""

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from egru.kernels.finite import check_finite, check_result
from egru.kernels.problem import TENSOR_FIELDS, Problem
from egru.kernels.registry import get


def is_plain(problem: Problem) -> bool:
    """Whether nothing watches this call: no tracing, no transform, no tensor subclass."""
    return (
        type(problem.input) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _unrounded(problem: Problem) -> contextlib.AbstractContextManager[object]:
    """Kernels round what they want to themselves: autocast off, where it is on."""
    device = problem.input.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], backend: str, save: bool, *tensors: Tensor | None) -> Any:
        problem = Problem(*tensors, *options)  # pyright: ignore[reportArgumentType]
        check_finite(problem.input, problem.c0, problem.y0, problem.theta)
        with _unrounded(problem):
            result = get(backend).forward(problem, save)
        check_result(result.c_last)
        ctx.set_materialize_grads(False)
        if save:
            ctx.save_for_backward(result.y, result.c, result.reserve, *tensors)
        ctx.options, ctx.backend = options, backend
        return result.y, result.c, result.c_last, result.y_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, c, reserve, *tensors = ctx.saved_tensors
        problem = Problem(*tensors, *ctx.options)
        needs = ctx.needs_input_grad[3:]
        with _unrounded(problem):
            found = get(ctx.backend).backward(problem, y, c, reserve, *grads[:4], input_gradient=needs[0])
        wanted = [g if need else None for g, need in zip(found, needs[: len(found)], strict=True)]
        return None, None, None, *wanted, *[None] * (TENSOR_FIELDS - len(wanted))


def sequence(problem: Problem, backend: str, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(y, c, c_last, y_last)``, differentiable."""
    values = tuple(getattr(problem, field.name) for field in dataclasses.fields(problem))
    return _Sequence.apply(values[TENSOR_FIELDS:], backend, save, *values[:TENSOR_FIELDS])  # pyright: ignore[reportReturnType]
