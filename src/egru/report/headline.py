"""The top of the page: a headline, one sentence per run with events, and a row of cards with the main numbers."""

import dataclasses
from collections.abc import Sequence

from egru import format
from egru.report.run import RunReport


@dataclasses.dataclass(frozen=True)
class Card:
    """One large number with its label and a line of detail. ``highlight`` marks savings."""

    value: str
    label: str
    detail: str
    highlight: bool = False


def find_baseline(run: RunReport, runs: Sequence[RunReport]) -> RunReport | None:
    """Return the run that ``run`` is compared with: the first dense one with the same data, split and kind of score."""
    return next((other for other in runs if not other.event_layers and other.task == run.task), None)


def different_tasks(runs: Sequence[RunReport]) -> str | None:
    """Say which runs cannot be compared because of their data or split. None if all can."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        groups.setdefault(run.task, []).append(run.name)
    if len(groups) == 1:
        return None
    parts = [
        f"{', '.join(names)} on the {split} split of {data or 'unnamed data'}"
        for (data, split, _), names in groups.items()
    ]
    return f"The scores of these runs cannot all be compared with each other: {'; '.join(parts)}."


def headline(runs: Sequence[RunReport]) -> str:
    """State how much forward computation the events saved."""
    savings = sorted(1 - 1 / run.forward_saving for run in runs if run.event_layers)
    if not savings:
        return "No computation was skipped."
    least, most = (format.percent(saving, 0) for saving in (savings[0], savings[-1]))
    return f"Events saved {least if least == most else f'{least} to {most}'} of the forward computation."


def score_text(run: RunReport) -> str:
    """Name and value of the score."""
    return f"{run.split} {run.score.name} of {run.score.text}"


def summary(run: RunReport, baseline: RunReport | None) -> str:
    """Summarise in one sentence what the events saved and what they cost in quality."""
    activity = run.activity
    return (
        f"{run.name} used {format.count(activity.forward_macs)} instead of {format.count(activity.dense_forward_macs)} "
        f"multiply-accumulates per forward step and {format.percent(1 - 1 / run.backward_saving, 0)} fewer in the "
        f"backward pass, with a {_quality(run, baseline)}."
    )


def _quality(run: RunReport, baseline: RunReport | None) -> str:
    """The score, compared with the baseline if there is one."""
    if baseline is None:
        return score_text(run)
    if run.score.name != "accuracy":
        return f"{score_text(run)} ({baseline.name}: {baseline.score.text})"
    difference = run.score.value - baseline.score.value
    return f"{run.split} accuracy {format.accuracy_difference(difference, baseline.name)}"


def cards(run: RunReport, baseline: RunReport | None) -> list[Card]:
    """Return quality, activity sparsity, savings and energy of a run."""
    activity = run.activity
    detail = "no dense baseline" if baseline is None else f"{baseline.name}: {baseline.score.text}"
    if run.score.name == "perplexity" and run.accuracy is not None:
        detail = f"{format.percent(run.accuracy)} of next words predicted correctly"
    quality = Card(run.score.text, f"{run.split} {run.score.name}", detail)
    forward = baseline and baseline.activity.forward_macs
    backward = baseline and baseline.activity.backward_macs
    return [
        quality,
        Card(
            format.percent(activity.activity_sparsity, 0),
            "activity sparsity",
            f"{format.percent(1 - activity.activity_sparsity, 0)} of units active per step",
        ),
        Card(
            format.ratio(run.forward_saving),
            "fewer forward MACs",
            _macs(activity.forward_macs, activity.dense_forward_macs, baseline, forward),
            highlight=True,
        ),
        Card(
            format.ratio(run.backward_saving),
            "fewer backward MACs",
            _macs(activity.backward_macs, activity.dense_backward_macs, baseline, backward),
            highlight=True,
        ),
        Card(
            format.joules(activity.estimated_joules),
            "estimated energy per forward step",
            f"from operation counts; {format.joules(activity.estimated_dense_joules)} if dense",
        ),
    ]


def _macs(used: float, dense: float, baseline: RunReport | None, baseline_macs: float | None) -> str:
    """Effective and dense MACs, followed by those of the baseline if it has another size."""
    text = f"{format.count(used)} of {format.count(dense)} per step"
    if baseline is not None and baseline_macs is not None and abs(baseline_macs / dense - 1) > 0.02:
        text += f"; {baseline.name} {format.count(baseline_macs)}"
    return text
