"""The answer before the evidence: one sentence and a row of large numbers for each run with events."""

import dataclasses
from collections.abc import Sequence

from egru.report import format
from egru.report.run import RunReport


@dataclasses.dataclass(frozen=True)
class Number:
    """A large number, what it is, and what to hold it against."""

    value: str
    label: str
    detail: str
    saved: bool = False


def baseline(runs: Sequence[RunReport]) -> RunReport | None:
    """The run to compare with: the first without events."""
    return next((run for run in runs if not run.event_layers), None)


def sentence(run: RunReport, other: RunReport | None) -> str:
    """What the events saved, and what they cost in accuracy."""
    forward, backward = (1 - 1 / saving for saving in (run.forward_saving, run.backward_saving))
    text = (
        f"{run.name} skipped {format.percent(forward, 0)} of the multiply-accumulates of its forward pass and "
        f"{format.percent(backward, 0)} of its backward pass"
    )
    if other is not None:
        text += f", at a test accuracy {format.points(run.test_accuracy - other.test_accuracy, other.name)}"
    return f"{text}."


def numbers(run: RunReport, other: RunReport | None) -> list[Number]:
    """The row of large numbers."""
    activity = run.activity
    scores = f"{other.name} {format.percent(other.test_accuracy)}" if other is not None else "no dense model to compare"
    quality = Number(format.percent(run.test_accuracy), "test accuracy", scores)
    if run.test_perplexity is not None:
        words = f"{format.percent(run.test_accuracy)} of next words guessed right"
        quality = Number(f"{run.test_perplexity:.1f}", "test perplexity", words)
    return [
        quality,
        Number(
            format.percent(activity.activity_sparsity, 0),
            "silent",
            f"{format.percent(1 - activity.activity_sparsity, 0)} of units speak at a step",
        ),
        Number(
            format.times(run.forward_saving),
            "fewer MACs forward",
            _macs(activity.forward_macs, activity.dense_forward_macs, other, other and other.activity.forward_macs),
            saved=True,
        ),
        Number(
            format.times(run.backward_saving),
            "fewer MACs backward",
            _macs(activity.backward_macs, activity.dense_backward_macs, other, other and other.activity.backward_macs),
            saved=True,
        ),
        Number(
            format.joules(activity.joules),
            "energy a forward step",
            f"estimate; {format.joules(activity.dense_joules)} dense",
        ),
    ]


def _macs(used: float, dense: float, other: RunReport | None, others: float | None) -> str:
    """Used of dense, and what the other model takes where it is not the same size."""
    text = f"{format.count(used)} of {format.count(dense)} a step"
    if other is not None and others is not None and abs(others / dense - 1) > 0.02:
        text += f"; {other.name} {format.count(others)}"
    return text
