"""Search for higher thresholds, layer by layer, as far as a loss allows. Nothing is trained."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from egru.compress.batches import Loss, Measurement, check_batches, check_number, measure
from egru.compress.thresholds import raise_thresholds, restored_thresholds
from egru.layers import event_directions

STEP = 0.05
"""Difference between two thresholds that the search tries."""
LOWEST_FLOOR = -1.0
"""Where the search starts at the lowest. States of a GRU exceed lower thresholds at every step."""


class FloorTrial(Protocol):
    """What the search reads of a trial."""

    @property
    def floor(self) -> tuple[float, ...]:
        """Smallest threshold, one per layer and direction."""
        ...

    @property
    def loss(self) -> float:
        """Loss with these thresholds."""
        ...

    @property
    def forward_macs(self) -> float:
        """Multiply-accumulates per step with these thresholds."""
        ...


Trial = TypeVar("Trial", bound=FloorTrial)


@dataclasses.dataclass(frozen=True)
class MeasuredFloor:
    """Thresholds of a model and their measurement.

    Attributes:
        floor: Smallest threshold, one per layer and direction.
        measurement: Loss and activity with these thresholds.
    """

    floor: tuple[float, ...]
    measurement: Measurement

    @property
    def loss(self) -> float:
        """Mean loss over the batches."""
        return self.measurement.loss

    @property
    def forward_macs(self) -> float:
        """Multiply-accumulates per step."""
        return self.measurement.activity.forward_macs

    def __str__(self) -> str:
        return f"floors {' '.join(f'{value:g}' for value in self.floor)}: {self.measurement}"


@dataclasses.dataclass(frozen=True)
class Quietening:
    """Result of :func:`quieten`.

    Attributes:
        before: The model before; its floors are below all thresholds.
        after: The chosen thresholds.
        trials: All thresholds that were measured, in this order.
    """

    before: MeasuredFloor
    after: MeasuredFloor
    trials: tuple[MeasuredFloor, ...]

    def __str__(self) -> str:
        return f"before: {self.before}\nafter:  {self.after}"


def quieten(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    within: float = 1e-3,
    *,
    log: Callable[[str], None] = print,
) -> Quietening:
    """Raise the thresholds of any model while a loss allows it, in place.

    Thresholds below a floor are raised to it, one floor per layer and direction. The search goes from the last layer to
    the first in steps of 0.05 and raises a floor while the loss is at most ``within`` above the lowest loss so far.
    :func:`egru.calibrate` scales thresholds to the range of each unit instead, which suits converted networks;
    ``egru quieten`` does the same for a run.

    Args:
        model: Model with at least one event layer.
        batches: Batches for ``loss`` that were not used for training.
        loss: Function of model and batch that runs the model and returns the loss.
        within: Accepted increase of the loss.
        log: Called with one line per trial.

    Returns:
        The measurements before and after, and all trials. If nothing saves operations, the model does not change.

    Raises:
        TypeError: If ``batches``, ``loss`` or ``within`` have the wrong type.
        ValueError: If the model has no event layer, there are no batches, or ``within`` is negative.

    Example:
        >>> import torch, egru
        >>> layer = egru.EGRU(4, 16)
        >>> batches = [torch.randn(20, 8, 4)]
        >>> loss = lambda layer, x: layer(x)[0].square().mean()
        >>> result = egru.compress.quieten(layer, batches, loss, within=0.01, log=lambda line: None)
        >>> result.after.forward_macs <= result.before.forward_macs
        True
    """
    check_number(within, "within", "quieten")
    check_batches(batches, "batches", "quieten")
    if not within >= 0:
        raise ValueError(f"quieten: within must be non-negative, got {within!r}")
    start = current_floors(model)
    if not start:
        raise ValueError(f"quieten: the model must have an event layer, got {type(model).__name__}")
    batches = list(batches)
    trials: list[MeasuredFloor] = []

    def attempt(floor: Sequence[float]) -> MeasuredFloor:
        with restored_thresholds(model):
            if trials:  # the first trial is the unchanged model
                raise_thresholds(model, floor)
            trials.append(MeasuredFloor(tuple(floor), measure(model, batches, loss, "quieten")))
        log(str(trials[-1]))
        return trials[-1]

    before = attempt(start)
    after = search(attempt, before, within)
    if after is not before:
        raise_thresholds(model, after.floor)
    return Quietening(before, after, tuple(trials))


def current_floors(model: nn.Module) -> tuple[float, ...]:
    """Return the highest floors on the grid of the search that change nothing, one per layer and direction."""
    lowest = [layer.weights(direction).theta.min().item() for _, layer, direction in event_directions(model)]
    return tuple(round(STEP * math.floor(max(LOWEST_FLOOR, value) / STEP), 6) for value in lowest)


def search(attempt: Callable[[Sequence[float]], Trial], start: Trial, within: float) -> Trial:
    """Raise floors by :data:`STEP`, one layer at a time from the last to the first, until nothing saves more MACs.

    Args:
        attempt: Measures floors, one per layer.
        start: The trial to start from.
        within: Accepted difference to the lowest loss so far, which higher thresholds may lower.

    Returns:
        The last accepted trial.
    """
    tried = {start.floor: start}
    best, previous, lowest = start, None, start.loss
    while best is not previous:
        previous = best
        for layer in reversed(range(len(start.floor))):
            while (higher := round(best.floor[layer] + STEP, 6)) < 1:
                floor = (*best.floor[:layer], higher, *best.floor[layer + 1 :])
                trial = tried[floor] = tried.get(floor) or attempt(floor)
                if not (trial.loss <= lowest + within and trial.forward_macs <= best.forward_macs):
                    break
                best, lowest = trial, min(lowest, trial.loss)
    return best
