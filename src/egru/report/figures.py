"""The figures of the page: captions, and the data that ``page.js`` draws them from.

Bars are plain HTML. ``page.js`` draws curves, histograms and rasters in the browser, at the width of the window, with
tooltips.
"""

import base64
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from egru import format
from egru.report.run import Epoch, Raster, RunReport

MAX_UNITS = 192
"""Units per layer in a raster. Larger layers show this many, evenly spaced from the most to the least active."""
MAX_STEPS = 784
"""Steps of a raster, enough for an MNIST image read pixel by pixel."""
MAX_CELLS = 250_000
"""Units times steps, summed over all rasters of a page. They take a third of a megabyte."""
MAX_INPUT_ROWS = 64
"""Rows of the input above a raster. Neighbouring rows of larger inputs are averaged."""
MAX_IMAGE_SIDE = 64
"""Pixels along each side of an image. Neighbouring pixels of larger images are averaged."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Attributes:
        name: Identifier of the HTML element.
        description: Text for screen readers.
        caption: Text below the figure.
        data: What ``page.js`` draws. None if the figure is plain HTML.
        content: HTML of the figure; ``page.js`` replaces it if there is data.
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
    """Draw MACs and energy per step as bars: effective MACs inside those of the dense network."""

    def rows(used: Callable[[Any], float], dense: Callable[[Any], float], text: Callable[[float], str]) -> str:
        longest = max(dense(run.activity) for run in runs)
        return "".join(
            _bar(run.name, used(run.activity), dense(run.activity), longest, text, colour)
            for run, colour in zip(runs, run_colours(runs), strict=True)
        )

    groups = (
        ("Forward MACs per step", rows(lambda a: a.forward_macs, lambda a: a.dense_forward_macs, format.count)),
        ("Backward MACs per step", rows(lambda a: a.backward_macs, lambda a: a.dense_backward_macs, format.count)),
        ("Energy per forward step (estimate)", rows(lambda a: a.joules, lambda a: a.dense_joules, format.joules)),
    )
    return Figure(
        "computation",
        "Bar chart: effective and dense multiply-accumulates and energy per time step",
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
    """Draw training loss, validation score and activity sparsity against the epoch."""
    is_language = all(run.history[-1].validation_perplexity is not None for run in runs)
    panels = [_panel("Training loss", runs, lambda epoch: epoch.train_loss)]
    if is_language:
        panels.append(_panel("Validation perplexity", runs, lambda epoch: epoch.validation_perplexity, log=True))
    else:
        panels.append(_panel("Validation accuracy", runs, lambda epoch: epoch.validation_accuracy, percent=True))
    if any(epoch.activity_sparsity is not None for run in runs for epoch in run.history):
        panels.append(_panel("Activity sparsity", runs, lambda epoch: epoch.activity_sparsity, percent=True))
    return Figure(
        "curves",
        f"Line chart: training loss, validation {'perplexity' if is_language else 'accuracy'} and activity sparsity by "
        "epoch",
        "Solid lines are event-based models, dashed lines dense ones. Hover over an epoch to see its numbers.",
        {"kind": "lines", "panels": panels, "x": "epoch"},
        wide=True,
    )


def _panel(
    title: str,
    runs: Sequence[RunReport],
    value: Callable[[Epoch], float | None],
    percent: bool = False,
    log: bool = False,
) -> dict[str, Any]:
    series = [
        {"name": run.name, "colour": colour, "dash": not run.event_layers, "points": _points(run, value)}
        for run, colour in zip(runs, run_colours(runs), strict=True)
    ]
    return {"title": title, "percent": percent, "log": log, "series": [entry for entry in series if entry["points"]]}


def _points(run: RunReport, value: Callable[[Epoch], float | None]) -> list[tuple[int, float]]:
    values = ((entry.epoch, value(entry)) for entry in run.history)
    return [(epoch, _short(y)) for epoch, y in values if y is not None and math.isfinite(y)]


def sparsity(run: RunReport, colour: str, name: str) -> Figure:
    """Draw the activity sparsity of each layer against the epoch, or of the network if layers were not measured."""
    names = list(dict.fromkeys(layer for epoch in run.history for layer in epoch.layer_sparsity))
    caption = "Activity sparsity of each layer. The dashed line is the whole network."
    series = [
        {
            "name": layer,
            "colour": f"var(--hue{(0, 2, 3, 1)[i % 4]})",  # as in the histogram
            "points": _points(run, lambda epoch, layer=layer: epoch.layer_sparsity.get(layer)),
        }
        for i, layer in enumerate(names)
    ]
    if not names:
        caption = "Activity sparsity of the whole network. The run has no metrics per layer."
    whole = _points(run, lambda epoch: epoch.activity_sparsity)
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
        {"kind": "histogram", "title": title, "layers": rows, "mean": _short(mean)},
    )


# ---- rasters ---------------------------------------------------------------------------------------------------------


def rasters(sequences: Sequence[Raster]) -> list[Figure]:
    """Draw one figure per sequence, each with its share of :data:`MAX_CELLS`."""
    cells = MAX_CELLS // max(1, len(sequences))
    return [raster(sequence, f"raster-{i}", cells) for i, sequence in enumerate(sequences, 1)]


def raster(sequence: Raster, name: str, cells: int = MAX_CELLS) -> Figure:
    """Draw the input, the events and the number of active units of one sequence."""
    steps = min(len(sequence.events), MAX_STEPS)
    sizes = sequence.layers or (("", sequence.events.shape[1]),)
    units_per_layer = max(1, min(MAX_UNITS, cells // (steps * len(sizes))))
    shown: list[dict[str, Any]] = []
    columns: list[np.ndarray] = []
    first = 0
    for layer, units in sizes:
        activity = (sequence.events[:, first : first + units] != 0).sum(0)
        order = np.argsort(-activity, kind="stable")
        selected = order[np.linspace(0, units - 1, min(units, units_per_layer)).round().astype(int)]
        columns.append(first + selected)
        shown.append({"name": layer, "size": units, "units": selected.tolist()})
        first += units
    events = sequence.events[:steps, np.concatenate(columns)]
    low, high = min(0.0, float(events.min())), max(0.0, float(events.max()))
    level = 1 + np.round(254 * (events - low) / ((high - low) or 1.0))
    data: dict[str, Any] = {
        "kind": "raster",
        "title": f"{sequence.title}: activity sparsity {format.percent(sequence.activity_sparsity, 0)}",
        "label": sequence.label,
        "steps": steps,
        "layers": shown,
        "low": _short(low),
        "high": _short(high),
        "events": _bytes(np.where(events == 0, 0, level).T),
        "active": (sequence.events[:steps] != 0).sum(1).tolist(),
        "input": _image(_average_rows(sequence.input[:steps].T, MAX_INPUT_ROWS)),
        "inputs": sequence.input.shape[1],
        "words": list(sequence.words[:steps]),
    }
    if sequence.image is not None:
        frames = sequence.image[:steps] if sequence.image.ndim == 3 else sequence.image[None]
        frames = _average_rows(frames.swapaxes(0, 1), MAX_IMAGE_SIDE).swapaxes(0, 1)
        frames = _average_rows(frames.swapaxes(0, 2), MAX_IMAGE_SIDE).swapaxes(0, 2)
        data["image"] = _image(frames.reshape(len(frames), -1)) | {"rows": frames.shape[1], "columns": frames.shape[2]}
        data["image"]["frames"] = len(frames)
    caption = (
        f"{int((sequence.events != 0).sum()):,} events; a dense network would transmit {sequence.events.size:,} "
        "values. Each dot is an event, coloured by its value. Hover over a dot to see its unit. Drag to zoom in, "
        "double-click to reset."
    )
    if events.shape[1] < sequence.events.shape[1]:
        caption += f" Shown: {events.shape[1]:,} of {sequence.events.shape[1]:,} units."
    if steps < len(sequence.events):
        caption += f" Shown: the first {steps} of {len(sequence.events):,} steps."
    return Figure(name, f"Event raster: {sequence.title}", caption, data, wide=True)


def _average_rows(rows: np.ndarray, limit: int) -> np.ndarray:
    """Reduce ``rows`` to at most ``limit`` by averaging neighbours."""
    if len(rows) <= limit:
        return rows
    edges = np.linspace(0, len(rows), limit + 1).astype(int)
    return np.stack([rows[a:b].mean(0) for a, b in itertools.pairwise(edges)])


def _image(rows: np.ndarray) -> dict[str, Any]:
    """Encode rows as grey levels from 0 to 255. The upper bound is a quantile, to be robust against outliers."""
    low, high = float(rows.min()), float(np.quantile(rows, 0.995))
    high = high if high > low else float(rows.max())
    level = np.clip((rows - low) / ((high - low) or 1.0), 0, 1) * 255
    return {"rows": rows.shape[0], "columns": rows.shape[1], "data": _bytes(level)}


def _bytes(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values.round(), dtype=np.uint8).tobytes()).decode()


def _short(value: float) -> float:
    return float(f"{value:.5g}")
