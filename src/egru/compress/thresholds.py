"""Higher thresholds, after training: fewer events."""

from collections.abc import Sequence

from torch import nn

from egru.layers.stack import EventRNN


def raise_thresholds(model: nn.Module, floor: float | Sequence[float]) -> None:
    """Lift every threshold of ``model`` below ``floor`` to it, in place; ``floor`` for all layers or one a layer.

    With ``reset="none"`` an event takes nothing from the state, so that a higher threshold only silences small values
    (docs/training.md shows what that costs). With the other resets it also changes what events clear.
    """
    thresholds = [
        (module.threshold_config, parameter)
        for module in model.modules()
        if isinstance(module, EventRNN)
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("threshold")
    ]
    floors = list(floor) if isinstance(floor, Sequence) else [floor] * len(thresholds)
    if not thresholds:
        raise ValueError(f"raise_thresholds: needs a model with event layers, got {type(model).__name__}")
    if len(floors) != len(thresholds):
        raise ValueError(f"raise_thresholds: floor must be one number or {len(thresholds)} of them, got {floor!r}")
    for (config, parameter), each in zip(thresholds, floors, strict=True):
        config.raise_(parameter, each)
