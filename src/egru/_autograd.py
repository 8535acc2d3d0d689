"""Refuse second derivatives of autograd functions that have only first ones."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def refuse_double_backward(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the ``backward`` of an autograd function so that differentiating its gradients raises an error.

    ``torch.autograd.function.once_differentiable`` raises only if the incoming gradients require gradients. Otherwise
    a loss on the gradients would silently be treated as a constant.
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
