"""The sequence operation as a ``torch.library`` operator: opaque to compilers and exporters, differentiable.

``egru::sequence`` and ``egru::sequence_backward`` only choose a kernel and call it; the mathematics is in the kernels.
"""

from typing import Any

import torch
from torch import Tensor

from egru.events import Surrogate
from egru.kernels.finite import check_finite, check_result
from egru.kernels.problem import TENSOR_FIELDS, Problem
from egru.kernels.registry import get


@torch.library.custom_op("egru::sequence", mutates_args=())
def sequence(
    input: Tensor,
    c0: Tensor,
    y0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    theta: Tensor,
    reset_scale: Tensor,
    keep: Tensor | None,
    lengths: Tensor | None,
    reset: str,
    reset_gate: str,
    width: float,
    height: float,
    bounded: bool,
    shape: str,
    precision: str,
    lean: bool,
    recurrent_clip: float,
    backend: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = Problem(
        input, c0, y0, weight_ih, weight_hh, bias_ih, bias_hh, theta, reset_scale, keep, lengths,
        reset, reset_gate, Surrogate(width, height, bounded, shape), precision, lean, recurrent_clip,
    )  # fmt: skip
    check_finite(problem.input, problem.c0, problem.y0, problem.theta)
    with torch.autocast(input.device.type, enabled=False):
        result = get(backend).forward(problem, save)
    check_result(result.c_last)
    return result[:5]


@sequence.register_fake
def _(
    input, c0, y0, weight_ih, weight_hh, bias_ih, bias_hh, theta, reset_scale, keep, lengths,
    reset, reset_gate, width, height, bounded, shape, precision, lean, recurrent_clip,
    backend, save,
):  # fmt: skip
    problem = Problem(
        input, c0, y0, weight_ih, weight_hh, bias_ih, bias_hh, theta, reset_scale, keep, lengths,
        reset, reset_gate, Surrogate(width, height, bounded, shape), precision, lean, recurrent_clip,
    )  # fmt: skip
    y = c0.new_empty(input.shape[0], *c0.shape)
    reserve = c0.new_empty(get(backend).reserve_shape(problem) if save else (0,))
    return y, torch.empty_like(y), torch.empty_like(c0), torch.empty_like(c0), reserve


@torch.library.custom_op("egru::sequence_backward", mutates_args=())
def sequence_backward(
    grad_y: Tensor | None,
    grad_c: Tensor | None,
    grad_c_last: Tensor | None,
    grad_y_last: Tensor | None,
    y: Tensor | None,
    c: Tensor,
    reserve: Tensor,
    input: Tensor,
    c0: Tensor,
    y0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    theta: Tensor,
    reset_scale: Tensor,
    keep: Tensor | None,
    lengths: Tensor | None,
    reset: str,
    reset_gate: str,
    width: float,
    height: float,
    bounded: bool,
    shape: str,
    precision: str,
    lean: bool,
    recurrent_clip: float,
    backend: str,
    input_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = Problem(
        input, c0, y0, weight_ih, weight_hh, bias_ih, bias_hh, theta, reset_scale, keep, lengths,
        reset, reset_gate, Surrogate(width, height, bounded, shape), precision, lean, recurrent_clip,
    )  # fmt: skip
    with torch.autocast(input.device.type, enabled=False):
        grads = get(backend).backward(problem, y, c, reserve, grad_y, grad_c, grad_c_last, grad_y_last, input_gradient)
    first = input.new_empty(0) if grads.input is None else grads.input
    return first, *grads[1:]


@sequence_backward.register_fake
def _(
    grad_y, grad_c, grad_c_last, grad_y_last, y, c, reserve, input, c0, y0, weight_ih, weight_hh, bias_ih, bias_hh,
    theta, reset_scale, keep, lengths, reset, reset_gate, width, height, bounded, shape, precision, lean,
    recurrent_clip, backend, input_gradient,
):  # fmt: skip
    bias = weight_hh.new_empty(weight_hh.shape[0])
    return (
        torch.empty_like(input) if input_gradient else input.new_empty(0),
        torch.empty_like(c0),
        torch.empty_like(y0),
        torch.empty_like(weight_ih),
        torch.empty_like(weight_hh),
        bias,
        torch.empty_like(bias),
        torch.empty_like(theta),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    if not inputs[-1]:
        raise RuntimeError("egru::sequence: gradients need save=True")
    ctx.set_materialize_grads(False)
    y, c, _, _, reserve = output
    ctx.save_for_backward(y if get(inputs[-2]).reads_y else None, c, reserve, *inputs[:TENSOR_FIELDS])
    ctx.options = inputs[TENSOR_FIELDS:-1]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    needs = ctx.needs_input_grad
    out: list[Tensor | None] = list(sequence_backward(*grads[:4], *saved, *ctx.options, needs[0]))
    if not needs[0]:
        out[0] = None
    bias_ih, bias_hh = saved[3 + 5], saved[3 + 6]
    if bias_ih is None:
        out[5] = None
    if bias_hh is None:
        out[6] = None
    return *out, *[None] * (TENSOR_FIELDS - len(out) + len(ctx.options) + 1)


sequence.register_autograd(_backward, setup_context=_setup_context)
