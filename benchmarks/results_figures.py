"""Figures of docs/results/experiments.md: scores and sparsity against the epoch."""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from results_records import Record, curve, validation_score
from results_tasks import Task

from egru.experiments import RECIPES
from egru.report import LIGHT

SPARSITY = "Activity sparsity in validation"
BACKWARD_SPARSITY = "Backward sparsity in training, as counted in the paper"


def training_figure(task: Task, runs: list[Record]) -> Any:
    """Plot validation score, activity sparsity and backward sparsity of each run against the epoch."""
    hues = itertools.cycle(LIGHT.event)
    colours = [next(hues) if run.has_events else LIGHT.dense for run in runs]
    panels = (
        (f"Validation {task.score}", "validation", task.score),
        (SPARSITY, "activity", "activity_sparsity"),
        (BACKWARD_SPARSITY, "training_activity", "backward_sparsity"),
    )
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 7.8), layout="constrained")
        rows: Any = figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 1, 1))
        scores, *sparsities = rows
        coloured_runs = list(zip(runs, colours, strict=True))
        for axes, (title, *path) in zip(rows, panels, strict=True):
            shown = [(run, colour) for run, colour in coloured_runs if run.has_events or axes is scores]
            draw_panel(axes, title, [(f"{run.recipe}{run.note}", colour, curve(run, *path)) for run, colour in shown])
        papers = [paper for name in task.models for paper in RECIPES[name].papers if task.is_comparable(paper)]
        for paper in papers[:1]:
            printed = getattr(paper, task.score)
            value, unit = (float(printed) / 100, " %") if task.score == "accuracy" else (float(printed), "")
            label = f"paper, test ({printed}{unit})"
            scores.axhline(value, color=LIGHT.muted, linewidth=1, linestyle=(0, (4, 2)), label=label)
        if task.score == "accuracy" and max(validation_score(run, "accuracy") for run in runs) > 0.95:
            scores.set_ylim(0.9, 1)  # leaves out the first epochs
        if task.score == "perplexity":
            for run, colour in coloured_runs:
                epochs, losses = zip(*curve(run, "train", "loss"), strict=True)
                perplexities = [math.exp(min(loss, 20)) for loss in losses]
                scores.plot(epochs, perplexities, color=colour, alpha=0.4, linewidth=1)
            scores.plot([], [], color=LIGHT.muted, alpha=0.4, linewidth=1, label="training, with dropout")
            use_log_scale(scores)
        scores.legend(fontsize=8, loc="lower right" if task.score == "accuracy" else "best")
        sparsities[-1].set_xlabel("epoch")
    return figure


def layers_figure(run: Record) -> Any | None:
    """Plot the sparsity of each layer against the epoch. None for a dense or single-layer model, or without data."""
    layers = run.metrics[-1].layers
    if len(layers) < 2 or not run.has_events:
        return None
    panels = (
        (SPARSITY, "layers", "activity_sparsity"),
        (BACKWARD_SPARSITY, "training_layers", "backward_sparsity"),
    )
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 5.2), layout="constrained")
        rows: Any = figure.subplots(2, 1, sharex=True)
        for axes, (title, group, name) in zip(rows, panels, strict=True):
            colours = zip(layers, itertools.cycle(LIGHT.event), strict=False)
            draw_panel(axes, title, [(layer, colour, curve(run, group, layer, name)) for layer, colour in colours])
        rows[0].legend(ncols=3)
        rows[-1].set_xlabel("epoch")
    return figure


def draw_panel(axes: Any, title: str, curves: Iterable[tuple[str, str, list[tuple[int, float]]]]) -> None:
    """Draw curves of fractions, given as label, colour and points. Curves of the same colour differ in line style."""
    from matplotlib.ticker import PercentFormatter

    styles: dict[str, Iterator[str]] = collections.defaultdict(lambda: itertools.cycle(("-", ":", "-.")))
    for label, colour, points in curves:
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=next(styles[colour]), label=label)
    axes.set_title(title)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    LIGHT.grid(axes)


def use_log_scale(axes: Any) -> None:
    """Set a logarithmic scale with round ticks. If perplexities fall below 100, cut the axis at 200."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if low < 100:
        high = min(high, 200)
        axes.set_ylim(top=high)
    axes.set_yticks([tick for tick in (20, 30, 40, 50, 60, 80, 100, 150, 200, 400, 800) if low <= tick <= high])
