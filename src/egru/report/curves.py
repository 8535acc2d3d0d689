"""The panels of training curves: which quantity, and the limits of its axis."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from egru import format
from egru.report.run import Epoch, RunReport

ZOOM = 2.5
"""An axis is cut if that stretches the rest of the curves by at least this factor."""
EARLY = 0.25
"""Only values of this fraction of the epochs, the first ones, may be cut."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A quantity by epoch.

    Attributes:
        title: Title of the panel.
        value: Returns the quantity, or None if it was not measured.
        is_fraction: Whether the quantity is shown in percent.
        is_log: Whether the axis is logarithmic.
        better: Whether a lower or a higher value is better. The axis may be cut on the other side.
    """

    title: str
    value: Callable[[Epoch], float | None]
    is_fraction: bool = False
    is_log: bool = False
    better: Literal["low", "high"] | None = None

    def points(self, run: RunReport) -> list[tuple[int, float]]:
        """Return epoch and value of the epochs at which the quantity is finite."""
        values = ((entry.epoch, self.value(entry)) for entry in run.history)
        return [(epoch, y) for epoch, y in values if y is not None and math.isfinite(y)]

    def limits(self, runs: Sequence[RunReport]) -> tuple[float | None, float | None]:
        """Return where the axis is cut, below and above. None where it shows every value.

        The first epochs are often so bad that later differences between runs cannot be seen. The axis then shows every
        value of each run after the first quarter of its epochs, and every better one.
        """
        curves = [self.points(run) for run in runs]
        values = [y for curve in curves for _, y in curve]
        late = [y for curve in curves for _, y in curve[math.ceil(EARLY * len(curve)) :]]
        if not late or self.better is None or (self.is_log and min(values) <= 0):
            return None, None
        scale = math.log if self.is_log else float
        inverse = math.exp if self.is_log else float
        low, high = scale(min(values)), scale(max(values))
        if self.better == "low":
            cut = scale(max(late)) + 0.1 * (scale(max(late)) - low)
            return (None, inverse(cut)) if high - low > ZOOM * (cut - low) > 0 else (None, None)
        cut = scale(min(late)) - 0.1 * (high - scale(min(late)))
        return (inverse(cut), None) if high - low > ZOOM * (high - cut) > 0 else (None, None)

    def describe_cut(self, runs: Sequence[RunReport]) -> str:
        """Return a sentence about the values that the axis does not show. Empty if it shows all."""
        low, high = self.limits(runs)
        limit = low if high is None else high
        if limit is None:
            return ""
        outside = [epoch for run in runs for epoch, y in self.points(run) if (y > limit if low is None else y < limit)]
        text = format.percent(limit) if self.is_fraction else f"{limit:.3g}"
        return f"{self.title} {'above' if low is None else 'below'} {text} is cut off, up to epoch {max(outside)}."


def panels(runs: Sequence[RunReport]) -> list[Panel]:
    """Return the panels with at least one value: training loss, validation score and activity sparsity."""
    is_language = all(run.history[-1].validation_perplexity is not None for run in runs)
    score = Panel("Validation accuracy", lambda epoch: epoch.validation_accuracy, is_fraction=True, better="high")
    if is_language:
        score = Panel("Validation perplexity", lambda epoch: epoch.validation_perplexity, is_log=True, better="low")
    available = [
        Panel("Training loss", lambda epoch: epoch.train_loss, better="low"),
        score,
        Panel("Activity sparsity", lambda epoch: epoch.activity_sparsity, is_fraction=True),
    ]
    return [panel for panel in available if any(panel.points(run) for run in runs)]
