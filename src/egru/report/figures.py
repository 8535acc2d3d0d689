"""Bars, curves and histograms of the page: captions, and the data that the scripts in ``script`` draw.

Bars are plain HTML. The scripts draw the other figures in the browser, at the width of the window, with tooltips.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from egru import format
from egru.report.curves import Panel, panels
from egru.report.run import RunReport


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Attributes:
        name: Identifier of the HTML element.
        description: Text for screen readers.
        caption: Text below the figure.
        data: What the script draws. None if the figure is plain HTML.
        content: HTML of the figure; the script replaces it if there is data.
        wide: Whether the figure takes the full width of the page.
    """

    name: str
    description: str
    caption: str
    data: dict[str, Any] | None = None
    content: str = ""
    wide: bool = False

    def html(self) -> str:
        """Return the HTML element."""
        plot = f'<div class="plot" role="img" aria-label="{escape(self.description)}">{self.content}</div>'
        size = ' class="wide"' if self.wide else ""
        return f'<figure id="{self.name}"{size}>{plot}<figcaption>{escape(self.caption)}</figcaption></figure>'


def run_colours(runs: Sequence[RunReport]) -> list[str]:
    """Return one CSS colour per run: grey for dense models, a hue for the others."""
    hues = itertools.cycle(f"var(--hue{i})" for i in range(4))
    return [next(hues) if run.event_layers else "var(--dense)" for run in runs]


# ---- bars ------------------------------------------------------------------------------------------------------------


def computation(runs: Sequence[RunReport]) -> Figure:
    """Draw MACs and estimated energy per step as bars: effective MACs inside those of the dense network."""

    def rows(used: Callable[[Any], float], dense: Callable[[Any], float], text: Callable[[float], str]) -> str:
        longest = max(dense(run.activity) for run in runs)
        return "".join(
            _bar(run.name, used(run.activity), dense(run.activity), longest, text, colour)
            for run, colour in zip(runs, run_colours(runs), strict=True)
        )

    groups = (
        ("Forward MACs per step", rows(lambda a: a.forward_macs, lambda a: a.dense_forward_macs, format.count)),
        ("Backward MACs per step", rows(lambda a: a.backward_macs, lambda a: a.dense_backward_macs, format.count)),
        (
            "Estimated energy per forward step",
            rows(lambda a: a.estimated_joules, lambda a: a.estimated_dense_joules, format.joules),
        ),
    )
    return Figure(
        "computation",
        "Bar chart: effective and dense multiply-accumulates and estimated energy per time step",
        "The whole bar is the network with nothing skipped; the filled part is the computation that was needed.",
        content="".join(f"<h3>{title}</h3>{bars}" for title, bars in groups),
    )


def layers(run: RunReport, colour: str, name: str) -> Figure:
    """Draw the forward MACs of a run by part: input and recurrence of each layer, and the readouts."""
    parts: list[tuple[str, float, float, str]] = []
    steps = run.activity.steps
    for layer in run.activity.layers:
        cost, rows = layer.cost, layer.cost.gates * layer.cost.hidden_size
        inputs, dense = rows * (cost.input_density * cost.input_size + 1), rows * (cost.input_size + 1)  # with the bias
        weight = layer.steps / steps
        parts.append(
            (
                f"{layer.name}, input",
                inputs * weight,
                dense * weight,
                f"{format.percent(1 - cost.input_density, 0)} of the input is zero",
            )
        )
        parts.append(
            (
                f"{layer.name}, recurrent",
                (cost.forward - inputs) * weight,
                (cost.dense.forward - dense) * weight,
                f"activity sparsity {format.percent(layer.activity_sparsity, 0)}",
            )
        )
    parts += [
        (
            linear.name,
            linear.macs / steps,
            linear.dense_macs / steps,
            f"{format.percent(1 - linear.input_density, 0)} of the input is zero",
        )
        for linear in run.activity.linears
    ]
    longest = max(dense for _, _, dense, _ in parts)
    return Figure(
        name,
        f"Bar chart: effective and dense forward multiply-accumulates of {run.name} by layer",
        "An inactive unit saves computation where its output is read: in the recurrence of its layer and in the input "
        "of the next layer. An input without zeros saves nothing.",
        content=f"<h3>{escape(run.name)}: forward MACs per step, by layer</h3>"
        + "".join(_bar(part, used, dense, longest, format.count, colour, note) for part, used, dense, note in parts),
    )


def _bar(
    name: str, used: float, dense: float, longest: float, text: Callable[[float], str], colour: str, note: str = ""
) -> str:
    """Return one bar: ``used`` of ``dense``, on a scale that ends at ``longest``. ``note`` is its tooltip."""
    saved = f" <b>{format.percent(1 - used / dense, 0)} saved</b>" if used < 0.995 * dense else ""
    tooltip = f' title="{escape(note)}"' if note else ""
    return (
        f'<div class="bar" style="--hue:{colour}"{tooltip}><span>{escape(name)}</span>'
        f"<span>{text(used)} of {text(dense)}{saved}</span>"
        f'<i style="width:{100 * dense / longest:.2f}%"><i style="width:{100 * used / dense:.2f}%"></i></i></div>'
    )


# ---- curves ----------------------------------------------------------------------------------------------------------


def curves(runs: Sequence[RunReport]) -> Figure:
    """Draw training loss, validation score and activity sparsity of the trained runs against the epoch."""
    trained = [run for run in runs if run.history]
    colours = dict(zip((run.name for run in runs), run_colours(runs), strict=True))
    drawn = panels(trained)
    caption = ["Solid lines are event-based models, dashed lines dense ones."]
    caption += [text for panel in drawn if (text := panel.describe_cut(trained))]
    return Figure(
        "curves",
        f"Line chart: {', '.join(panel.title.lower() for panel in drawn)} by epoch",
        " ".join([*caption, "Hover over an epoch to see its numbers."]),
        {"kind": "lines", "panels": [_panel(panel, trained, colours) for panel in drawn], "x": "epoch"},
        wide=True,
    )


def _panel(panel: Panel, runs: Sequence[RunReport], colours: Mapping[str, str]) -> dict[str, Any]:
    series = [
        {"name": run.name, "colour": colours[run.name], "dash": not run.event_layers, "points": _points(panel, run)}
        for run in runs
    ]
    low, high = panel.limits(runs)
    limits = {name: short(value) for name, value in (("low", low), ("high", high)) if value is not None}
    data = {"title": panel.title, "percent": panel.is_fraction, "log": panel.is_log, **limits}
    return data | {"series": [entry for entry in series if entry["points"]]}


def _points(panel: Panel, run: RunReport) -> list[tuple[int, float]]:
    return [(epoch, short(y)) for epoch, y in panel.points(run)]


def sparsity(run: RunReport, colour: str, name: str) -> Figure:
    """Draw the activity sparsity of each layer against the epoch, or of the network if layers were not measured."""
    names = list(dict.fromkeys(layer for epoch in run.history for layer in epoch.layer_sparsity))
    caption = "Activity sparsity of each layer. The dashed line is the whole network."
    series = [
        {
            "name": layer,
            "colour": f"var(--hue{(0, 2, 3, 1)[i % 4]})",  # as in the histogram
            "points": _points(Panel(layer, lambda epoch, layer=layer: epoch.layer_sparsity.get(layer)), run),
        }
        for i, layer in enumerate(names)
    ]
    if not names:
        caption = "Activity sparsity of the whole network. The run has no metrics per layer."
    whole = _points(Panel("all layers", lambda epoch: epoch.activity_sparsity), run)
    series.append(
        {"name": "all layers", "colour": "var(--ink)" if names else colour, "dash": bool(names), "points": whole}
    )
    title = f"{run.name}: activity sparsity{' by layer' if names else ''}"
    panel = {"title": title, "percent": True, "log": False, "series": series}
    data = {"kind": "lines", "panels": [panel], "x": "epoch", "legend": True}
    return Figure(name, f"Line chart: activity sparsity of the layers of {run.name} by epoch", caption, data)


# ---- units -----------------------------------------------------------------------------------------------------------


def histogram(run: RunReport, name: str) -> Figure:
    """Draw a histogram of units by the fraction of steps with an event; "never" and "always" are separate bars."""
    edges = np.linspace(0, 1, 21)
    rows: list[dict[str, Any]] = []
    for layer in run.event_layers:
        units = np.asarray(layer.unit_activity)
        partly_active = units[(units > 0) & (units < 1)]
        rows.append(
            {
                "name": layer.name,
                "never": int((units == 0).sum()),
                "always": int((units == 1).sum()),
                "bins": np.histogram(partly_active, edges)[0].tolist(),
            }
        )
    all_units = np.concatenate([layer.unit_activity for layer in run.event_layers])
    mean = float(all_units.mean())
    title = f"{run.name}: {len(all_units):,} units, mean activity {format.percent(mean)}"
    return Figure(
        name,
        f"Histogram: fraction of steps at which each unit of {run.name} is active",
        "Number of units by the fraction of steps at which they emit an event. Units that are never active can be "
        "pruned; units that are always active save no computation.",
        {"kind": "histogram", "title": title, "layers": rows, "mean": short(mean)},
    )


def short(value: float) -> float:
    """Round to five digits, which keeps the page small."""
    return float(f"{value:.5g}")
