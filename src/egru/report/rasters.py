"""The raster figures of the page: selection of units, and the data that ``raster.js`` draws."""

import base64
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from egru import format
from egru.report.figures import Figure, short
from egru.report.run import Raster

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


def raster_figures(sequences: Sequence[Raster]) -> list[Figure]:
    """Draw one figure per sequence, each with its share of :data:`MAX_CELLS`."""
    cells = MAX_CELLS // max(1, len(sequences))
    return [raster_figure(sequence, f"raster-{i}", cells) for i, sequence in enumerate(sequences, 1)]


def raster_figure(sequence: Raster, name: str, cells: int = MAX_CELLS) -> Figure:
    """Draw the input, the events and the number of active units of one sequence."""
    steps = min(len(sequence.events), MAX_STEPS)
    sizes = sequence.layers or (("", sequence.events.shape[1]),)
    units_per_layer = max(1, min(MAX_UNITS, cells // (steps * len(sizes))))
    shown: list[dict[str, Any]] = []
    columns: list[np.ndarray] = []
    first = inactive = 0
    events_exist = bool(sequence.events[:steps].any())
    for layer, units in sizes:
        activity = (sequence.events[:steps, first : first + units] != 0).sum(0)
        order = np.argsort(-activity, kind="stable")[: np.count_nonzero(activity) or (0 if events_exist else units)]
        selected = order[np.linspace(0, len(order) - 1, min(len(order), units_per_layer)).round().astype(int)]
        inactive += units - np.count_nonzero(activity)
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
        "low": short(low),
        "high": short(high),
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
    if inactive and events_exist:
        caption += f" Not drawn: {inactive:,} of {sequence.events.shape[1]:,} units, which emit no event here."
    active = sequence.events.shape[1] - inactive
    if events.shape[1] < active:
        caption += f" Drawn: {events.shape[1]:,} of the {active:,} active units, evenly spaced by activity."
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
