"""Gradients that are there once: autograd functions whose backward pass cannot be differentiated again."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Where a graph of the gradients is asked for, they refuse to be differentiated.

    torch's ``once_differentiable`` refuses only where what comes in needs gradients; otherwise a loss on the gradient
    would be a constant, without a word.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        made: Any = torch._C._functions  # pyright: ignore[reportAttributeAccessIssue]
        refuse = made.DelayedError("egru: the layers have no second derivative", len(found))
        return refuse(*(None if gradient is None else gradient.detach().requires_grad_() for gradient in found))

    return guarded
