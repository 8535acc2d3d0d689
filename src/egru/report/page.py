"""Write a report: a self-contained HTML page, its numbers as JSON, and its figures as PNG files."""

import datetime
import io
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from egru import format
from egru.demo import PAGE
from egru.environment import Environment
from egru.files import replace_file
from egru.records import FORMAT, read_json, to_plain
from egru.report import figures
from egru.report.figures import Figure
from egru.report.headline import cards, different_tasks, find_baseline, headline, score_text, summary
from egru.report.html import document, figure_grid, folded, json_value, small, table
from egru.report.plots import activity_histogram, macs_bar, training_curves
from egru.report.raster import event_raster
from egru.report.rasters import raster_figures
from egru.report.run import Raster, RunReport, ThresholdSearch, check_runs
from egru.report.scatter import floors, quality, threshold_search
from egru.report.settings import differing_settings, environments, shared_settings
from egru.report.table import NOTE, measures
from egru.report.theme import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

DPI = 200
"""Resolution of the PNG files: twice that of a page, for high-density screens."""
MAX_COLUMNS = 6
"""Runs that the table shows side by side. With more, each run is a row."""
MAX_SUMMARIES = 4
"""Runs with one sentence each at the top. Pages with more have only the table."""

DIGITS = "digits.html"
"""Name of the interactive page next to the report."""


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
        >>> runs = [run]  # run: an egru.report.RunReport
        >>> config = {"hidden": 128}
        >>> page = egru.report.write_report(
        ...     Path("report"), "My run", runs, [], command="python train.py", config=config
        ... )
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
        "config": json_value(config),
        "environment": to_plain(environment),
        "runs": [json_value(run.to_dict()) for run in runs],
        "derived": {run.name: run.derived() for run in runs},
    }
    page = _page(record, environment, runs, rasters, notes)
    files = _png_files(runs, rasters)
    files["report.json"] = json.dumps(record, indent=2, allow_nan=False).encode()
    if _reads_digits(runs):
        files[DIGITS] = PAGE.read_bytes()
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

    Returns:
        The runs, in the order of the report.

    Example:
        >>> path = egru.report.write_report(Path("report"), "My run", [run], [], command="python train.py", config={})
        >>> egru.report.read_runs(path.with_name("report.json"))[0].name
        'EGRU'
    """
    return tuple(RunReport.from_dict(run, path) for run in read_json(Path(path))["runs"])


def _png_files(runs: Sequence[RunReport], rasters: Sequence[Raster]) -> dict[str, bytes]:
    """Return the figures with a white background, by file name. Empty if matplotlib is not installed."""
    try:
        require_matplotlib()
    except ImportError:
        return {}
    files = {"macs.png": _png(macs_bar(runs))}
    if any(run.history for run in runs):
        files["training.png"] = _png(training_curves(runs))
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
    """Return the page. ``docs/guides/report.md`` describes its sections."""
    with_events = [
        (run, colour) for run, colour in zip(runs, figures.run_colours(runs), strict=True) if run.event_layers
    ]
    computation = [figures.computation(runs)]
    computation += [figures.layers(run, colour, f"layers-{i}") for i, (run, colour) in enumerate(with_events, 1)]
    compared = [figure for figure in [quality(runs)] if figure is not None]
    searches = [
        (run, search, threshold_search(run, search, colour, f"search-{i}"))
        for i, (run, colour) in enumerate(with_events, 1)
        if (search := run.search) is not None
    ]
    sequences = raster_figures(rasters)
    units = [
        figure
        for i, (run, colour) in enumerate(with_events, 1)
        for figure in (figures.histogram(run, f"activity-{i}"), figures.sparsity(run, colour, f"sparsity-{i}"))
        if figure.name.startswith("activity") or run.history
    ]
    training = [figures.curves(runs)] if any(run.history for run in runs) else []
    drawn = [*computation, *compared, *(figure for _, _, figure in searches), *sequences, *units, *training]

    several = len(runs) > 2
    numbers = f"<h2>All numbers</h2>{_table(runs)}"
    title = record["title"]
    parts = [*_headlines(title, runs, with_cards=not several)]
    if (difference := different_tasks(runs)) is not None:
        parts.append(small(difference))
    parts += [numbers] if several else []
    if compared:
        parts += ["<h2>Quality against cost</h2>", figure_grid(compared)]
    parts += ["<h2>Where the computation goes</h2>", figure_grid(computation)]
    if searches:
        parts += ["<h2>Threshold search</h2>", *(_search(*entry) for entry in searches)]
    if sequences or notes:
        parts += ["<h2>Event raster</h2>", figure_grid(sequences), *map(small, notes)]
    if _reads_digits(runs):
        parts.append(
            f'<p class="small"><a href="{DIGITS}">Draw a digit</a> and watch a pretrained network of this kind read it '
            "pixel by pixel in the browser.</p>"
        )
    if units:
        parts += ["<h2>Activity of the units</h2>", figure_grid(units)]
    if training:
        parts += ["<h2>Training curves</h2>", figure_grid(training)]
        parts += [
            small(f"{run.name} has no training curves: its weights are those of {run.search.source}.")
            for run in runs
            if run.search
        ]
    parts += [*([] if several else [numbers])]
    if commands := _commands(record["command"], runs):
        parts += ["<h2>Command</h2>", f"<pre>{escape(commands)}</pre>"]
    parts.append(differing_settings(runs))
    parts.append(
        f'<div class="facts"><section><h2>Settings</h2>{shared_settings(runs, record["config"])}</section>'
        f"<section><h2>Environment</h2>{environments(runs, environment, record['date'])}</section></div>"
    )
    return document(title, parts, drawn)


def _headlines(title: str, runs: Sequence[RunReport], with_cards: bool) -> list[str]:
    parts = [f'<p class="kicker">{escape(title)}</p>', f"<h1>{emphasise_percentages(headline(runs))}</h1>"]
    with_events = [run for run in runs if run.event_layers]
    for run in with_events if len(with_events) <= MAX_SUMMARIES else []:
        baseline = find_baseline(run, runs)
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
        parts.append(f'<p class="lead">None of the runs has event layers. {escape(scores)}.</p>')
    if untested := [run.name for run in runs if run.split != "test"]:
        parts.append(small(f"The test split was not scored: the numbers of {', '.join(untested)} are on validation."))
    if not with_events:
        return parts
    assumptions = dict.fromkeys(run.activity.energy.assumption for run in with_events)
    return [
        *parts,
        small(
            "Computation is counted in multiply-accumulates (MACs), not timed. The count assumes hardware that skips "
            "zeros and is compared with the same network with nothing skipped. The numbers of a model are those of one "
            "training run."
        ),
        small(f"The energy estimate assumes {'; or '.join(assumptions)}."),
    ]


def _reads_digits(runs: Sequence[RunReport]) -> bool:
    """Return whether an event-based run reads MNIST pixel by pixel, as the network of the interactive page does."""
    return any(run.event_layers and run.config.get("data") == "smnist" for run in runs)


def emphasise_percentages(text: str) -> str:
    """Escape ``text`` and mark its percentages, which the style sheet colours."""
    return re.sub(r"(\d[\d.]* %(?: to \d+ %)?)", r"<em>\1</em>", escape(text))


def _table(runs: Sequence[RunReport]) -> str:
    """Return all numbers with one column per run, or with one row per run if there are many."""
    rows = measures(runs)
    if len(runs) <= MAX_COLUMNS:
        marked = [bool(run.event_layers) for run in runs]
        return table([run.name for run in runs], rows, marked) + small(NOTE)
    cells = zip(*(row for _, row in rows), strict=True)
    by_run = [(run.name, row) for run, row in zip(runs, cells, strict=True)]
    return table([label for label, _ in rows], by_run, corner="run") + small(NOTE)


def _search(run: RunReport, search: ThresholdSearch, figure: Figure) -> str:
    """Describe how a run was derived: where from, the time, and the validation scores before and after."""
    before, after = search.trials[0], search.trials[search.chosen]
    duration = "" if run.seconds is None else f" in {format.seconds(run.seconds)}"
    number = f"{len(search.trials)} settings" if len(search.trials) > 1 else "one setting"
    text = (
        f"{run.name} is {search.source} with raised thresholds; nothing was trained. The search measured {number} of "
        f"the thresholds on the validation split{duration}."
    )
    rows = [
        ("smallest threshold, per layer", [floors(trial) for trial in (before, after)]),
        ("loss", [f"{trial.validation.loss:.4f}" for trial in (before, after)]),
        ("accuracy", [format.percent(trial.validation.accuracy, 2) for trial in (before, after)]),
        ("activity sparsity", [format.percent(trial.activity_sparsity) for trial in (before, after)]),
        ("forward MACs per step", [format.count(trial.forward_macs) for trial in (before, after)]),
    ]
    if before.validation.perplexity is not None:
        rows.insert(2, ("perplexity", [f"{trial.validation.perplexity:.2f}" for trial in (before, after)]))
    trials = [
        (
            f"{i}{' (before)' if i == 0 else ''}{' (chosen)' if i == search.chosen else ''}",
            [floors(t), f"{t.validation.loss:.4f}", format.percent(t.activity_sparsity), format.count(t.forward_macs)],
        )
        for i, t in enumerate(search.trials)
    ]
    every = table(
        ["smallest thresholds", "loss", "activity sparsity", "MACs per step"], trials, corner="trial", narrow=True
    )
    return (
        f'<p class="lead">{escape(text)}</p><div class="figures">{figure.html()}<div>'
        f"{table(['before', 'after'], rows, [False, True], 'on validation')}{folded('All trials', every)}</div></div>"
    )


def _commands(command: str, runs: Sequence[RunReport]) -> str:
    return "\n".join(dict.fromkeys(filter(None, (*(run.command for run in runs), command))))


def _file_names(prefix: str, names: Sequence[str]) -> list[str]:
    """Return one file name per run, numbered if the names differ only in characters that are left out."""
    slugs = [re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names]
    if "" in slugs or len(set(slugs)) < len(slugs):
        slugs = [f"{i}-{slug}".rstrip("-") for i, slug in enumerate(slugs, 1)]
    return [f"{prefix}-{slug}.png" for slug in slugs]
