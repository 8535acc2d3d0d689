"""Higher thresholds, after training: fewer events."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from egru.layers import EventRNN, event_directions


@torch.no_grad()
def raise_thresholds(model: nn.Module, floor: float | Sequence[float]) -> None:
    """Lift every threshold of ``model`` below ``floor`` to it, in place; one floor for all layers, or one a layer.

    Small values fall silent, and what events clear stays as it was: where that is the threshold
    (``reset="threshold"``), ``reset_scale`` of the lifted units becomes smaller. Such a layer has no CUDA kernel.
    """
    layers = [(layer, direction) for _, layer, direction in event_directions(model)]
    if not layers:
        raise ValueError(f"raise_thresholds: needs a model with event layers, got {type(model).__name__}")
    floors = list(floor) if isinstance(floor, Sequence) else [floor]
    if len(floors) == 1:
        floors *= len(layers)
    if len(floors) != len(layers):
        raise ValueError(f"raise_thresholds: floor must be one number or {len(layers)} of them, got {floor!r}")
    for (module, _), each in zip(layers, floors, strict=True):
        module.threshold_config.check_floor(each)
    scales: dict[EventRNN, list[Tensor]] = {}
    for (module, direction), each in zip(layers, floors, strict=True):
        before = module.weights(direction).theta.clone()
        module.threshold_config.raise_(module.threshold_parameters()[direction.name], each)
        raised = module.weights(direction)
        kept = torch.where(raised.theta > before, before.clamp(min=0) / raised.theta, torch.ones_like(before))
        scales.setdefault(module, []).append(raised.reset_scale * kept)
    for module, lowered in scales.items():
        scale = torch.cat(lowered)
        if module.reset == "threshold" and not torch.equal(scale, module.reset_scale.expand_as(scale)):
            module.reset_scale = scale
