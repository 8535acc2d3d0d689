"""Losses on the output of a layer whose exact gradients train it, also while units emit no events.

The gradient of a loss on event times is exact, but a unit without events has no event time and hence no gradient. A
network can therefore stop learning because its units fall silent. :func:`silence_penalty` and :func:`rate_penalty`
prevent that: both are differentiable functions of states and event times, so their gradients are exact too.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from egru.continuous.checks import positive_number
from egru.continuous.outputs import ContinuousOutput


def first_time_loss(output: ContinuousOutput, labels: Tensor, *, scale: float = 0.1) -> Tensor:
    """Return the cross-entropy of the first event times: the unit of the label should emit first.

    The scores are ``-t / scale``, where ``t`` is the first event time of each unit, or the horizon if the unit emits no
    event. Units without events receive no gradient from it: add :func:`silence_penalty`.

    Args:
        output: The output of the last layer, with one unit per class.
        labels: The class of each sample ``(B,)``, int64.
        scale: The difference of times that changes the odds by a factor of e.

    Returns:
        The mean over the batch.

    Raises:
        ValueError: If the labels do not fit the output, or ``scale`` is not positive.

    Example:
        >>> output = layer(events, horizon=4.0)
        >>> loss = first_time_loss(output, labels) + silence_penalty(output, layer.thresholds())
    """
    scale = positive_number("first_time_loss", "scale", scale)
    return F.cross_entropy(-output.first_times() / scale, _checked_labels("first_time_loss", output, labels))


def membrane_loss(output: ContinuousOutput, labels: Tensor, *, scale: float = 0.1) -> Tensor:
    """Return the cross-entropy of the states at the horizon: the unit of the label should have the largest state.

    Units whose thresholds are at least 1 never emit events, so their states are continuous functions of all
    parameters. Use such units as the last layer.

    Args:
        output: The output of the last layer, with one unit per class.
        labels: The class of each sample ``(B,)``, int64.
        scale: The difference of states that changes the odds by a factor of e.

    Returns:
        The mean over the batch.

    Raises:
        ValueError: If the labels do not fit the output, or ``scale`` is not positive.

    Example:
        >>> last = egru.continuous.ContinuousEGRU(3, 10, threshold=egru.Threshold.constant(2.0))  # never emits an event
        >>> loss = membrane_loss(last(events, horizon=4.0), labels)
        >>> loss.backward()
    """
    scale = positive_number("membrane_loss", "scale", scale)
    return F.cross_entropy(output.state.c / scale, _checked_labels("membrane_loss", output, labels))


def silence_penalty(
    output: ContinuousOutput, thresholds: Tensor, *, margin: float = 0.05, where: Tensor | None = None
) -> Tensor:
    """Return a penalty that lifts units without events to their thresholds.

    It is ``relu(margin + theta - c)`` for every unit without events, where ``c`` is its largest state at the readout
    times and the horizon, and 0 for units with events. Where a unit starts to emit events, it falls from about
    ``margin`` to 0. Elsewhere it is continuous.

    Args:
        output: The output of the layer.
        thresholds: The thresholds ``(H,)`` of the layer: ``layer.thresholds()``.
        margin: How far above its threshold a state should be. A positive margin lets the unit cross its threshold.
        where: Which units should emit events, ``(H,)`` or ``(B, H)`` bool; for example those of the labels. If None,
            all of them.

    Returns:
        The sum over units, averaged over the batch.

    Raises:
        ValueError: If a shape does not fit the output, or ``margin`` is not positive.

    Example:
        >>> loss = first_time_loss(output, labels) + 20 * silence_penalty(output, layer.thresholds())
    """
    margin = positive_number("silence_penalty", "margin", margin)
    shape = output.state.c.shape
    if thresholds.shape != shape[1:]:
        raise ValueError(
            f"silence_penalty: thresholds must have shape ({shape[1]},), one per unit of the output, "
            f"got {tuple(thresholds.shape)}"
        )
    silent = output.counts() == 0
    if where is not None:
        if where.dtype != torch.bool or where.shape not in (shape, shape[1:]):
            raise ValueError(
                f"silence_penalty: where must be a bool tensor of shape {tuple(shape)} or ({shape[1]},), "
                f"got {where.dtype} of shape {tuple(where.shape)}"
            )
        silent = silent & where
    largest = torch.cat([output.c, output.state.c[:, None]], 1).amax(1)
    return (F.relu(margin + thresholds - largest) * silent).sum(1).mean()


def rate_penalty(output: ContinuousOutput, *, low: float = 0.0, high: float = math.inf) -> Tensor:
    """Return a penalty on event rates outside ``[low, high]``.

    It is the square of the distance of :meth:`ContinuousOutput.rates`, averaged over the batch, from that interval. It
    is continuous where events move past the horizon. A unit without any events has no gradient: combine ``low`` with
    :func:`silence_penalty`.

    Args:
        output: The output of the layer.
        low: The smallest rate, in events per unit of time.
        high: The largest rate.

    Returns:
        The mean over units.

    Raises:
        ValueError: If ``low`` is negative or above ``high``.

    Example:
        >>> output = layer(events, horizon=4.0)
        >>> loss = rate_penalty(output, high=2.0)  # more than two events per unit of time are penalised
    """
    if not 0 <= low <= high:
        raise ValueError(f"rate_penalty: low and high must satisfy 0 <= low <= high, got {low!r} and {high!r}")
    rates = output.rates().mean(0)
    return (F.relu(low - rates) + F.relu(rates - high)).square().mean()


def _checked_labels(owner: str, output: ContinuousOutput, labels: Tensor) -> Tensor:
    """Return ``labels``, or raise if they are not one class per sample."""
    B, H = output.state.c.shape
    if labels.shape != (B,) or labels.dtype != torch.int64:
        raise ValueError(
            f"{owner}: labels must be an int64 tensor of shape ({B},), "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if bool(((labels < 0) | (labels >= H)).any()):
        raise ValueError(
            f"{owner}: labels must be from 0 to {H - 1}, one unit per class, got {labels.min()} to {labels.max()}"
        )
    return labels
