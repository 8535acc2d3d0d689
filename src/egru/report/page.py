"""One HTML page with everything in it, the figures as files beside it, and the numbers as JSON."""

import base64
import dataclasses
import datetime
import importlib.metadata
import importlib.resources
import io
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from egru.report import format
from egru.report.headline import baseline, numbers, sentence
from egru.report.plots import activity_histogram, macs_bar, training_curves
from egru.report.raster import event_raster
from egru.report.run import Raster, RunReport, check_runs
from egru.report.table import NOTE, measures
from egru.report.theme import DARK, LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200
"""Two pixels of a figure to one of the page, for screens that have them."""


@dataclasses.dataclass(frozen=True)
class _Picture:
    """A figure drawn for light and for dark paper."""

    file: str
    light: bytes
    dark: bytes
    description: str
    caption: str

    def html(self) -> str:
        light, dark = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (self.light, self.dark))
        return (
            f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" alt="{escape(self.description)}"></picture>'
            f"<figcaption>{escape(self.caption)}</figcaption></figure>"
        )


def write_report(
    folder: Path,
    title: str,
    runs: Sequence[RunReport],
    rasters: Sequence[Raster],
    *,
    command: str,
    config: Mapping[str, object],
) -> Path:
    """Write ``index.html``, the figures as PNG files and ``report.json`` into ``folder``; return the page's path.

    The page holds its figures and style itself and loads nothing. ``command`` is what a reader types to make the same
    report; ``config`` is shown and stored. Files of an earlier report are replaced one by one, each complete, the page
    last; nothing is touched before everything has been drawn.
    """
    check_runs("write_report", runs)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"write_report: folder must be a directory or not exist yet, got {str(folder)!r}")
    plain_config, environment = _plain(config), _environment()
    compute, sequences, training = _pictures(runs, rasters)
    page = _page(title, runs, compute, sequences, training, command, plain_config, environment)
    stored = {
        "title": title,
        "command": command,
        "config": plain_config,
        "environment": environment,
        "runs": [run.to_dict() for run in runs],
    }
    files = {picture.file: picture.light for picture in (*compute, *sequences, *training)}
    files["report.json"] = json.dumps(stored, indent=2, allow_nan=False).encode()
    files["index.html"] = page.encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        _replace(folder / name, data)
    return folder / "index.html"


def read_runs(path: Path) -> tuple[RunReport, ...]:
    """The runs of a ``report.json`` that :func:`write_report` wrote."""
    stored = json.loads(Path(path).read_text(encoding="utf-8"))
    return tuple(RunReport.from_dict(run) for run in stored["runs"])


def _pictures(
    runs: Sequence[RunReport], rasters: Sequence[Raster]
) -> tuple[list[_Picture], list[_Picture], list[_Picture]]:
    """Of the savings, of single sequences and of training."""
    compute = [
        _draw(
            "macs.png",
            lambda theme: macs_bar(runs, theme=theme),
            "Bars: multiply-accumulates per time step, used and dense, forward and backward",
            "The filled part is the work that was needed, the outline the same network with nothing skipped: the less "
            "of an outline is filled, the more the events saved.",
        )
    ]
    training = [
        _draw(
            "training.png",
            lambda theme: training_curves(runs, theme=theme),
            "Lines: training loss, validation accuracy and activity sparsity by epoch",
            "Solid lines have events, dashed ones do not; where the lowest panel rises while accuracy holds, the "
            "network learns to say the same with fewer words."
            if any(run.event_layers for run in runs)
            else "Loss on the training set and accuracy on the validation set after each epoch.",
        )
    ]
    files = _file_names("activity", [run.name for run in runs])
    for run, file in zip(runs, files, strict=True):
        if run.event_layers:
            compute.append(
                _draw(
                    file,
                    lambda theme, run=run: activity_histogram(run, theme=theme),
                    f"Histogram: how often each unit of {run.name} speaks",
                    "Each unit counts once, at the share of steps at which it speaks: dead units never do and could be "
                    "pruned, units that are always on save nothing.",
                )
            )
    sequences = [
        _draw(
            f"raster-{i}.png",
            lambda theme, raster=raster: event_raster(raster, theme=theme),
            f"Event raster: {raster.title}",
            f"{int((raster.events != 0).sum()):,} events where a dense layer sends {raster.events.size:,} values: a "
            "dot is a unit speaking, its colour the value sent, and an empty column a step that costs almost nothing.",
        )
        for i, raster in enumerate(rasters, 1)
    ]
    return compute, sequences, training


def _draw(file: str, plot: Callable[[Theme], "Figure"], description: str, caption: str) -> _Picture:
    return _Picture(file, _png(plot(LIGHT)), _png(plot(DARK)), description, caption)


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _page(
    title: str,
    runs: Sequence[RunReport],
    compute: Sequence[_Picture],
    sequences: Sequence[_Picture],
    training: Sequence[_Picture],
    command: str,
    config: Mapping[str, Any],
    environment: Mapping[str, str],
) -> str:
    style = importlib.resources.files("egru.report").joinpath("page.css").read_text(encoding="utf-8")
    parts = [f"<h1>{escape(title)}</h1>", *_headlines(runs), "<h2>Where the work went</h2>", _figures(compute)]
    if sequences:
        parts += ["<h2>Who spoke, and when</h2>", _figures(sequences)]
    side_by_side = "figures" if len(runs) <= 2 else "stack"
    parts.append(
        f'<div class="{side_by_side}"><section><h2>Training</h2>{"".join(p.html() for p in training)}</section>'
        f"<section><h2>All numbers</h2>{_table(runs)}</section></div>"
    )
    settings = {key: _words(value) for key, value in config.items()}
    parts += [
        "<h2>Run it again</h2>",
        f"<pre>{escape(command)}</pre>",
        f'<div class="facts"><section><h2>Configuration</h2>{_facts(settings)}</section>'
        f"<section><h2>Environment</h2>{_facts(environment)}</section></div>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _headlines(runs: Sequence[RunReport]) -> list[str]:
    other = baseline(runs)
    parts: list[str] = []
    for run in runs:
        if not run.event_layers:
            continue
        cells = "".join(
            f"<div{' class=saved' if number.saved else ''}><b>{escape(number.value)}</b>"
            f"<span>{escape(number.label)}</span><small>{escape(number.detail)}</small></div>"
            for number in numbers(run, other)
        )
        parts += [f'<p class="lead">{escape(sentence(run, other))}</p>', f'<section class="headline">{cells}</section>']
    if not parts:
        scores = ", ".join(f"{run.name} {format.percent(run.test_accuracy)}" for run in runs)
        return [f'<p class="lead">No run here has event layers, so nothing was skipped. Test accuracy: {scores}.</p>']
    assumptions = dict.fromkeys(run.activity.energy.assumption for run in runs if run.event_layers)
    return [
        *parts,
        '<p class="small">A MAC is one multiply-accumulate. Counted, not timed: what hardware that skips zeros would '
        "do, against the same network with nothing skipped. One training run of each model.</p>",
        f'<p class="small">Energy assumes {escape("; or ".join(assumptions))}.</p>',
    ]


def _figures(pictures: Sequence[_Picture]) -> str:
    return f'<div class="figures">{"".join(picture.html() for picture in pictures)}</div>'


def _table(runs: Sequence[RunReport]) -> str:
    mark = [" class=event" if run.event_layers else "" for run in runs]
    names = "".join(f'<th scope="col"{m}>{escape(run.name)}</th>' for m, run in zip(mark, runs, strict=True))
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f"<td{m}>{escape(cell)}</td>" for m, cell in zip(mark, cells, strict=True))
        + "</tr>"
        for label, cells in measures(runs)
    )
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col"></th>{names}</tr></thead><tbody>{rows}</tbody></table>'
        f'</div><p class="small">{escape(NOTE)}</p>'
    )


def _facts(facts: Mapping[str, str]) -> str:
    if not facts:
        return '<p class="small">None given.</p>'
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in facts.items())}</dl>"


def _environment() -> dict[str, str]:
    try:
        version = importlib.metadata.version("egru")
    except importlib.metadata.PackageNotFoundError:
        version = "source tree, not installed"
    return {
        "egru": version,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _plain(value: Any) -> Any:
    """What JSON can hold; anything else as its text, NaN and infinity too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _words(value: Any) -> str:
    """A plain value on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _file_names(prefix: str, names: Sequence[str]) -> list[str]:
    """One PNG file per name, numbered where names differ only in what a file name should not hold."""
    plain = [re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names]
    if "" in plain or len(set(plain)) < len(plain):
        plain = [f"{i}-{name}".rstrip("-") for i, name in enumerate(plain, 1)]
    return [f"{prefix}-{name}.png" for name in plain]


def _replace(path: Path, data: bytes) -> None:
    """Write beside ``path``, then put in its place: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
