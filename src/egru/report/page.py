"""One HTML page with everything in it, the numbers as JSON, and the figures as files beside it."""

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
from egru.report.headline import answer, baseline, numbers, score, sentence
from egru.report.plots import activity_histogram, macs_bar, training_curves
from egru.report.raster import event_raster
from egru.report.run import Raster, RunReport, check_runs
from egru.report.table import NOTE, measures
from egru.report.theme import DARK, LIGHT, Theme, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

DPI = 200
"""Of the figures as files: two pixels to one of a page, for screens that have them."""


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
    """Write ``index.html`` and ``report.json`` into ``folder``, and the figures as PNG files where matplotlib is there;
    return the page's path.

    The page holds its numbers, style and script itself and loads nothing. ``command`` is what a reader types to make
    the same report; ``config`` is shown and stored, beside what each run has of its own; ``notes`` say what is missing
    and why. Files of an earlier report are replaced one by one, each complete, the page last; nothing is touched before
    everything has been drawn.
    """
    check_runs("write_report", runs)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"write_report: folder must be a directory or not exist yet, got {str(folder)!r}")
    plain_config, environment = _plain(config), _environment()
    page = _page(title, runs, rasters, command, plain_config, environment, notes)
    stored = {
        "format": FORMAT,
        "title": title,
        "command": command,
        "config": plain_config,
        "environment": environment,
        "runs": [_plain(run.to_dict()) for run in runs],
        "derived": {run.name: run.derived() for run in runs},
    }
    files = _pictures(runs, rasters)
    files["report.json"] = json.dumps(stored, indent=2, allow_nan=False).encode()
    files["index.html"] = page.encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        replace_file(folder / name, data)
    return folder / "index.html"


def read_runs(path: Path) -> tuple[RunReport, ...]:
    """The runs of a ``report.json`` that :func:`write_report` wrote."""
    return tuple(RunReport.from_dict(run, path) for run in read_json(Path(path))["runs"])


def _pictures(runs: Sequence[RunReport], rasters: Sequence[Raster]) -> dict[str, bytes]:
    """The figures on white, for papers and slides; none without matplotlib."""
    try:
        require_matplotlib()
    except ImportError:
        return {}
    found = {"macs.png": _png(macs_bar(runs)), "training.png": _png(training_curves(runs))}
    for run, file in zip(runs, _file_names("activity", [run.name for run in runs]), strict=True):
        if run.event_layers:
            found[file] = _png(activity_histogram(run))
    return found | {f"raster-{i}.png": _png(event_raster(raster)) for i, raster in enumerate(rasters, 1)}


def _png(figure: "MatplotlibFigure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _page(
    title: str,
    runs: Sequence[RunReport],
    rasters: Sequence[Raster],
    command: str,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    notes: Sequence[str],
) -> str:
    with_events = [(run, hue) for run, hue in zip(runs, figures.hues(runs), strict=True) if run.event_layers]
    work = [figures.work(runs)]
    work += [figures.layers(run, hue, f"layers-{i}") for i, (run, hue) in enumerate(with_events, 1)]
    sequences = figures.rasters(rasters)
    units = [
        figure
        for i, (run, hue) in enumerate(with_events, 1)
        for figure in (figures.histogram(run, f"activity-{i}"), figures.silence(run, hue, f"silence-{i}"))
    ]
    training = [figures.curves(runs)]
    drawn = {f.name: f.data for f in (*work, *sequences, *units, *training) if f.data is not None}

    several = len(runs) > 2
    numbers = f"<h2>All numbers</h2>{_table(runs)}"
    parts = [*_headlines(title, runs, cards=not several), *([numbers] if several else [])]
    parts += ["<h2>Where the work goes</h2>", _figures(work)]
    if sequences or notes:
        said = "".join(f'<p class="small">{escape(note)}</p>' for note in notes)
        parts += ["<h2>Who spoke, and when</h2>", _figures(sequences), said]
    if units:
        parts += ["<h2>How often units speak, and how that came about</h2>", _figures(units)]
    parts += ["<h2>Training</h2>", _figures(training), *([] if several else [numbers])]
    parts += ["<h2>Run it again</h2>", f"<pre>{escape(_commands(command, runs))}</pre>"]
    differs, shared = _settings(runs, config)
    parts.append(
        f'{differs}<div class="facts"><section><h2>Configuration</h2>{shared}</section>'
        f"<section><h2>Environment</h2>{_environments(runs, environment)}</section></div>"
    )
    text = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("</", "<\\/").replace("<!", "<\\u0021")
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
    """The themes' colours as variables of the style sheet."""

    def variables(theme: Theme) -> str:
        named = {
            "ink": theme.ink,
            "muted": theme.muted,
            "faint": theme.faint,
            "dense": theme.dense,
            "alarm": theme.alarm,
        }
        named |= {f"hue{i}": value for i, value in enumerate(theme.event)}
        named |= {f"value{i}": value for i, value in enumerate(theme.value_colours)}
        return " ".join(f"--{name}: {value};" for name, value in named.items())

    return f":root {{ {variables(LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}\n"


def _headlines(title: str, runs: Sequence[RunReport], cards: bool) -> list[str]:
    other = baseline(runs)
    parts = [f'<p class="kicker">{escape(title)}</p>', f"<h1>{_emphasised(answer(runs))}</h1>"]
    with_events = [run for run in runs if run.event_layers]
    for run in with_events:
        parts.append(f'<p class="lead">{escape(sentence(run, other))}</p>')
        if cards:
            cells = "".join(
                f"<div{' class=saved' if number.saved else ''}><b>{escape(number.value)}</b>"
                f"<span>{escape(number.label)}</span><small>{escape(number.detail)}</small></div>"
                for number in numbers(run, other)
            )
            parts.append(f'<section class="headline">{cells}</section>')
    if not with_events:
        scores = ", ".join(f"{run.name} {score(run)}" for run in runs)
        return [*parts, f'<p class="lead">No run here has event layers. {escape(scores)}.</p>']
    assumptions = dict.fromkeys(run.activity.energy.assumption for run in with_events)
    return [
        *parts,
        '<p class="small">Compute is counted in multiply-accumulates (MACs), not timed: what hardware that skips zeros '
        "would do, against the same network with nothing skipped. One training run of each model.</p>",
        f'<p class="small">Energy assumes {escape("; or ".join(assumptions))}.</p>',
    ]


def _emphasised(text: str) -> str:
    """The percentages of a headline in the colour of savings."""
    return re.sub(r"(\d+ %(?: to \d+ %)?)", r"<em>\1</em>", escape(text))


def _figures(shown: Sequence[Figure]) -> str:
    return f'<div class="figures">{"".join(figure.html() for figure in shown)}</div>' if shown else ""


def _table(runs: Sequence[RunReport]) -> str:
    return _side_by_side(runs, measures(runs)) + f'<p class="small">{escape(NOTE)}</p>'


def _side_by_side(runs: Sequence[RunReport], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
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
    """What differs between runs with settings of their own, and what all share."""
    own = [{key: _words(value) for key, value in _plain(run.config).items()} for run in runs]
    names = list(dict.fromkeys(name for settings in own for name in settings))
    same = {name: own[0].get(name, "-") for name in names if len({settings.get(name, "-") for settings in own}) == 1}
    differs = [(name, [settings.get(name, "-") for settings in own]) for name in names if name not in same]
    table = f"<h2>Settings that differ</h2>{_side_by_side(runs, differs)}" if differs else ""
    return table, _facts({key: _words(value) for key, value in config.items()} | same)


def _environments(runs: Sequence[RunReport], page: Mapping[str, Any]) -> str:
    """Of the runs, where they brought their own; else of this process, which then made them."""
    own = [{key: _words(value) for key, value in _plain(run.environment or {}).items()} for run in runs]
    if not any(own):
        return _facts({key: _words(value) for key, value in page.items()})
    if all(environment == own[0] for environment in own):
        return _facts(own[0] | {"page made": page["date"]})
    parts = (f"<h3>{escape(run.name)}</h3>{_facts(env)}" for run, env in zip(runs, own, strict=True))
    return "".join(parts) + _facts({"page made": page["date"]})


def _facts(facts: Mapping[str, str]) -> str:
    if not facts:
        return '<p class="small">None given.</p>'
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in facts.items())}</dl>"


def _environment() -> dict[str, Any]:
    """The environment of this process, and the date."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {**to_plain(Environment.current()), "date": date}


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
