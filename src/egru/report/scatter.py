"""Scatter plots of the page: quality against cost of runs, and the trials of a threshold search."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from egru.report.figures import Figure, run_colours, short
from egru.report.run import RunReport, ThresholdSearch
from egru.training.records import ThresholdTrial


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: Label of the axis.
        format: Format of its numbers: "count", "seconds", "percent" or "number".
        categories: Names of the values, if they are not numbers. The coordinate of a point is then an index.
    """

    label: str
    format: str = "number"
    categories: tuple[str, ...] = ()

    def data(self, values: Sequence[float]) -> dict[str, Any]:
        """Return what ``scatter.js`` needs. The axis is logarithmic if positive values differ more than fourfold."""
        plain: dict[str, Any] = {"label": self.label, "format": self.format}
        if self.categories:
            return plain | {"categories": self.categories}
        return plain | {"log": self.format != "percent" and min(values) > 0 and max(values) > 4 * min(values)}


def panel(
    title: str, x: Axis, y: Axis, points: Sequence[dict[str, Any]], front: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return one panel.

    Args:
        title: Title above the panel.
        x: Horizontal axis.
        y: Vertical axis.
        points: Dicts with "x", "y", "name" and "colour", and optionally "label", "note", "hollow" and "large".
        front: Indices of the points to connect, from left to right. If None, no points are connected.
    """
    points = [point | {"x": short(point["x"]), "y": short(point["y"])} for point in points]
    data = {"title": title, "x": x.data([p["x"] for p in points]), "y": y.data([p["y"] for p in points])}
    return data | {"points": points} | ({} if front is None else {"front": list(front)})


def quality(runs: Sequence[RunReport]) -> Figure | None:
    """Draw quality against MACs and against the measured time per step, for runs with the same data and score.

    Returns:
        The figure, or None if no two runs can be compared.
    """
    numbered = list(zip(range(1, len(runs) + 1), runs, run_colours(runs), strict=True))
    drawn: list[dict[str, Any]] = []
    shown: set[int] = set()

    def step_time(run: RunReport) -> float | None:
        return run.step_time and run.step_time.seconds

    ordered = sorted(numbered, key=lambda entry: entry[1].task)
    for (data, split, name), entries in itertools.groupby(ordered, key=lambda entry: entry[1].task):
        group = list(entries)
        if len(group) < 2:
            continue
        shown |= {number for number, _, _ in group}
        score = f"{split} {name}"
        vertical = Axis(score, "percent" if name == "accuracy" else "number")
        costs: list[tuple[Axis, Callable[[RunReport], float | None]]] = [
            (Axis("forward MACs per step", "count"), lambda run: run.activity.forward_macs),
            (Axis("measured time per step", "seconds"), step_time),
        ]
        for horizontal, cost in costs:
            points = [
                {"x": x, "y": run.score.value, "label": str(number)}
                | {"name": run.name, "colour": colour, "hollow": not run.event_layers}
                | ({"note": f"{time.method}, {time.machine}"} if (time := run.step_time) and cost is step_time else {})
                for number, run, colour in group
                if (x := cost(run)) is not None
            ]
            if points:
                title = f"{score[0].upper()}{score[1:]} against {horizontal.label}{f' ({data})' if data else ''}"
                drawn.append(panel(title, horizontal, vertical, points))
    if not drawn:
        return None
    caption = ["Filled points are event-based models, hollow ones dense."]
    timed = dict.fromkeys((run.step_time.method, run.step_time.machine) for run in runs if run.step_time)
    if timed:
        caption.append(f"Time per step was measured with {'; '.join(f'{how} on {where}' for how, where in timed)}.")
    untimed = [run.name for number, run, _ in numbered if number in shown and run.step_time is None]
    if len(untimed) == len(shown):
        caption.append("No run has a measured time per step.")
    elif untimed:
        caption.append(f"No time per step was measured for {', '.join(untimed)}.")
    legend = [{"name": f"{n} {run.name}", "colour": colour} for n, run, colour in numbered if n in shown]
    data = {"kind": "scatter", "panels": drawn, "legend": legend}
    description = "Scatter plot: quality of the runs against multiply-accumulates and time per step"
    return Figure("quality", description, " ".join(caption), data, wide=True)


def threshold_search(run: RunReport, search: ThresholdSearch, colour: str, name: str) -> Figure:
    """Draw the trials of a threshold search: validation score against MACs."""
    is_language = search.trials[0].validation.perplexity is not None
    score = "validation perplexity" if is_language else "validation accuracy"
    points = [
        {"x": trial.forward_macs, "y": _score(trial), "name": f"trial {i}", "note": f"floors {floors(trial)}"}
        | {"colour": colour if i in (0, search.chosen) else "var(--dense)", "hollow": i != search.chosen}
        | ({"label": "before", "large": True} if i == 0 else {})
        | ({"label": "chosen", "large": True} if i == search.chosen else {})
        for i, trial in enumerate(search.trials)
    ]
    vertical = Axis(score, "number" if is_language else "percent")
    data = panel(f"{run.name}: trials of the search", Axis("forward MACs per step", "count"), vertical, points)
    return Figure(
        name,
        f"Scatter plot: validation score and multiply-accumulates of the thresholds tried for {run.name}",
        "Each point is one setting of the thresholds, measured on the validation split.",
        {"kind": "scatter", "panels": [data]},
    )


def floors(trial: ThresholdTrial) -> str:
    """Format the smallest threshold of each layer."""
    return ", ".join(f"{value:g}" for value in trial.floor)


def _score(trial: ThresholdTrial) -> float:
    perplexity = trial.validation.perplexity
    return trial.validation.accuracy if perplexity is None else perplexity
