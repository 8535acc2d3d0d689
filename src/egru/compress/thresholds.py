"""Raising of thresholds after training, for fewer events."""

import contextlib
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from egru.layers import EventRNN, event_directions, event_layers

Floor = float | Tensor
"""Smallest threshold of a layer and direction: one number, or one per unit."""


@torch.no_grad()
def raise_thresholds(model: nn.Module, floor: float | Sequence[Floor]) -> None:
    """Raise every threshold of a model that is below a floor to the floor, in place.

    Small events disappear; events above the floor stay, and clear the same amount as before. With
    ``reset="threshold"`` the cleared amount is the threshold, so ``reset_scale`` of the affected units is changed. The
    layer then has one scale per unit, which CUDA kernels do not support.

    Args:
        model: Model with at least one event layer.
        floor: Smallest threshold afterwards: one number, or one per layer and direction, each a number or a tensor
            with a value per unit. It may be negative if the thresholds may (``Threshold("identity")``), as in a layer
            from :meth:`egru.EGRU.from_gru`.

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
    floors: list[Floor] = list(floor) if isinstance(floor, Sequence) else [floor]
    if len(floors) == 1:
        floors *= len(directions)
    if len(floors) != len(directions):
        raise ValueError(
            f"raise_thresholds: floor must be one number or a sequence of length {len(directions)}, one per layer and "
            f"direction; got {floor!r}"
        )
    for (layer, _), value in zip(directions, floors, strict=True):
        _check_floor(layer, value)
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


def _check_floor(layer: EventRNN, floor: Floor) -> None:
    config = layer.threshold_config
    if not isinstance(floor, Tensor):
        config.check_floor(floor)
        return
    if floor.shape != (config.size(layer.hidden_size),):
        raise ValueError(
            f"raise_thresholds: a floor per unit requires one value per threshold, {config.size(layer.hidden_size)}; "
            f"got shape {tuple(floor.shape)}"
        )
    for value in (floor.min().item(), floor.max().item()):
        config.check_floor(value)


@contextlib.contextmanager
def restored_thresholds(model: nn.Module) -> Generator[None, None, None]:
    """Restore the thresholds and reset scales of a model at the end of the context."""
    layers = [layer for _, layer in event_layers(model)]
    saved = [
        (layer, layer.reset_scale.clone(), [p.detach().clone() for p in layer.threshold_parameters().values()])
        for layer in layers
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, scale, parameters in saved:
                layer.reset_scale = scale
                for parameter, values in zip(layer.threshold_parameters().values(), parameters, strict=True):
                    parameter.copy_(values)
