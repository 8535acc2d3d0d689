"""Helpers for autograd functions: refuse second derivatives, bound gradients."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def refuse_double_backward(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the ``backward`` of an autograd function so that differentiating its gradients raises an error.

    ``torch.autograd.function.once_differentiable`` raises only if the incoming gradients require gradients. Otherwise
    a loss on the gradients would be treated as a constant, without an error.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        functions: Any = torch._C._functions  # pyright: ignore[reportAttributeAccessIssue]
        refuse = functions.DelayedError("egru: second derivatives are not supported", len(gradients))
        return refuse(*(None if gradient is None else gradient.detach().requires_grad_() for gradient in gradients))

    return guarded


class _BoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.clamp(-ctx.bound, ctx.bound), None


def bounded_gradient(x: Tensor, bound: float) -> Tensor:
    """Return ``x`` unchanged and clamp its gradient element-wise to ``[-bound, bound]``."""
    return _BoundedGradient.apply(x, bound)  # pyright: ignore[reportReturnType]
