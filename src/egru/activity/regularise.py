"""The paper's two activity regularisers, as functions of a state and around a whole model."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from egru.activity.pieces import pieces
from egru.events import Surrogate
from egru.layers import EventRNN, Record, event_layers


def _real(values: Tensor, lengths: Tensor) -> Tensor:
    """Which entries of ``(T, B, H)`` are not padding, to be broadcast."""
    return (torch.arange(values.shape[0], device=values.device)[:, None] < lengths)[..., None]


def _entries(values: Tensor, lengths: Tensor | None) -> int | Tensor:
    """How many are not padding."""
    return values.numel() if lengths is None else lengths.sum() * values.shape[-1]


def _wide(values: Tensor) -> torch.dtype:
    """What counts and sums fit into: float16 ends at 65504."""
    return torch.promote_types(values.dtype, torch.float32)


def _mean(values: Tensor, lengths: Tensor | None) -> Tensor:
    """Mean over the real entries of ``(T, B, H)``."""
    if lengths is None:
        return values.mean()
    total = torch.where(_real(values, lengths), values, 0).sum(dtype=_wide(values))
    return (total / _entries(values, lengths)).to(values.dtype)


class _Rate(torch.autograd.Function):
    """``mean([c > theta])`` with the surrogate's slope as derivative, piece by piece: states may fill gigabytes."""

    @staticmethod
    def forward(c: Tensor, theta: Tensor, surrogate: Surrogate, lengths: Tensor | None) -> Tensor:
        real = None if lengths is None else _real(c, lengths)
        fired = c.new_zeros((), dtype=torch.int64)
        for piece in pieces(c):
            fired += _masked(c[piece] > theta, real, piece).sum()
        return (fired.to(_wide(c)) / _entries(c, lengths)).to(c.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        c, theta, ctx.surrogate, lengths = inputs
        ctx.save_for_backward(c, theta, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        c, theta, lengths = ctx.saved_tensors
        real = None if lengths is None else _real(c, lengths)
        each = grads[0].to(_wide(c)) / _entries(c, lengths)
        if torch.is_grad_enabled():  # for derivatives of the derivative
            grad = _masked(ctx.surrogate.slope(c, theta), real, slice(None)) * each
            return grad, -grad.sum_to_size(theta.shape), None, None
        grad, total = torch.empty_like(c), torch.zeros_like(theta, dtype=_wide(theta))
        for piece in pieces(c):
            grad[piece] = _masked(ctx.surrogate.slope(c[piece], theta), real, piece) * each
            total -= grad[piece].to(total.dtype).sum_to_size(theta.shape)
        return grad, total.to(theta.dtype), None, None


def _masked(values: Tensor, real: Tensor | None, piece: slice) -> Tensor:
    """``values`` of a piece, zero at padding."""
    return values if real is None else torch.where(real[piece], values, torch.zeros_like(values))


def rate_loss(
    c: Tensor,
    theta: Tensor,
    surrogate: Surrogate,
    *,
    target: float = 0.05,
    squared: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """``mean(e) - target``, differentiable through the surrogate; squared as in EvNN on request."""
    excess = _Rate.apply(c, theta, surrogate, lengths) - target  # pyright: ignore[reportOptionalOperand]
    return excess**2 if squared else excess


def state_loss(c: Tensor, theta: Tensor, *, margin: float = 0.05, lengths: Tensor | None = None) -> Tensor:
    """``mean(c - (theta - margin))`` with the threshold held fixed: pulls states below their thresholds."""
    return _mean(c - (theta.detach() - margin), lengths)


class ActivityLoss:
    """Adds up both regularisers over the event layers of ``model`` while it is active.

    ::

        with egru.ActivityLoss(model, rate=0.01, state=0.05) as activity:
            loss = criterion(model(x), target) + activity.value

    ``rate`` and ``state`` are the paper's ``w_reg`` and ``w_v``. Entering again starts from zero.

    A layer inside ``torch.utils.checkpoint`` is regularised only with ``use_reentrant=False`` and ``backward()`` inside
    the context. With ``use_reentrant=True`` its forward pass leaves no graph, so that its terms would change nothing:
    in training mode a pass without gradients is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rate: float = 0.01,
        state: float = 0.05,
        target: float = 0.05,
        margin: float = 0.05,
        squared: bool = False,
    ) -> None:
        self.layers = [layer for _, layer in event_layers(model)]
        if not self.layers:
            raise ValueError("ActivityLoss: the model has no event layer")
        self.rate, self.state, self.target, self.margin, self.squared = rate, state, target, margin, squared
        self.value: Tensor | float = 0.0
        self._undo: list[Callable[[], None]] = []

    def _observe(self, layer: EventRNN, record: Record) -> None:
        if layer.training and not torch.is_grad_enabled():
            raise RuntimeError(
                f"ActivityLoss: {type(layer).__name__} ran in training mode without gradients, so its activity would "
                "not be regularised; use torch.utils.checkpoint with use_reentrant=False and call backward() inside "
                "the context, or call model.eval() to look only"
            )
        c, theta, lengths = record.c, record.theta, record.lengths
        if self.rate:
            surrogate, target = record.surrogate, self.target
            rate = rate_loss(c, theta, surrogate, target=target, squared=self.squared, lengths=lengths)
            self.value = self.value + self.rate * rate
        if self.state:
            self.value = self.value + self.state * state_loss(c, theta, margin=self.margin, lengths=lengths)

    def __enter__(self) -> "ActivityLoss":
        if self._undo:
            raise RuntimeError("ActivityLoss: already active")
        self.value = 0.0
        self._undo = [layer.observe(functools.partial(self._observe, layer)) for layer in self.layers]
        return self

    def __exit__(self, *exception: object) -> None:
        while self._undo:
            self._undo.pop()()
