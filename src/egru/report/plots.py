"""Figures of a report for papers and slides. They are plain ``Figure`` objects and need no matplotlib backend."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from egru import format
from egru.report.curves import panels
from egru.report.run import RunReport, check_runs
from egru.report.theme import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.4
"""Width of a figure in inches."""


def training_curves(runs: Sequence[RunReport], *, theme: Theme = LIGHT) -> "Figure":
    """Plot training loss, validation score and activity sparsity against the epoch.

    Axes that the first epochs would stretch are cut; the title of the panel says where.

    Args:
        runs: Runs with distinct names. Dense runs have no curve of activity sparsity. At least one was trained.
        theme: Colours of the figure.

    Returns:
        A matplotlib figure with one panel per quantity.

    Raises:
        ValueError: If ``runs`` is empty, two runs have the same name, or none was trained.
        ImportError: If matplotlib is not installed.

    Example:
        >>> figure = egru.report.training_curves([run])  # run: an egru.report.RunReport
        >>> figure.savefig("curves.png")
    """
    check_runs("training_curves", runs)
    trained = [run for run in runs if run.history]
    if not trained:
        raise ValueError("training_curves: runs must contain at least one run with a history, got none")
    drawn = panels(trained)
    with theme.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

        columns = max(1, min(4, int(70 / max(len(run.name) + 8 for run in trained))))
        legend_height = 0.25 * -(-len(trained) // columns)
        figure = Figure(figsize=(WIDTH, 0.5 + legend_height + 1.75 * len(drawn)), layout="constrained")
        rows: list[Axes] = list(np.atleast_1d(figure.subplots(len(drawn), 1, sharex=True)))  # pyright: ignore
        for axes, panel in zip(rows, drawn, strict=True):
            if panel.is_log:
                axes.set_yscale("log")
            for run, colour in zip(runs, theme.colours(runs), strict=True):
                if points := panel.points(run):
                    axes.plot(
                        *zip(*points, strict=True),
                        color=colour,
                        linestyle="-" if run.event_layers else (0, (4, 1.6)),
                        label=format.escape_mathtext(run.name),
                        marker="o" if len(points) < 25 else None,
                        markersize=3.5,
                    )
            low, high = panel.limits(trained)
            limit = low if high is None else high
            shown = "" if limit is None else (format.percent(limit) if panel.is_fraction else f"{limit:.3g}")
            axes.set_title(panel.title + (f" (cut at {shown})" if shown else ""))
            axes.set_ylim(low, high)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
            axes.yaxis.set_minor_locator(NullLocator())
            if panel.is_log:
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            if panel.is_fraction:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
            theme.grid(axes)
        rows[-1].set_xlabel("epoch")
        handles, labels = rows[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=2.6)
    return figure


def macs_bar(runs: Sequence[RunReport], *, theme: Theme = LIGHT) -> "Figure":
    """Plot the multiply-accumulates per time step, forward and backward.

    The outline of a bar is the dense network, the filled part the effective MACs.

    Args:
        runs: Runs with distinct names, one bar each.
        theme: Colours of the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: If ``runs`` is empty or two runs have the same name.
        ImportError: If matplotlib is not installed.

    Example:
        >>> figure = egru.report.macs_bar([run])  # run: an egru.report.RunReport
        >>> figure.savefig("macs.png")
    """
    check_runs("macs_bar", runs)
    passes = [
        ("Forward", [(run.activity.forward_macs, run.activity.dense_forward_macs) for run in runs]),
        ("Backward", [(run.activity.backward_macs, run.activity.dense_backward_macs) for run in runs]),
    ]
    longest = max(dense for _, pairs in passes for _, dense in pairs)
    with theme.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        names = 0.08 * max(0, max(len(run.name) for run in runs) - 12)  # inches beyond the room for short names
        figure = Figure(figsize=(WIDTH + names, 1.1 + 1.15 * len(runs)), layout="constrained")
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
                        f"{format.ratio(dense / used)} fewer",
                        xy=(1, 0),
                        xycoords=text,
                        xytext=(8, 0),
                        textcoords="offset points",
                        va="bottom",
                        color=colour,
                        fontweight="bold",
                    )
            axes.set_title(title)
            axes.set_yticks(range(len(runs)), [format.escape_mathtext(run.name) for run in runs])
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
    """Plot a histogram of the units of the event layers by the fraction of steps at which they are active.

    Units that are never active and units that are always active have separate bars.

    Args:
        run: A run with event layers.
        theme: Colours of the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: If the run has no event layers.
        ImportError: If matplotlib is not installed.

    Example:
        >>> figure = egru.report.activity_histogram(run)  # run: an egru.report.RunReport
        >>> figure.savefig("histogram.png")
    """
    layers = run.event_layers
    if not layers:
        raise ValueError(f"activity_histogram: run {run.name!r} has no event layers")
    edges = np.linspace(0, 1, 21)
    hues = [hue for i, hue in enumerate(theme.event) if i != 1]  # the second is too similar to theme.alarm
    gap = 0.085  # between the histogram and the bars on either side
    with theme.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        axes = figure.subplots()
        bottom, total_never, total_always = np.zeros(20), 0, 0
        for i, layer in enumerate(layers):
            units = np.asarray(layer.unit_activity)
            never, always = int((units == 0).sum()), int((units == 1).sum())
            heights = np.histogram(units[(units > 0) & (units < 1)], edges)[0]
            colour = hues[i % len(hues)]
            axes.bar(edges[:-1] + 0.025, heights, 0.044, bottom=bottom, color=colour, label=layer.name)
            axes.bar([-gap, 1 + gap], [never, always], 0.044, bottom=[total_never, total_always], color=theme.alarm)
            bottom, total_never, total_always = bottom + heights, total_never + never, total_always + always
        all_units = np.concatenate([layer.unit_activity for layer in layers])
        mean, top = float(all_units.mean()), max(bottom.max(), total_never, total_always, 1)
        # A mean near zero ends below the label "never active", which is drawn above the leftmost bars.
        height = 1.1 * top if mean > 0.2 else 0.97 * max(total_never, bottom[:5].max())
        axes.plot([mean, mean], [0, height], color=theme.ink, linewidth=1, linestyle=(0, (2, 2)))
        ends = (
            (-gap, "left", total_never, "never active", bottom[:5].max()),
            (1 + gap, "right", total_always, "always active", bottom[-5:].max()),
        )
        for x, side, number, label, nearby in ends:
            axes.text(
                x - 0.022 if side == "left" else x + 0.022,
                max(number, nearby) + 0.025 * top,
                f"{number} {label}",
                color=theme.alarm if number else theme.muted,
                fontweight="bold" if number else "normal",
                ha=side,
                va="bottom",
            )
        heading = f"{run.name}: {len(all_units)} units, mean activity {format.percent(mean)}"
        axes.set_title(format.escape_mathtext(heading))
        axes.set_ylim(0, 1.15 * top)
        axes.set_xlim(-gap - 0.05, 1 + gap + 0.05)
        axes.set_xticks([-gap, 0, 0.25, 0.5, 0.75, 1, 1 + gap], ["never", "", "25 %", "50 %", "75 %", "", "always"])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.set_xlabel("fraction of steps with an event (dotted line: mean)")
        axes.set_ylabel("number of units")
        theme.grid(axes)
        if len(layers) > 1:
            axes.legend(loc="upper right", bbox_to_anchor=(0.93, 1))
    return figure
