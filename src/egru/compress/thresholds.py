"""Raising of thresholds after training, for fewer events."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from egru.layers import EventRNN, event_directions


@torch.no_grad()
def raise_thresholds(model: nn.Module, floor: float | Sequence[float]) -> None:
    """Raise every threshold of a model that is below a floor to the floor, in place.

    Small events disappear; events above the floor stay, and clear the same amount as before. With
    ``reset="threshold"`` the cleared amount is the threshold, so ``reset_scale`` of the affected units is changed. The
    layer then has one scale per unit, which CUDA kernels do not support.

    Args:
        model: Model with at least one event layer.
        floor: Smallest threshold afterwards: one number, or one per layer and direction. It may be negative if the
            thresholds may (``Threshold("identity")``), as in a layer from :meth:`egru.EGRU.from_gru`.

    Raises:
        ValueError: If the model has no event layer, the number of floors does not fit, or a threshold cannot take the
            value. The model does not change.

    Example:
        >>> import egru
        >>> layer = egru.EGRU(4, 8)
        >>> egru.compress.raise_thresholds(layer, 0.4)
        >>> bool((layer.thresholds()["l0"] > 0.39).all())
        True
    """
    directions = [(layer, direction) for _, layer, direction in event_directions(model)]
    if not directions:
        raise ValueError(f"raise_thresholds: the model must have an event layer, got {type(model).__name__}")
    floors = list(floor) if isinstance(floor, Sequence) else [floor]
    if len(floors) == 1:
        floors *= len(directions)
    if len(floors) != len(directions):
        raise ValueError(
            f"raise_thresholds: floor must be one number or a sequence of length {len(directions)}, one per layer and "
            f"direction; got {floor!r}"
        )
    for (layer, _), value in zip(directions, floors, strict=True):
        layer.threshold_config.check_floor(value)
    scales: dict[EventRNN, list[Tensor]] = {}
    for (layer, direction), value in zip(directions, floors, strict=True):
        before = layer.weights(direction).theta.clone()
        layer.threshold_config.raise_(layer.threshold_parameters()[direction.name], value)
        raised = layer.weights(direction)
        # A scale is not negative: a threshold that was raised across zero clears nothing.
        factor = torch.where(raised.theta > before, (before / raised.theta).clamp(min=0), torch.ones_like(before))
        scales.setdefault(layer, []).append(raised.reset_scale * factor)
    for layer, reduced in scales.items():
        scale = torch.cat(reduced)
        if layer.reset == "threshold" and not torch.equal(scale, layer.reset_scale.expand_as(scale)):
            layer.reset_scale = scale
