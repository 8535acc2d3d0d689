"""The event raster: input, events and number of active units of one sequence, on one time axis."""

from typing import TYPE_CHECKING

import numpy as np

from egru import format
from egru.report.run import Raster
from egru.report.theme import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def event_raster(raster: Raster, *, theme: Theme = LIGHT) -> "Figure":
    """Plot the events of one sequence.

    Each dot is an event, coloured by its value. The input is drawn above, the number of active units below.

    Args:
        raster: Input and events of the sequence.
        theme: Colours of the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: If matplotlib is not installed.

    Example:
        >>> layer, x = egru.EGRU(4, 8), torch.randn(20, 4)
        >>> events = layer(x)[0].detach().numpy()
        >>> raster = egru.report.Raster("first sequence", x.numpy(), events, image=None, label="")
        >>> egru.report.event_raster(raster).savefig("raster.png")
    """
    T = len(raster.events)
    with theme.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.3, 4.9))
        cells = figure.add_gridspec(
            3, 2, width_ratios=[1.12, 4.4], height_ratios=[1, 3.5, 0.7], wspace=0.3, hspace=0.14
        )
        cells.update(left=0.02, right=0.985, top=0.915, bottom=0.095)
        dots = figure.add_subplot(cells[1, 1])
        above = figure.add_subplot(cells[0, 1], sharex=dots)
        below = figure.add_subplot(cells[2, 1], sharex=dots)
        image = figure.add_subplot(cells[:2, 0])
        scale = figure.add_subplot(cells[2, 0])

        _draw_image(image, raster, theme)
        _draw_input(above, raster, theme)
        _draw_events(dots, scale, raster, theme)

        active = (raster.events != 0).sum(1)
        below.stairs(active, np.arange(T + 1) - 0.5, fill=True, color=theme.event[0], alpha=0.85)
        below.set_ylim(0, max(1, int(active.max())) * 1.05)
        below.set_ylabel("active")
        below.set_yticks([0, int(active.max())] if active.any() else [0])
        below.set_xlabel("time step")
        below.set_xlim(-0.5, T - 0.5)
        heading = f"{raster.title}: activity sparsity {format.percent(raster.activity_sparsity, 0)}"
        figure.text(0.02, 0.985, format.escape_mathtext(heading), ha="left", va="top", fontsize=11, fontweight="bold")
    return figure


def _draw_image(axes: "Axes", raster: Raster, theme: Theme) -> None:
    axes.set_axis_off()
    axes.set_anchor("N")
    if raster.image is not None:
        image = raster.image if raster.image.ndim == 2 else raster.image[len(raster.image) // 2]
        axes.imshow(image, cmap=theme.image_colours, interpolation="nearest")
    position = (0.5, 1.0) if raster.image is None else (0.5, -0.06)
    label = format.escape_mathtext(raster.label)
    axes.text(*position, label, transform=axes.transAxes, ha="center", va="top", fontsize=9.5, color=theme.muted)


def _draw_input(axes: "Axes", raster: Raster, theme: Theme) -> None:
    T, inputs = raster.input.shape
    if inputs == 1:
        axes.stairs(raster.input[:, 0], np.arange(T + 1) - 0.5, fill=True, color=theme.dense, alpha=0.85)
        axes.margins(y=0.02)
        axes.set_yticks([])
    else:
        extent = (-0.5, T - 0.5, -0.5, inputs - 0.5)
        axes.imshow(
            raster.input.T, aspect="auto", origin="lower", extent=extent, cmap=theme.image_colours, interpolation="none"
        )
        axes.set_yticks([0, inputs - 1])
    axes.set_ylabel("input")
    axes.tick_params(labelbottom=False, length=2)


def _draw_events(axes: "Axes", scale: "Axes", raster: Raster, theme: Theme) -> None:
    """Draw the events, most active units first, and the colour scale. Units without an event are left out."""
    from matplotlib.ticker import MaxNLocator

    activity = (raster.events != 0).sum(0)
    inactive = int((activity == 0).sum()) if activity.any() else 0
    events = raster.events[:, np.argsort(-activity, kind="stable")[: len(activity) - inactive]]
    T, H = events.shape
    t, unit = np.nonzero(events)
    value = events[t, unit]
    size = float(np.clip(min(280 / T, 220 / H) * 1.1, 0.8, 7.0))  # in points; the panel is about 280 by 220 points
    positive, negative = bool((value > 0).any()), bool((value < 0).any())
    colours = theme.value_map(positive and negative)
    if negative and not positive:
        colours = colours.reversed()  # the largest absolute value contrasts most
    dots = axes.scatter(t, unit, c=value, s=size**2, cmap=colours, linewidths=0)
    scale.set_axis_off()
    if len(value):
        largest = float(np.abs(value).max())
        dots.set_clim(-largest if negative else 0, largest if positive else 0)
        legend = axes.figure.colorbar(dots, cax=scale.inset_axes((0.08, 0.72, 0.84, 0.16)), orientation="horizontal")
        legend.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        legend.ax.tick_params(length=2, labelsize=8.5)
        legend.ax.xaxis.set_major_locator(MaxNLocator(nbins=3))
        legend.ax.set_title("event value", fontsize=9, loc="center", color=theme.muted, pad=4)
    else:
        axes.text(0.5, 0.5, "no events", transform=axes.transAxes, ha="center", va="center", color=theme.muted)
    axes.set_ylim(H - 0.1, -0.9)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    note = f" ({inactive} without events left out)" if inactive else ""
    axes.set_ylabel(f"units, most active first{note}")
    axes.tick_params(labelbottom=False)
