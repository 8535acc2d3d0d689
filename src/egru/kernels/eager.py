"""The eager route: an ``autograd.Function`` around the kernels.

The ``torch.library`` operator has an overhead per call that exceeds the run time of a short sequence on a GPU. This
route is used wherever nothing traces or transforms the call.
"""

from typing import Any

import torch
from torch import Tensor

from egru._autograd import refuse_double_backward
from egru.kernels import call
from egru.kernels.problem import Problem


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, *arguments: Any) -> Any:
        *other_tensors, problem, kernel = arguments
        result = call.forward(problem, kernel, save=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *call.tensors_to_save(kernel, result.y, result.c, result.reserve),
            input if result.input is None else result.input,
            *other_tensors,
        )
        ctx.options, ctx.kernel = problem.options(), kernel
        return result.y, result.c, result.c_last, result.y_last

    @staticmethod
    @refuse_double_backward
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, c, reserve, *tensors = ctx.saved_tensors
        problem = Problem(*tensors, *ctx.options)
        input_needed, c0_needed, y0_needed, *_ = ctx.needs_input_grad
        gradients = call.backward(
            problem, ctx.kernel, (y, c, reserve), grads, input_needed, state_gradient=c0_needed or y0_needed
        )
        return call.mask_gradients(gradients, ctx.needs_input_grad)


# Function.apply without its handling of functorch transforms: call.is_plain has excluded them.
_apply: Any = super(torch.autograd.Function, _Sequence).apply  # pyright: ignore


def run_eager(problem: Problem, kernel: str, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(y, c, c_last, y_last)``, differentiable if ``save`` is True."""
    if save:
        return _apply(*problem.tensors(), problem, kernel)
    result = call.forward(problem, kernel, save)
    return result.y, result.c, result.c_last, result.y_last
