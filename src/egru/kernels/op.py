"""The ``torch.library`` route: ``egru::sequence``, opaque to compilers and exporters, differentiable.

The schemas are generated from the fields of :class:`egru.kernels.problem.Problem`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from egru.kernels import call
from egru.kernels.problem import FIELDS, Backward, Problem
from egru.kernels.registry import get, warn_declined

_OUTPUTS = "Tensor y, Tensor c, Tensor c_last, Tensor y_last"
_SAVED = "Tensor? y, Tensor c, Tensor reserve"
_OUTPUT_GRADIENTS = "Tensor? grad_y, Tensor? grad_c, Tensor? grad_c_last, Tensor? grad_y_last"
_GRADIENTS = ", ".join(f"Tensor grad_{name}" for name in FIELDS.differentiable)


_library = torch.library.Library("egru", "FRAGMENT")  # a call of torch.library.custom_op takes twice as long


def _define(name: str, schema: str, function: Callable[..., Any]) -> Any:
    """Register a function as an operator for all devices, and return the operator."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))  # pyright: ignore[reportUnknownMemberType]
    _library.impl(name, function, "CompositeExplicitAutograd")  # pyright: ignore[reportUnknownMemberType]
    return getattr(torch.ops.egru, name).default


def _sequence(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *values, kernel, save = arguments
    result = call.forward(Problem.unflatten(values), kernel, save)
    return result.y, result.c, result.c_last, result.y_last, result.reserve


sequence = _define("sequence", f"({FIELDS.schema}, str kernel, bool save) -> ({_OUTPUTS}, Tensor reserve)", _sequence)


@torch.library.register_fake("egru::sequence")  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *values, kernel, save = arguments
    problem = Problem.unflatten(values)
    if kernel == "reference":
        warn_declined(problem)  # compilers cannot trace the warning in egru.kernels.registry.choose
    c0 = problem.c0
    y = c0.new_empty(problem.input.shape[0], *c0.shape)
    reserve = c0.new_empty(get(kernel).reserve_shape(problem) if save else (0,))
    return y, torch.empty_like(y), torch.empty_like(c0), torch.empty_like(c0), reserve


def _sequence_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    grad_y, grad_c, grad_c_last, grad_y_last, y, c, reserve, *values, kernel, input_gradient = arguments
    problem, grads = Problem.unflatten(values), (grad_y, grad_c, grad_c_last, grad_y_last)
    gradients = call.backward(problem, kernel, (y, c, reserve), grads, input_gradient)
    return tuple(gradients if input_gradient else gradients._replace(input=problem.input.new_empty(0)))


sequence_backward = _define(
    "sequence_backward",
    f"({_OUTPUT_GRADIENTS}, {_SAVED}, {FIELDS.schema}, str kernel, bool input_gradient) -> ({_GRADIENTS})",
    _sequence_backward,
)


@torch.library.register_fake("egru::sequence_backward")  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _(*arguments: Any) -> tuple[Tensor | None, ...]:
    _, _, _, _, _, _, _, *values, _, input_gradient = arguments
    problem = Problem.unflatten(values)
    return tuple(
        Backward(
            input=torch.empty_like(problem.input) if input_gradient else problem.input.new_empty(0),
            c0=torch.empty_like(problem.c0),
            y0=torch.empty_like(problem.y0),
            weight_ih=torch.empty_like(problem.weight_ih),
            weight_hh=torch.empty_like(problem.weight_hh),
            bias_ih=problem.weight_hh.new_empty(problem.weight_hh.shape[0]),
            bias_hh=problem.weight_hh.new_empty(problem.weight_hh.shape[0]),
            theta=torch.empty_like(problem.theta),
        )
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *values, ctx.kernel, save = inputs
    if not save:
        raise RuntimeError("egru::sequence: gradients require save=True")
    y, c, _, _, reserve = output
    problem = Problem.unflatten(values)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call.tensors_to_save(ctx.kernel, y, c, reserve), *problem.tensors())
    ctx.options = problem.options()


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *output_grads, _ = grads  # the reserve has none
    y, c, reserve, *tensors = ctx.saved_tensors
    input_needed, *_ = ctx.needs_input_grad
    values = Problem(*tensors, *ctx.options).flatten()
    gradients = sequence_backward(*output_grads, y, c, reserve, *values, ctx.kernel, input_needed)
    return call.mask_gradients(Backward(*gradients), ctx.needs_input_grad)


torch.library.register_autograd(  # pyright: ignore[reportUnknownMemberType]
    "egru::sequence", _backward, setup_context=_setup_context
)
