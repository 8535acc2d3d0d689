"""The paper's two activity regularisers, for one layer and for a whole model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from egru.activity.chunks import time_chunks
from egru.events import Surrogate
from egru.layers import Record, event_layers


def _valid(values: Tensor, lengths: Tensor) -> Tensor:
    """Return a mask of the steps of ``(T, B, H)`` that are not padding, ``(T, B, 1)``."""
    return (torch.arange(values.shape[0], device=values.device)[:, None] < lengths)[..., None]


def _count_valid(values: Tensor, lengths: Tensor | None) -> int | Tensor:
    """Return the number of entries of ``(T, B, H)`` that are not padding."""
    return values.numel() if lengths is None else lengths.sum() * values.shape[-1]


def _sum_dtype(values: Tensor) -> torch.dtype:
    """Return a dtype for counts and sums, at least float32: float16 ends at 65504."""
    return torch.promote_types(values.dtype, torch.float32)


def _mean(values: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the mean over the entries of ``(T, B, H)`` that are not padding."""
    if lengths is None:
        return values.mean()
    total = torch.where(_valid(values, lengths), values, 0).sum(dtype=_sum_dtype(values))
    return (total / _count_valid(values, lengths)).to(values.dtype)


class _Rate(torch.autograd.Function):
    """``mean([c > theta])`` with the slope of the surrogate as derivative, computed in chunks to save memory."""

    @staticmethod
    def forward(c: Tensor, theta: Tensor, surrogate: Surrogate, lengths: Tensor | None) -> Tensor:
        valid = None if lengths is None else _valid(c, lengths)
        events = c.new_zeros((), dtype=torch.int64)
        for chunk in time_chunks(c):
            events += _masked(c[chunk] > theta, valid, chunk).sum()
        return (events.to(_sum_dtype(c)) / _count_valid(c, lengths)).to(c.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        c, theta, ctx.surrogate, lengths = inputs
        ctx.save_for_backward(c, theta, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        c, theta, lengths = ctx.saved_tensors
        valid = None if lengths is None else _valid(c, lengths)
        weight = grads[0].to(_sum_dtype(c)) / _count_valid(c, lengths)
        if torch.is_grad_enabled():  # double backward: the result must be differentiable
            grad = _masked(ctx.surrogate.slope(c, theta), valid, slice(None)) * weight
            return grad, -grad.sum_to_size(theta.shape), None, None
        grad, total = torch.empty_like(c), torch.zeros_like(theta, dtype=_sum_dtype(theta))
        for chunk in time_chunks(c):
            grad[chunk] = _masked(ctx.surrogate.slope(c[chunk], theta), valid, chunk) * weight
            total -= grad[chunk].to(total.dtype).sum_to_size(theta.shape)
        return grad, total.to(theta.dtype), None, None


def _masked(values: Tensor, valid: Tensor | None, chunk: slice) -> Tensor:
    """Return the values of a chunk with padding set to zero."""
    return values if valid is None else torch.where(valid[chunk], values, torch.zeros_like(values))


def rate_loss(
    c: Tensor,
    theta: Tensor,
    surrogate: Surrogate,
    *,
    target: float = 0.05,
    squared: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the event rate above a target, ``mean(e) - target``, differentiable through the surrogate.

    Args:
        c: States that were compared with the threshold, ``(T, B, H)``: :meth:`egru.layers.Record.magnitude`.
        theta: Thresholds, ``(H,)``.
        surrogate: Gradient of the step function.
        target: Target rate. Default: 0.05.
        squared: If True, return the square, as in EvNN. Default: False.
        lengths: Number of valid steps per sequence, ``(B,)``. If None, no sequence is padded.

    Returns:
        The loss, 0-dim.

    Example:
        >>> c, theta = torch.tensor([[[0.2, 0.8]]]), torch.tensor([0.5, 0.5])  # one of two units emits an event
        >>> egru.activity.rate_loss(c, theta, egru.Surrogate())
        tensor(0.4500)
    """
    excess = _Rate.apply(c, theta, surrogate, lengths) - target  # pyright: ignore[reportOptionalOperand]
    return excess**2 if squared else excess


def state_loss(c: Tensor, theta: Tensor, *, margin: float = 0.05, lengths: Tensor | None = None) -> Tensor:
    """Return ``mean(c - (theta - margin))``, which pulls states below their thresholds.

    The thresholds receive no gradient.

    Args:
        c: States that were compared with the threshold, ``(T, B, H)``: :meth:`egru.layers.Record.magnitude`.
        theta: Thresholds, ``(H,)``.
        margin: Distance below the threshold. Default: 0.05.
        lengths: Number of valid steps per sequence, ``(B,)``. If None, no sequence is padded.

    Returns:
        The loss, 0-dim.

    Example:
        >>> c, theta = torch.tensor([[[0.2, 0.8]]]), torch.tensor([0.5, 0.5])
        >>> egru.activity.state_loss(c, theta)
        tensor(0.0500)
    """
    return _mean(c - (theta.detach() - margin), lengths)


class ActivityLoss:
    """Sums both regularisers over the event layers of a model, inside a context.

    ``value`` is ``rate * rate_loss + state * state_loss``, summed over all forward passes inside the context. Entering
    the context sets it to zero.

    A layer inside ``torch.utils.checkpoint`` requires ``use_reentrant=False`` and ``backward()`` inside the context.
    With ``use_reentrant=True`` its forward pass has no graph and its terms would have no effect, so a pass without
    gradients raises an error in training mode.

    Args:
        model: Model with at least one event layer.
        rate: Weight of :func:`rate_loss`, the paper's ``w_reg``. Default: 0.01.
        state: Weight of :func:`state_loss`, the paper's ``w_v``. Default: 0.05.
        target: Target of :func:`rate_loss`. Default: 0.05.
        margin: Margin of :func:`state_loss`. Default: 0.05.
        squared: Whether to square :func:`rate_loss`, as in EvNN. Default: False.

    Raises:
        ValueError: If the model has no event layer.

    Example:
        >>> import torch, egru
        >>> model = egru.EGRU(3, 8)
        >>> with egru.ActivityLoss(model, rate=0.01, state=0.05) as activity:
        ...     y, _ = model(torch.randn(20, 2, 3))
        ...     loss = y.square().mean() + activity.value
        >>> loss.backward()
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
            raise ValueError(f"ActivityLoss: the model must have an event layer, got {type(model).__name__}")
        self.rate, self.state, self.target, self.margin, self.squared = rate, state, target, margin, squared
        self.value: Tensor | float = 0.0
        self._removers: list[Callable[[], None]] = []

    def _observe(self, record: Record) -> None:
        if record.layer.training and not torch.is_grad_enabled():
            raise RuntimeError(
                f"ActivityLoss: {type(record.layer).__name__} ran in training mode without gradients, so its activity "
                "would not be regularised; use torch.utils.checkpoint with use_reentrant=False and call backward() "
                "inside the context, or call model.eval() to compute the value without gradients"
            )
        c, theta, lengths = record.magnitude(), record.theta, record.lengths
        if self.rate:
            surrogate, target = record.surrogate, self.target
            rate = rate_loss(c, theta, surrogate, target=target, squared=self.squared, lengths=lengths)
            self.value = self.value + self.rate * rate
        if self.state:
            self.value = self.value + self.state * state_loss(c, theta, margin=self.margin, lengths=lengths)

    def __enter__(self) -> "ActivityLoss":
        if self._removers:
            raise RuntimeError("ActivityLoss: already active; leave the context before entering it again")
        self.value = 0.0
        self._removers = [layer.observe(self._observe) for layer in self.layers]
        return self

    def __exit__(self, *exception: object) -> None:
        while self._removers:
            self._removers.pop()()
