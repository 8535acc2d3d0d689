"""The figures of the page: what each shows, and the numbers that ``page.js`` draws it from.

Bars are plain HTML. Curves, histograms and rasters are drawn where they are read, at the size they are read at, and
answer to the pointer.
"""

import base64
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from egru.report import format
from egru.report.run import Epoch, Raster, RunReport

UNITS = 192
"""Of one layer in a raster; of larger layers, as many units from the busiest to the quietest."""
STEPS = 784
"""Of a raster: an image of MNIST, pixel by pixel."""
CELLS = 250_000
"""Units times steps of all rasters of a page together: a third of a megabyte."""
INPUTS = 64
"""Rows of the input above a raster; of more, means of neighbours."""
SIDE = 64
"""Pixels along a picture's side."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure: ``content`` is HTML, ``data`` what ``page.js`` draws from, None where there is nothing to draw."""

    name: str
    description: str
    caption: str
    data: dict[str, Any] | None = None
    content: str = ""
    wide: bool = False

    def html(self) -> str:
        plot = f'<div class="plot" role="img" aria-label="{escape(self.description)}">{self.content}</div>'
        size = ' class="wide"' if self.wide else ""
        return f'<figure id="{self.name}"{size}>{plot}<figcaption>{escape(self.caption)}</figcaption></figure>'


def hues(runs: Sequence[RunReport]) -> list[str]:
    """One colour of the style sheet per run: grey without events, a hue with them."""
    number = 0
    found: list[str] = []
    for run in runs:
        found.append(f"var(--hue{number % 4})" if run.event_layers else "var(--dense)")
        number += bool(run.event_layers)
    return found


# ---- bars ------------------------------------------------------------------------------------------------------------


def work(runs: Sequence[RunReport]) -> Figure:
    """Multiply-accumulates forward and backward and energy of a step: used, inside what the dense network takes."""

    def rows(used: Callable[[Any], float], dense: Callable[[Any], float], text: Callable[[float], str]) -> str:
        longest = max(dense(run.activity) for run in runs)
        return "".join(
            _bar(run.name, used(run.activity), dense(run.activity), longest, text, hue)
            for run, hue in zip(runs, hues(runs), strict=True)
        )

    groups = (
        ("Forward, MACs a step", rows(lambda a: a.forward_macs, lambda a: a.dense_forward_macs, format.count)),
        ("Backward, MACs a step", rows(lambda a: a.backward_macs, lambda a: a.dense_backward_macs, format.count)),
        ("Energy of a forward step, estimated", rows(lambda a: a.joules, lambda a: a.dense_joules, format.joules)),
    )
    return Figure(
        "work",
        "Bars: multiply-accumulates and energy per time step, used and dense",
        "The filled part is the work that was needed, the pale part the same network with nothing skipped: the less of "
        "a bar is filled, the more the events saved.",
        content="".join(f"<h3>{title}</h3>{bars}" for title, bars in groups),
    )


def layers(run: RunReport, hue: str, name: str) -> Figure:
    """Where the forward work of one run goes: every layer's input, its recurrence, the readouts."""
    parts: list[tuple[str, float, float, str]] = []
    steps = run.activity.steps
    for layer in run.activity.layers:
        cost, rows = layer.cost, layer.cost.gates * layer.cost.hidden_size
        inputs, dense = rows * (cost.input_density * cost.input_size + 1), rows * (cost.input_size + 1)  # with the bias
        share = layer.steps / steps
        parts.append(
            (
                f"{layer.name}, input",
                inputs * share,
                dense * share,
                f"{format.percent(1 - cost.input_density, 0)} of its input is zero",
            )
        )
        parts.append(
            (
                f"{layer.name}, recurrent",
                (cost.forward - inputs) * share,
                (cost.dense.forward - dense) * share,
                f"{format.percent(layer.activity_sparsity, 0)} of its units are silent",
            )
        )
    parts += [
        (
            linear.name,
            linear.macs / steps,
            linear.dense_macs / steps,
            f"{format.percent(1 - linear.input_density, 0)} of its input is zero",
        )
        for linear in run.activity.linears
    ]
    longest = max(dense for _, _, dense, _ in parts)
    return Figure(
        name,
        f"Bars: forward multiply-accumulates of {run.name} by layer, used and dense",
        "Silence saves what is read from silent units: a layer's own recurrence and the input of the layer above. An "
        "input that is never zero is paid for in full.",
        content=f"<h3>{escape(run.name)}, forward MACs a step</h3>"
        + "".join(_bar(part, used, dense, longest, format.count, hue, why) for part, used, dense, why in parts),
    )


def _bar(
    name: str, used: float, dense: float, longest: float, text: Callable[[float], str], hue: str, why: str = ""
) -> str:
    saved = f" <b>{format.percent(1 - used / dense, 0)} saved</b>" if used < 0.995 * dense else ""
    why = f' title="{escape(why)}"' if why else ""
    return (
        f'<div class="bar" style="--hue:{hue}"{why}><span>{escape(name)}</span>'
        f"<span>{text(used)} of {text(dense)}{saved}</span>"
        f'<i style="width:{100 * dense / longest:.2f}%"><i style="width:{100 * used / dense:.2f}%"></i></i></div>'
    )


# ---- curves ----------------------------------------------------------------------------------------------------------


def curves(runs: Sequence[RunReport]) -> Figure:
    """Loss, validation score and, where there are events, silence against the epoch."""
    language = all(run.history[-1].validation_perplexity is not None for run in runs)
    panels = [_panel("Training loss", runs, lambda epoch: epoch.train_loss)]
    if language:
        panels.append(_panel("Validation perplexity", runs, lambda epoch: epoch.validation_perplexity, log=True))
    else:
        panels.append(_panel("Validation accuracy", runs, lambda epoch: epoch.validation_accuracy, percent=True))
    if any(epoch.activity_sparsity is not None for run in runs for epoch in run.history):
        panels.append(_panel("Silent (activity sparsity)", runs, lambda epoch: epoch.activity_sparsity, percent=True))
    return Figure(
        "curves",
        f"Lines: training loss, validation {'perplexity' if language else 'accuracy'} and activity sparsity by epoch",
        "Solid lines have events, dashed ones do not. Point at an epoch for its numbers.",
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
        {"name": run.name, "colour": hue, "dash": not run.event_layers, "points": _points(run, value)}
        for run, hue in zip(runs, hues(runs), strict=True)
    ]
    return {"title": title, "percent": percent, "log": log, "series": [entry for entry in series if entry["points"]]}


def _points(run: RunReport, value: Callable[[Epoch], float | None]) -> list[tuple[int, float]]:
    found = ((entry.epoch, value(entry)) for entry in run.history)
    return [(epoch, _short(y)) for epoch, y in found if y is not None and math.isfinite(y)]


def silence(run: RunReport, hue: str, name: str) -> Figure:
    """How the sparsity of every layer went over the epochs; the whole network's where nobody counted layers."""
    known = list(dict.fromkeys(layer for epoch in run.history for layer in epoch.layer_sparsity))
    caption = "Each layer finds its own level; the dashed line is the whole network."
    series = [
        {
            "name": layer,
            "colour": f"var(--hue{(0, 2, 3, 1)[i % 4]})",  # as in the histogram
            "points": _points(run, lambda epoch, layer=layer: epoch.layer_sparsity.get(layer)),
        }
        for i, layer in enumerate(known)
    ]
    if not known:
        caption = "The whole network: this run's metrics have no line per layer."
    whole = _points(run, lambda epoch: epoch.activity_sparsity)
    series.append(
        {"name": "all layers", "colour": "var(--ink)" if known else hue, "dash": bool(known), "points": whole}
    )
    panel = {"title": f"{run.name}, silent by layer", "percent": True, "log": False, "series": series}
    data = {"kind": "lines", "panels": [panel], "x": "epoch", "legend": True}
    return Figure(name, f"Lines: activity sparsity of {run.name}'s layers by epoch", caption, data)


# ---- units -----------------------------------------------------------------------------------------------------------


def histogram(run: RunReport, name: str) -> Figure:
    """How often each unit of the event layers speaks; the dead and the ones that never stop stand apart."""
    edges = np.linspace(0, 1, 21)
    rows: list[dict[str, Any]] = []
    for layer in run.event_layers:
        units = np.asarray(layer.unit_activity)
        some = units[(units > 0) & (units < 1)]
        rows.append(
            {
                "name": layer.name,
                "never": int((units == 0).sum()),
                "always": int((units == 1).sum()),
                "bins": np.histogram(some, edges)[0].tolist(),
            }
        )
    everyone = np.concatenate([layer.unit_activity for layer in run.event_layers])
    mean = float(everyone.mean())
    title = f"{run.name}: {len(everyone):,} units, on average active {format.percent(mean)} of the time"
    return Figure(
        name,
        f"Histogram: how often each unit of {run.name} speaks",
        "Each unit counts once, at the share of steps at which it speaks: dead units never do and could be pruned, "
        "units that are always on save nothing.",
        {"kind": "histogram", "title": title, "layers": rows, "mean": _short(mean)},
    )


# ---- rasters ---------------------------------------------------------------------------------------------------------


def rasters(given: Sequence[Raster]) -> list[Figure]:
    """One figure each, fewer units and steps the more of them there are."""
    return [raster(each, f"raster-{i}", CELLS // len(given)) for i, each in enumerate(given, 1)]


def raster(given: Raster, name: str, cells: int = CELLS) -> Figure:
    """One sequence from above: what came in, who spoke and what was said, how many spoke."""
    steps = min(len(given.events), STEPS)
    sizes = given.layers or (("units", given.events.shape[1]),)
    most = max(1, min(UNITS, cells // (steps * len(sizes))))
    events, shown, first = given.events[:steps], [], 0
    columns: list[np.ndarray] = []
    for layer, units in sizes:
        busy = (given.events[:, first : first + units] != 0).sum(0)
        order = np.argsort(-busy, kind="stable")
        picked = order[np.linspace(0, units - 1, min(units, most)).round().astype(int)]
        columns.append(first + picked)
        shown.append({"name": layer, "size": units, "units": picked.tolist()})
        first += units
    chosen = events[:, np.concatenate(columns)]
    low, high = min(0.0, float(chosen.min())), max(0.0, float(chosen.max()))
    level = 1 + np.round(254 * (chosen - low) / ((high - low) or 1.0))
    data: dict[str, Any] = {
        "kind": "raster",
        "title": f"{given.title}: {format.percent(given.activity_sparsity, 0)} silent",
        "label": given.label,
        "steps": steps,
        "layers": shown,
        "low": _short(low),
        "high": _short(high),
        "events": _bytes(np.where(chosen == 0, 0, level).T),
        "active": (given.events[:steps] != 0).sum(1).tolist(),
        "input": _image(_fewer(given.input[:steps].T, INPUTS)),
        "inputs": given.input.shape[1],
        "words": list(given.words[:steps]),
    }
    if given.image is not None:
        film = given.image[:steps] if given.image.ndim == 3 else given.image[None]
        film = _fewer(_fewer(film.swapaxes(0, 1), SIDE).swapaxes(0, 2), SIDE).swapaxes(0, 2).swapaxes(0, 1)
        data["image"] = _image(film.reshape(len(film), -1)) | {"rows": film.shape[1], "columns": film.shape[2]}
        data["image"]["frames"] = len(film)
    parts = sum(len(layer["units"]) for layer in shown), given.events.shape[1]
    part = f" Drawn: {parts[0]:,} of {parts[1]:,} units." if parts[0] < parts[1] else ""
    part += f" The first {steps} of {len(given.events):,} steps." if steps < len(given.events) else ""
    return Figure(
        name,
        f"Event raster: {given.title}",
        f"{int((given.events != 0).sum()):,} events where a dense network sends {given.events.size:,} values: a dot is "
        "a unit speaking, its colour the value sent. Point at a dot for its unit; drag over a part to zoom, "
        f"double-click for the whole.{part}",
        data,
        wide=True,
    )


def _fewer(rows: np.ndarray, most: int) -> np.ndarray:
    """At most so many rows: means of neighbours."""
    if len(rows) <= most:
        return rows
    edges = np.linspace(0, len(rows), most + 1).astype(int)
    return np.stack([rows[a:b].mean(0) for a, b in itertools.pairwise(edges)])


def _image(rows: np.ndarray) -> dict[str, Any]:
    """Grey levels, darkest where the value is largest; a bound that a single outlier does not set."""
    low, high = float(rows.min()), float(np.quantile(rows, 0.995))
    high = high if high > low else float(rows.max())
    level = np.clip((rows - low) / ((high - low) or 1.0), 0, 1) * 255
    return {"rows": rows.shape[0], "columns": rows.shape[1], "data": _bytes(level)}


def _bytes(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values.round(), dtype=np.uint8).tobytes()).decode()


def _short(value: float) -> float:
    return float(f"{value:.5g}")
