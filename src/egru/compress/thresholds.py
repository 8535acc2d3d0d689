"""Higher thresholds, after training: fewer events."""

from collections.abc import Sequence

import torch
from torch import nn

from egru.layers.stack import EventRNN


@torch.no_grad()
def raise_thresholds(model: nn.Module, floor: float | Sequence[float]) -> None:
    """Lift every threshold of ``model`` below ``floor`` to it, in place; ``floor`` for all layers or one a layer.

    Small values fall silent, and what is left of an event stays: where it clears its unit by the threshold
    (``reset="threshold"``), ``reset_scale`` is lowered unit by unit, so that it clears what it cleared before.
    """
    layers = [
        (module, name) for module in model.modules() if isinstance(module, EventRNN) for name in module.thresholds()
    ]
    if not layers:
        raise ValueError(f"raise_thresholds: needs a model with event layers, got {type(model).__name__}")
    floors = list(floor) if isinstance(floor, Sequence) else [floor] * len(layers)
    if len(floors) != len(layers):
        raise ValueError(f"raise_thresholds: floor must be one number or {len(layers)} of them, got {floor!r}")
    lifted: dict[EventRNN, list[torch.Tensor]] = {}
    for (module, name), each in zip(layers, floors, strict=True):
        before = module.thresholds()[name].clone()
        parameter = module.get_parameter("threshold" if name == "cell" else f"threshold_{name}")
        module.threshold_config.raise_(parameter, each)
        after = module.thresholds()[name]
        same = torch.where(after > before, before / after, 1.0)
        lifted.setdefault(module, []).append(module.reset_scales()[name] * same)
    for module, scales in lifted.items():
        if module.reset == "threshold":
            module.reset_scale = torch.cat(scales)
