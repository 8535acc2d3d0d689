"""Helpers for autograd functions: recognise plain calls and transforms, refuse second derivatives, bound gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

SECOND_DERIVATIVES = "egru: second derivatives are not supported"


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active: ``torch.func.jvp``, ``jacfwd`` or ``forward_ad``."""
    return forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def in_transform() -> bool:
    """Return whether a ``torch.func`` transform or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or in_forward_mode()  # pyright: ignore[reportPrivateUsage]


def is_plain(x: Tensor) -> bool:
    """Return whether this is an ordinary eager call: no tracing, no transform, no tensor subclass."""
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()  # pyright: ignore[reportPrivateUsage]
        and not in_transform()
        and torch._C._len_torch_dispatch_stack() == 0  # pyright: ignore[reportPrivateUsage]
    )


class _SecondDerivative(torch.autograd.Function):
    """The identity on the first ``count`` tensors, connected to all of them, with a backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(SECOND_DERIVATIVES)


def refuse_double_backward(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the ``backward`` of an autograd function so that differentiating its gradients raises an error.

    ``torch.autograd.function.once_differentiable`` raises only if the incoming gradients require gradients. Otherwise
    a loss on the gradients would be treated as a constant, without an error. The gradients are therefore connected to
    everything they depend on: the incoming gradients and the saved tensors.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if in_forward_mode() and any(_has_tangent(grad) for grad in grads):
            raise RuntimeError("egru: forward-mode differentiation of a backward pass is not supported")
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        present = [gradient.detach() for gradient in gradients if gradient is not None]
        sources: Sequence[Any] = (*grads, *ctx.saved_tensors)
        connected = iter(_SecondDerivative.apply(len(present), *present, *(x for x in sources if _requires_grad(x))))
        return tuple(None if gradient is None else next(connected) for gradient in gradients)

    return guarded


def _requires_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


class _BoundedGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bound: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.bound = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.clamp(-ctx.bound, ctx.bound), None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("egru: recurrent_clip bounds gradients of the backward pass and has no forward-mode form")


def bounded_gradient(x: Tensor, bound: float) -> Tensor:
    """Return ``x`` unchanged and clamp its gradient element-wise to ``[-bound, bound]``."""
    return _BoundedGradient.apply(x, bound)  # pyright: ignore[reportReturnType]
