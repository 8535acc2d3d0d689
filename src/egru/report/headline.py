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


def answer(runs: Sequence[RunReport]) -> str:
    """How much compute the events saved: the page's first line."""
    savings = sorted(1 - 1 / run.forward_saving for run in runs if run.event_layers)
    if not savings:
        return "No events, so no compute was saved."
    least, most = (format.percent(saving, 0) for saving in (savings[0], savings[-1]))
    return f"Events saved {least if least == most else f'{least} to {most}'} of the compute."


def score(run: RunReport) -> str:
    """On the test set, in words."""
    if run.test_perplexity is not None:
        return f"test perplexity {run.test_perplexity:.1f}"
    return f"test accuracy {format.percent(run.test_accuracy)}"


def _comparison(run: RunReport, other: RunReport) -> str:
    if run.test_perplexity is not None and other.test_perplexity is not None:
        return f"at a test perplexity of {run.test_perplexity:.1f} ({other.name} {other.test_perplexity:.1f})"
    return f"at a test accuracy {format.points(run.test_accuracy - other.test_accuracy, other.name)}"


def sentence(run: RunReport, other: RunReport | None) -> str:
    """What the events saved, and what they cost in accuracy."""
    activity = run.activity
    text = (
        f"{run.name} took {format.count(activity.forward_macs)} instead of {format.count(activity.dense_forward_macs)} "
        f"multiply-accumulates a forward step and skipped {format.percent(1 - 1 / run.backward_saving, 0)} of the "
        "backward pass"
    )
    return f"{text}, {score(run) if other is None else _comparison(run, other)}."


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
