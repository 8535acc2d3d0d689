"""Scatter plot of quality against cost, with the Pareto front."""

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from egru.report.theme import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pareto_front(
    points: Sequence[tuple[int, float, float]],
    front: Set[int],
    *,
    cost: str,
    quality: str,
    format_cost: Callable[[float], str],
    format_quality: Callable[[float], str],
    theme: Theme = LIGHT,
) -> "Figure":
    """Plot the quality of trials against their cost and connect those on the Pareto front.

    Args:
        points: Number, cost and quality of each trial.
        front: Numbers of the trials on the Pareto front. They are connected and labelled.
        cost: Label of the horizontal axis.
        quality: Title of the figure.
        format_cost: Formats tick labels of the horizontal axis.
        format_quality: Formats tick labels of the vertical axis.
        theme: Colours of the figure.

    Returns:
        A matplotlib figure. The horizontal axis is logarithmic if the costs are positive and differ more than fourfold.

    Raises:
        ImportError: If matplotlib is not installed.

    Example:
        >>> trials = [(0, 20_000, 0.95), (1, 30_000, 0.94), (2, 40_000, 0.97)]
        >>> figure = egru.report.pareto_front(
        ...     trials, {0, 2}, cost="MACs per step", quality="accuracy",
        ...     format_cost="{:,.0f}".format, format_quality="{:.0%}".format,
        ... )
    """
    best = sorted((point for point in points if point[0] in front), key=lambda point: point[1])
    others = [point for point in points if point[0] not in front]
    with theme.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.scatter(
            [p[1] for p in others], [p[2] for p in others], s=20, color=theme.dense, alpha=0.6, label="dominated"
        )
        style = {"color": theme.event[0], "drawstyle": "steps-post", "marker": "o", "markersize": 6}
        axes.plot([p[1] for p in best], [p[2] for p in best], label="Pareto front", **style)  # pyright: ignore
        for number, x, y in best:
            axes.annotate(str(number), (x, y), (5, 5), textcoords="offset points", fontsize=8.5, color=theme.muted)
        costs = [p[1] for p in points]
        if min(costs) > 0 and max(costs) > 4 * min(costs):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_cost(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_quality(value)))
        axes.set_xlabel(f"{cost} (labels: trial numbers)")
        axes.set_title(quality[:1].upper() + quality[1:])
        theme.grid(axes, "both")
        axes.legend(loc="best")
    return figure
