"""The figures of a report. Each function returns a matplotlib ``Figure`` that no window or backend knows of."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from egru.report import format
from egru.report.run import RunReport, check_runs
from egru.report.theme import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.4
"""Inches of a figure in one column of the page."""


def training_curves(runs: Sequence[RunReport], *, theme: Theme = LIGHT) -> "Figure":
    """Loss, validation accuracy and, where there are events, activity sparsity against the epoch."""
    check_runs("training_curves", runs)
    panels = [
        ("Training loss", lambda epoch: epoch.train_loss, False),
        ("Validation accuracy", lambda epoch: epoch.validation_accuracy, True),
    ]
    if any(epoch.activity_sparsity is not None for run in runs for epoch in run.history):
        panels.append(("Silent (activity sparsity)", lambda epoch: epoch.activity_sparsity, True))
    with theme.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        figure = Figure(figsize=(WIDTH, 0.75 + 1.75 * len(panels)), layout="constrained")
        rows: list[Axes] = list(np.atleast_1d(figure.subplots(len(panels), 1, sharex=True)))  # pyright: ignore
        for axes, (title, value, fraction) in zip(rows, panels, strict=True):
            for run, colour in zip(runs, theme.colours(runs), strict=True):
                known = [(entry.epoch, value(entry)) for entry in run.history if value(entry) is not None]
                if known:
                    axes.plot(
                        *zip(*known, strict=True),
                        color=colour,
                        linestyle="-" if run.event_layers else (0, (4, 1.6)),
                        label=format.plain(run.name),
                        marker="o" if len(known) < 25 else None,
                        markersize=3.5,
                    )
            axes.set_title(title)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
            if fraction:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
            theme.grid(axes)
        rows[-1].set_xlabel("epoch")
        handles, labels = rows[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, handlelength=2.6)
    return figure


def macs_bar(runs: Sequence[RunReport], *, theme: Theme = LIGHT) -> "Figure":
    """Multiply-accumulates of a time step: what was used, filled, inside what the dense network takes."""
    check_runs("macs_bar", runs)
    passes = [
        ("Forward", [(run.activity.forward_macs, run.activity.dense_forward_macs) for run in runs]),
        ("Backward", [(run.activity.backward_macs, run.activity.dense_backward_macs) for run in runs]),
    ]
    longest = max(dense for _, pairs in passes for _, dense in pairs)
    with theme.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        figure = Figure(figsize=(WIDTH, 1.1 + 1.15 * len(runs)), layout="constrained")
        rows: list[Axes] = list(figure.subplots(2, 1, sharex=True))  # pyright: ignore
        for axes, (title, pairs) in zip(rows, passes, strict=True):
            for i, ((used, dense), colour) in enumerate(zip(pairs, theme.colours(runs), strict=True)):
                axes.barh(i, dense, height=0.46, facecolor=colour, alpha=0.16)
                axes.barh(i, dense, height=0.46, facecolor="none", edgecolor=colour, linewidth=0.9)
                axes.barh(i, used, height=0.46, color=colour)
                numbers = f"{format.count(used)} of {format.count(dense)}"
                text = axes.text(0, i - 0.31, numbers, color=theme.muted, fontsize=9.5)
                if dense / used >= 1.05:
                    axes.annotate(
                        f"{format.times(dense / used)} fewer",
                        xy=(1, 0),
                        xycoords=text,
                        xytext=(8, 0),
                        textcoords="offset points",
                        va="bottom",
                        color=colour,
                        fontweight="bold",
                    )
            axes.set_title(title)
            axes.set_yticks(range(len(runs)), [format.plain(run.name) for run in runs])
            axes.set_ylim(len(runs) - 0.6, -0.75)
            axes.set_xlim(0, 1.02 * longest)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format.count(value)))
            theme.grid(axes, "x")
            axes.tick_params(axis="y", length=0, labelsize=10, labelcolor=theme.ink)
            axes.spines["left"].set_visible(False)
        rows[-1].set_xlabel("multiply-accumulates per time step")
    return figure


def activity_histogram(run: RunReport, *, theme: Theme = LIGHT) -> "Figure":
    """How often each unit of the event layers speaks; the dead and the ones that never stop stand apart."""
    layers = run.event_layers
    if not layers:
        raise ValueError(f"activity_histogram: run {run.name!r} has no event layers, so no unit ever fires")
    edges = np.linspace(0, 1, 21)
    hues = [hue for i, hue in enumerate(theme.event) if i != 1]  # the second is too close to the alarm
    gap = 0.085  # between the histogram's ends and the two bars beside it
    with theme.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        axes = figure.subplots()
        bottom, dead_below, always_below = np.zeros(20), 0, 0
        for i, layer in enumerate(layers):
            units = np.asarray(layer.unit_activity)
            dead, always = int((units == 0).sum()), int((units == 1).sum())
            heights = np.histogram(units[(units > 0) & (units < 1)], edges)[0]
            colour = hues[i % len(hues)]
            axes.bar(edges[:-1] + 0.025, heights, 0.044, bottom=bottom, color=colour, label=layer.name)
            axes.bar([-gap, 1 + gap], [dead, always], 0.044, bottom=[dead_below, always_below], color=theme.alarm)
            bottom, dead_below, always_below = bottom + heights, dead_below + dead, always_below + always
        everyone = np.concatenate([layer.unit_activity for layer in layers])
        mean, top = float(everyone.mean()), max(bottom.max(), dead_below, always_below, 1)
        height = 1.1 * top if mean > 0.09 else 0.97 * max(dead_below, bottom[0])  # stay below "dead"
        axes.plot([mean, mean], [0, height], color=theme.ink, linewidth=1, linestyle=(0, (2, 2)))
        ends = (
            (-gap, "left", dead_below, "dead", bottom[0]),
            (1 + gap, "right", always_below, "always on", bottom[-5:].max()),
        )
        for x, side, number, word, nearby in ends:
            axes.text(
                x - 0.022 if side == "left" else x + 0.022,
                max(number, nearby) + 0.025 * top,
                f"{number} {word}",
                color=theme.alarm if number else theme.muted,
                fontweight="bold" if number else "normal",
                ha=side,
                va="bottom",
            )
        heading = f"{run.name}: {len(everyone)} units, on average active {format.percent(mean)} of the time"
        axes.set_title(format.plain(heading))
        axes.set_ylim(0, 1.15 * top)
        axes.set_xlim(-gap - 0.05, 1 + gap + 0.05)
        axes.set_xticks([-gap, 0, 0.25, 0.5, 0.75, 1, 1 + gap], ["never", "", "25 %", "50 %", "75 %", "", "always"])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.set_xlabel("share of steps at which a unit speaks; dotted: the mean")
        axes.set_ylabel("units")
        theme.grid(axes)
        if len(layers) > 1:
            axes.legend(loc="upper right", bbox_to_anchor=(0.93, 1))
    return figure
