"""Write a report: a self-contained HTML page, its numbers as JSON, and its figures as PNG files."""

import dataclasses
import datetime
import importlib.resources
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from egru.environment import Environment
from egru.files import replace_file
from egru.records import FORMAT, read_json, to_plain
from egru.report import figures
from egru.report.figures import Figure
from egru.report.headline import cards, find_baseline, headline, score_text, summary
from egru.report.plots import activity_histogram, macs_bar, training_curves
from egru.report.raster import event_raster
from egru.report.run import Raster, RunReport, check_runs
from egru.report.table import NOTE, measures
from egru.report.theme import DARK, LIGHT, Theme, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

DPI = 200
"""Resolution of the PNG files: twice that of a page, for high-density screens."""


def write_report(
    folder: Path,
    title: str,
    runs: Sequence[RunReport],
    rasters: Sequence[Raster],
    *,
    command: str,
    config: Mapping[str, object],
    notes: Sequence[str] = (),
) -> Path:
    """Write ``index.html`` and ``report.json`` to ``folder``, and the figures as PNG files if matplotlib is installed.

    The page contains its data, style and script, and loads nothing else. Files of an earlier report are replaced
    atomically, after everything has been drawn; the page is replaced last.

    Args:
        folder: Folder to write to. It is created if it does not exist.
        title: Title of the page.
        runs: Runs with distinct names. The first dense run is the baseline of the others.
        rasters: Sequences whose events are drawn. May be empty.
        command: Command that repeats the report.
        config: Settings that all runs share. The settings of each run are in :attr:`RunReport.config`.
        notes: Remarks shown below the rasters, for example why some are missing.

    Returns:
        The path of the page.

    Raises:
        ValueError: If ``runs`` is empty or two runs have the same name.
        NotADirectoryError: If ``folder`` is a file.

    Example:
        >>> runs = [RunReport("EGRU", history, 0.97, monitor.summary(), seconds=60.0, seed=0)]
        >>> write_report(Path("report"), "My run", runs, [], command="python train.py", config={"hidden": 128})
    """
    check_runs("write_report", runs)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"write_report: folder must be a directory or not exist yet, got {str(folder)!r}")
    environment = Environment.current()
    record = {
        "format": FORMAT,
        "title": title,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "config": _json_value(config),
        "environment": to_plain(environment),
        "runs": [_json_value(run.to_dict()) for run in runs],
        "derived": {run.name: run.derived() for run in runs},
    }
    page = _page(record, environment, runs, rasters, notes)
    files = _png_files(runs, rasters)
    files["report.json"] = json.dumps(record, indent=2, allow_nan=False).encode()
    files["index.html"] = page.encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        replace_file(folder / name, data)
    return folder / "index.html"


def read_runs(path: Path) -> tuple[RunReport, ...]:
    """Return the runs of a ``report.json`` that :func:`write_report` wrote.

    Args:
        path: Path of the file.

    Raises:
        FormatError: If the format number of the file is missing or not supported.
    """
    return tuple(RunReport.from_dict(run, path) for run in read_json(Path(path))["runs"])


def _png_files(runs: Sequence[RunReport], rasters: Sequence[Raster]) -> dict[str, bytes]:
    """Return the figures with a white background, by file name. Empty if matplotlib is not installed."""
    try:
        require_matplotlib()
    except ImportError:
        return {}
    files = {"macs.png": _png(macs_bar(runs)), "training.png": _png(training_curves(runs))}
    for run, file in zip(runs, _file_names("activity", [run.name for run in runs]), strict=True):
        if run.event_layers:
            files[file] = _png(activity_histogram(run))
    return files | {f"raster-{i}.png": _png(event_raster(raster)) for i, raster in enumerate(rasters, 1)}


def _png(figure: "MatplotlibFigure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _page(
    record: Mapping[str, Any],
    environment: Environment,
    runs: Sequence[RunReport],
    rasters: Sequence[Raster],
    notes: Sequence[str],
) -> str:
    """Return the page. ``docs/report.md`` describes its sections."""
    with_events = [
        (run, colour) for run, colour in zip(runs, figures.run_colours(runs), strict=True) if run.event_layers
    ]
    computation = [figures.computation(runs)]
    computation += [figures.layers(run, colour, f"layers-{i}") for i, (run, colour) in enumerate(with_events, 1)]
    sequences = figures.rasters(rasters)
    units = [
        figure
        for i, (run, colour) in enumerate(with_events, 1)
        for figure in (figures.histogram(run, f"activity-{i}"), figures.sparsity(run, colour, f"sparsity-{i}"))
    ]
    training = [figures.curves(runs)]
    data = {f.name: f.data for f in (*computation, *sequences, *units, *training) if f.data is not None}

    several = len(runs) > 2
    numbers = f"<h2>All numbers</h2>{_table(runs)}"
    title = record["title"]
    parts = [*_headlines(title, runs, with_cards=not several), *([numbers] if several else [])]
    parts += ["<h2>Where the computation goes</h2>", _figures(computation)]
    if sequences or notes:
        remarks = "".join(f'<p class="small">{escape(note)}</p>' for note in notes)
        parts += ["<h2>Event raster</h2>", _figures(sequences), remarks]
    if units:
        parts += ["<h2>Activity of the units</h2>", _figures(units)]
    parts += ["<h2>Training curves</h2>", _figures(training), *([] if several else [numbers])]
    parts += ["<h2>Command</h2>", f"<pre>{escape(_commands(record['command'], runs))}</pre>"]
    different, shared = _settings(runs, record["config"])
    parts.append(
        f'{different}<div class="facts"><section><h2>Settings</h2>{shared}</section>'
        f"<section><h2>Environment</h2>{_environments(runs, environment, record['date'])}</section></div>"
    )
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/").replace("<!", "<\\u0021")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_colours()}{_file('page.css')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + '\n</main>\n<div id="tip" role="status" hidden></div>\n'
        + f'<script type="application/json" id="numbers">{text}</script>\n<script>\n{_file("page.js")}</script>\n'
        + "</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return importlib.resources.files("egru.report").joinpath(name).read_text(encoding="utf-8")


def _colours() -> str:
    """Return the colours of both themes as CSS variables."""

    def variables(theme: Theme) -> str:
        values = {
            "ink": theme.ink,
            "muted": theme.muted,
            "faint": theme.faint,
            "dense": theme.dense,
            "alarm": theme.alarm,
        }
        values |= {f"hue{i}": value for i, value in enumerate(theme.event)}
        values |= {f"value{i}": value for i, value in enumerate(theme.value_colours)}
        return " ".join(f"--{name}: {value};" for name, value in values.items())

    return f":root {{ {variables(LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}\n"


def _headlines(title: str, runs: Sequence[RunReport], with_cards: bool) -> list[str]:
    baseline = find_baseline(runs)
    parts = [f'<p class="kicker">{escape(title)}</p>', f"<h1>{_emphasise_percentages(headline(runs))}</h1>"]
    with_events = [run for run in runs if run.event_layers]
    for run in with_events:
        parts.append(f'<p class="lead">{escape(summary(run, baseline))}</p>')
        if with_cards:
            cells = "".join(
                f"<div{' class=saved' if card.highlight else ''}><b>{escape(card.value)}</b>"
                f"<span>{escape(card.label)}</span><small>{escape(card.detail)}</small></div>"
                for card in cards(run, baseline)
            )
            parts.append(f'<section class="headline">{cells}</section>')
    if not with_events:
        scores = ", ".join(f"{run.name} has a {score_text(run)}" for run in runs)
        return [*parts, f'<p class="lead">None of the runs has event layers. {escape(scores)}.</p>']
    assumptions = dict.fromkeys(run.activity.energy.assumption for run in with_events)
    return [
        *parts,
        '<p class="small">Computation is counted in multiply-accumulates (MACs), not timed. The count assumes hardware '
        "that skips zeros and is compared with the same network with nothing skipped. Each model was trained once.</p>",
        f'<p class="small">The energy estimate assumes {escape("; or ".join(assumptions))}.</p>',
    ]


def _emphasise_percentages(text: str) -> str:
    """Escape ``text`` and mark its percentages, which the style sheet colours."""
    return re.sub(r"(\d+ %(?: to \d+ %)?)", r"<em>\1</em>", escape(text))


def _figures(group: Sequence[Figure]) -> str:
    return f'<div class="figures">{"".join(figure.html() for figure in group)}</div>' if group else ""


def _table(runs: Sequence[RunReport]) -> str:
    return _run_table(runs, measures(runs)) + f'<p class="small">{escape(NOTE)}</p>'


def _run_table(runs: Sequence[RunReport], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table with one column per run."""
    mark = [" class=event" if run.event_layers else "" for run in runs]
    names = "".join(f'<th scope="col"{m}>{escape(run.name)}</th>' for m, run in zip(mark, runs, strict=True))
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f"<td{m}>{escape(cell)}</td>" for m, cell in zip(mark, cells, strict=True))
        + "</tr>"
        for label, cells in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col"></th>{names}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _commands(command: str, runs: Sequence[RunReport]) -> str:
    return "\n".join(dict.fromkeys(filter(None, (*(run.command for run in runs), command))))


def _settings(runs: Sequence[RunReport], config: Mapping[str, Any]) -> tuple[str, str]:
    """Return a table of the settings that differ between runs, and a list of those that all share."""
    settings = [_format_values(_json_value(run.config)) for run in runs]
    names = list(dict.fromkeys(name for values in settings for name in values))
    rows = [(name, [values.get(name, "-") for values in settings]) for name in names]
    different = [(name, values) for name, values in rows if len(set(values)) > 1]
    shared = {name: values[0] for name, values in rows if len(set(values)) == 1}
    table = f"<h2>Settings that differ</h2>{_run_table(runs, different)}" if different else ""
    return table, _definition_list(_format_values(config) | shared)


def _environments(runs: Sequence[RunReport], current: Environment, date: str) -> str:
    """Return the environment of each run, once if they are equal."""
    written = {"page written": date}
    environments = [run.environment or current for run in runs]
    if all(environment == environments[0] for environment in environments):
        return _definition_list(_environment_entries(environments[0]) | written)
    parts = [
        f"<h3>{escape(run.name)}</h3>{_definition_list(_environment_entries(environment))}"
        for run, environment in zip(runs, environments, strict=True)
    ]
    return "".join(parts) + _definition_list(written)


def _environment_entries(environment: Environment) -> dict[str, str]:
    return {
        **environment.versions,
        "machine": environment.machine,
        "threads": str(environment.threads),
        "GPU": environment.cuda or "none",
        **{f"kernel {name}": status for name, status in environment.kernels.items()},
    }


def _definition_list(entries: Mapping[str, str]) -> str:
    if not entries:
        return '<p class="small">No settings were recorded.</p>'
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in entries.items())}</dl>"


def _json_value(value: Any) -> Any:
    """Convert a value to JSON. Values that JSON cannot represent become text, also NaN and infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(entry) for entry in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _format_values(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: _format_value(value) for key, value in values.items()}


def _format_value(value: Any) -> str:
    """Format a JSON value on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _file_names(prefix: str, names: Sequence[str]) -> list[str]:
    """Return one file name per run, numbered if the names differ only in characters that are left out."""
    slugs = [re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names]
    if "" in slugs or len(set(slugs)) < len(slugs):
        slugs = [f"{i}-{slug}".rstrip("-") for i, slug in enumerate(slugs, 1)]
    return [f"{prefix}-{slug}.png" for slug in slugs]
