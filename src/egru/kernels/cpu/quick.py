"""The common case of a GRU on the CPU: all checks of tensors in one call of the core, and little Python.

One step of a small layer takes the core about a microsecond. A general call has an overhead of 40 µs, because it
describes the problem, chooses a kernel and supports every option. This module runs the same kernel on the tensors of a
layer, and declines whatever needs to be converted, checked in detail or rejected.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from egru import compiled
from egru._autograd import refuse_double_backward
from egru.events import Surrogate
from egru.kernels.cpu import kernel as cpu
from egru.kernels.finite import check_arguments, check_result, check_thresholds
from egru.kernels.problem import Problem
from egru.types import Events, Reset, ResetGate

_core: Any = compiled.core
_ARGUMENTS = 8
"""Number of differentiable arguments."""

Options = tuple[ResetGate, Events, Reset, Surrogate]


def run_quick(
    tensors: tuple[Tensor | None, ...], reset_scale: Tensor, options: Options, single: bool
) -> tuple[Tensor, ...] | None:
    """Run a sequence or a single step of a GRU. Differentiable.

    The caller has excluded tracing, transforms, autocast and tensor subclasses for the input.

    Args:
        tensors: Differentiable fields of :class:`egru.kernels.Problem` in their order. A state may be ``(H,)``, which
            stands for all sequences, ``(B, H)`` or ``(1, B, H)``.
        reset_scale: Scale of the reset, 0-dim or ``(H,)``.
        options: ``(reset_gate, events, reset, surrogate)``.
        single: Whether the input is ``(B, I)``, one step of a cell, instead of ``(T, B, I)``.

    Returns:
        ``(y, c_last, y_last)`` with a final state of shape ``(1, B, H)``, or ``(c_last, y_last)`` with shape ``(B, H)``
        for a single step. None if the general route has to run the call.

    Raises:
        ValueError: If a value is not finite, or a threshold is negative although magnitudes are compared with it.
    """
    if _core is None or options[3].shape != "triangle":
        return None
    call = _core.TrainCall()
    if not call.set_problem(*tensors, reset_scale, single):
        return None
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return _apply(*tensors, reset_scale, single, options, call)
    results, _ = _forward(call, tensors, reset_scale, single, options, save=False)
    return results


def _forward(
    call: Any, tensors: Sequence[Any], reset_scale: Tensor, single: bool, options: Options, save: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Return the results and, if ``save`` is True, what the backward pass needs: outputs, states and gates."""
    _set_options(call, options)
    T, B, H = call.T, call.B, call.H
    dtype = torch.float64 if call.float64 else torch.float32
    if single:
        c_last, y_last = torch.empty(B, H, dtype=dtype), torch.empty(B, H, dtype=dtype)
        y, results = y_last, (c_last, y_last)
    else:
        c_last, y_last = torch.empty(1, B, H, dtype=dtype), torch.empty(1, B, H, dtype=dtype)
        y = cpu.empty((T, B, H), dtype)
        results = (y, c_last, y_last)
    saved: tuple[Tensor | None, ...] = ()
    c = c_last
    if save:
        c = cpu.empty((T, B, H), dtype)
        gates = cpu.empty((3 if options[0] == "before" else 4, T, -(-H // 32), B, 32), dtype)
        call.gates = gates.data_ptr()
        saved = (y if T > 1 else None, c, gates)  # a single step reads no outputs
    call.last_c = not save
    call.y, call.c = y.data_ptr(), c.data_ptr()
    call.c_last, call.y_last = c_last.data_ptr(), y_last.data_ptr()
    cpu.set_work(call, cpu.FORWARD_ROWS, cpu.limits.direct_forward)
    if options[1] != "positive":
        check_thresholds(tensors[7], options[1])
    if _core.train_forward(call):  # something is not finite
        check_arguments(_problem(tensors, reset_scale, single, options, (B, H)))
        check_result(c_last)
    return results, saved


def _set_options(call: Any, options: Options) -> None:
    reset_gate, events, reset, surrogate = options
    call.set_options(reset_gate == "after", events, reset, surrogate.bounded, surrogate.width, surrogate.height)


def _problem(
    tensors: Sequence[Any], reset_scale: Tensor, single: bool, options: Options, shape: tuple[int, int]
) -> Problem:
    """Return the call as the general route describes it."""
    x, c0, y0, weight_ih, weight_hh, bias_ih, bias_hh, theta = tensors
    reset_gate, events, reset, surrogate = options
    return Problem(
        x[None] if single else x,
        c0.expand(1, *shape)[0],
        y0.expand(1, *shape)[0],
        weight_ih,
        weight_hh,
        bias_ih,
        bias_hh,
        theta,
        reset_scale,
        keep=None,
        lengths=None,
        reset=reset,
        reset_gate=reset_gate,
        surrogate=surrogate,
        precision="",
        events=events,
    )


class _Quick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, reset_scale, single, options, call = arguments
        results, saved = _forward(call, tensors, reset_scale, single, options, save=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, reset_scale, *saved)
        ctx.single, ctx.options = single, options
        return results

    @staticmethod
    @refuse_double_backward
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        tensors, (reset_scale, y, c, gates) = saved[:_ARGUMENTS], saved[_ARGUMENTS:]
        grad_y, grad_c_last, grad_y_last = (None, *grads) if ctx.single else grads
        call = _core.TrainCall()
        if not call.set_problem(*tensors, reset_scale, ctx.single):
            return _general_backward(ctx, (grad_y, grad_c_last, grad_y_last))
        _set_options(call, ctx.options)
        call.y, call.c, call.gates = 0 if y is None else y.data_ptr(), c.data_ptr(), gates.data_ptr()
        alive: list[Tensor] = []  # copies whose addresses the call contains
        if grad_y is not None:
            if grad_y.stride(2) != 1:
                grad_y = grad_y.contiguous()
                alive.append(grad_y)
            call.grad_y, call.grad_y_t, call.grad_y_b = grad_y.data_ptr(), grad_y.stride(0), grad_y.stride(1)
        call.grad_c_last, call.grad_y_last = _address(grad_c_last, alive), _address(grad_y_last, alive)
        x, weight_ih, weight_hh = tensors[0], tensors[3], tensors[4]
        dtype, state = x.dtype, needed[1] or needed[2]
        gradients: list[Tensor | None] = [
            cpu.empty(tuple(x.shape), dtype) if needed[0] else None,
            torch.empty(call.B, call.H, dtype=dtype) if state else None,
            torch.empty(call.B, call.H, dtype=dtype) if state else None,
            cpu.empty(tuple(weight_ih.shape), dtype),
            cpu.empty(tuple(weight_hh.shape), dtype),
            torch.empty(3 * call.H, dtype=dtype),
            torch.empty(3 * call.H, dtype=dtype),
            torch.empty(call.H, dtype=dtype),
        ]
        call.grad_input, call.grad_c0, call.grad_y0, call.grad_weight_ih, call.grad_weight_hh = (
            0 if gradient is None else gradient.data_ptr() for gradient in gradients[:5]
        )
        call.grad_bias_ih, call.grad_bias_hh, call.grad_theta = (
            gradient.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            for gradient in gradients[5:]
        )
        cpu.set_work(call, cpu.BACKWARD_ROWS, cpu.limits.direct_backward)
        _core.train_backward(call)
        return _match(gradients, tensors, needed)


def _address(x: Tensor | None, alive: list[Tensor]) -> int:
    if x is None:
        return 0
    if not x.is_contiguous():
        x = x.contiguous()
        alive.append(x)
    return x.data_ptr()


def _match(gradients: Sequence[Any], tensors: Sequence[Any], needed: Sequence[bool]) -> tuple[Any, ...]:
    """Return the gradients that are needed in the shapes of their tensors, and None for the other arguments."""
    result: list[Any] = [None] * len(needed)
    for i in range(_ARGUMENTS):
        if needed[i]:
            result[i] = gradients[i].view(tensors[i].shape) if i in (1, 2) else gradients[i]
    return tuple(result)


def _general_backward(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Run the backward pass on saved tensors that are stored differently now, for example after a hook moved them."""
    saved, needed, single = ctx.saved_tensors, ctx.needs_input_grad, ctx.single
    tensors, (reset_scale, y, c, gates) = saved[:_ARGUMENTS], saved[_ARGUMENTS:]
    problem = _problem(tensors, reset_scale, single, ctx.options, tuple(c.shape[1:]))
    grad_y, grad_c_last, grad_y_last = grads
    gradients = cpu.CPUKernel().backward(
        problem,
        y if y is None else y.contiguous(),
        c.contiguous(),
        gates.contiguous(),
        grad_y,
        None,
        grad_c_last,
        grad_y_last,
        needed[0],
        needed[1] or needed[2],
    )
    if single and gradients.input is not None:
        gradients = gradients._replace(input=gradients.input[0])
    return _match(gradients, tensors, needed)


# Function.apply without its handling of functorch transforms, which the caller has excluded.
_apply: Any = super(torch.autograd.Function, _Quick).apply  # pyright: ignore
