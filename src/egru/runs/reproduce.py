"""Print the paper's tables with our results, and add runs to our results.

The records of our runs are in the repository, in ``benchmarks/results/runs``, one folder per run: what
`egru reproduce --keep RUN` copied, without the checkpoints. `egru report` can read each of them. The numbers that the
tables show ship with the package (:mod:`egru.experiments.results`).
"""

import dataclasses
import datetime
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from egru import format
from egru.experiments.custom import Custom
from egru.experiments.registry import RECIPES, Paper
from egru.experiments.results import (
    RESULTS,
    KeptResult,
    format_results,
    group_seeds,
    read_results,
    spread,
    without_seed,
)
from egru.experiments.tables import ALIASES, TABLES, find_table
from egru.files import replace_file
from egru.records import write_json
from egru.runs.command import recorded_command
from egru.runs.load import read_run_config, training_metrics
from egru.training import EpochMetrics, Run, RunError
from egru.training.records import KeptRecord
from egru.training.run import CONFIG, RESULT

RUNS = Path(__file__).parents[3] / "benchmarks" / "results" / "runs"
"""Records of our runs, in a checkout of the repository."""
RECORD = "record.json"
COLUMNS = ("", "source", "quality", "validation", "sparsity", "backward", "parameters", "MACs/step", "machine")
LEGEND = (
    "Ours: quality, sparsity and MACs on the test split; backward sparsity in training, averaged over the epochs.",
    "Several seeds: mean ± standard deviation (n - 1). Parameters and MACs include the readout; a classifier's readout",
    "runs once per sequence. docs/results/experiments.md says what the paper counts, and shows every run.",
)


def collect_results(runs: Path = RUNS) -> list[KeptResult]:
    """Read the results of all finished runs under ``runs``, in order of their dates.

    Raises:
        FileNotFoundError: If there is no such folder, as in an installed package.
    """
    if not runs.is_dir():
        raise FileNotFoundError(f"{runs} does not exist: the records of our runs are available only in a checkout")
    folders = [path.parent for path in runs.glob(f"*/{RECORD}")]
    before = {source: trial for source, trial in map(_source_trial, folders) if source is not None}
    results = [_read_result(folder, before.get(folder.name)) for folder in folders]
    return sorted(results, key=lambda result: (result.date, result.run))


def _source_trial(folder: Path) -> tuple[str | None, float | None]:
    """Return the run that another was derived from, and its validation perplexity in one column.

    Runs with a remark are left out: they may have started from rounded weights.
    """
    result = Run.open(folder).result()
    if result is None or result.derivation is None or KeptRecord.read(folder / RECORD).note:
        return None, None
    return result.derivation.source, result.derivation.trials[0].validation.perplexity


def _read_result(folder: Path, one_column: float | None) -> KeptResult:
    """Read the result of a kept run. ``one_column`` is its validation perplexity in one column, if it was measured."""
    run, record = Run.open(folder), KeptRecord.read(folder / RECORD)
    result = run.result()
    if result is None:
        raise RunError(f"{folder} has a {RECORD} but no {RESULT}")
    recipe, config = read_run_config(run)
    assert not isinstance(config, Custom)  # refused by keep_run
    activity, metrics = result.activity, training_metrics(run)
    is_dense = activity.backward_sparsity is None
    if result.derivation is None:
        scores = {line.epoch: line.validation for line in metrics}[result.best_epoch]
    else:
        scores = result.derivation.validation
        chosen = {trial.floor: trial for trial in result.derivation.trials}[config.threshold_floor]
        one_column = chosen.validation.perplexity
    environment = run.environment()
    return KeptResult(
        run=folder.name,
        recipe=ALIASES.get(recipe, recipe),
        data=config.data,
        seed=config.seed,
        command=record.command,
        note=record.note,
        date=record.date,
        machine=environment.cuda or environment.machine,
        accuracy=result.test.accuracy,
        perplexity=result.test.perplexity,
        validation=scores.accuracy if scores.perplexity is None else scores.perplexity,
        validation_one_column=one_column,
        activity_sparsity=None if is_dense else activity.activity_sparsity,
        backward_sparsity=training_average(metrics, "backward_sparsity"),
        parameters=activity.parameters,
        forward_macs=activity.forward_macs,
    )


def training_average(metrics: Sequence[EpochMetrics], name: str) -> float | None:
    """Return a sparsity in training mode, averaged over the epochs as in the paper. None if it was not measured.

    Args:
        metrics: The metrics of a run.
        name: A field of :class:`egru.training.records.Sparsity`.
    """
    measured = [line.training_activity for line in metrics if line.training_activity is not None]
    values = [value for value in (getattr(activity, name) for activity in measured) if value is not None]
    return statistics.mean(values) if values else None


def keep_run(folder: Path, runs: Path = RUNS, results: Path = RESULTS, note: str = "") -> list[Path]:
    """Copy the records of a finished run to ``runs`` and update the packaged results.

    Checkpoints and absolute paths are left out.

    Args:
        folder: The folder of the run.
        runs: The folder that keeps the records.
        results: The file with the packaged results.
        note: Remark for the tables, such as the precision of the weights that the run started from.

    Returns:
        The folder and the file that were written.

    Raises:
        RunError: If the run is not finished, or used less data than its recipe does.
        FileNotFoundError: If this is not a checkout of the repository.
    """
    run = Run.open(folder)
    result = run.result()
    if result is None:
        raise RunError(f"{folder} is not finished; only finished runs are kept")
    settings = run.config()
    recipe, config = read_run_config(run)
    if isinstance(config, Custom):
        raise RunError(f"{folder} was not trained with a recipe but with {config.label}; only runs of recipes are kept")
    if config.limit is not None and (recipe not in RECIPES or config.limit != RECIPES[recipe].make().limit):
        raise RunError(
            f"{folder} used only the first {config.limit} of each split; only runs on all data of their recipe are kept"
        )
    if not runs.is_dir():
        raise FileNotFoundError(f"{runs} does not exist: runs are kept in a checkout of the repository")
    settings["config"]["root"] = None
    if config.start_from is not None:
        config = dataclasses.replace(config, start_from=Path(config.start_from).name)
        settings["config"]["start_from"] = config.start_from
    finished = datetime.datetime.fromtimestamp((run.folder / RESULT).stat().st_mtime, datetime.UTC)
    target = unused_folder(runs / f"{recipe}-seed{config.seed}-{finished.strftime('%Y%m%d-%H%M%S')}")
    target.mkdir()
    run.copy_records(target)
    write_json(target / CONFIG, settings)
    if result.derivation is not None:
        derivation = dataclasses.replace(result.derivation, source=Path(result.derivation.source).name)
        dataclasses.replace(result, derivation=derivation).write(target / RESULT)
        if not (runs / derivation.source).is_dir():  # the source is not kept, so its metrics are copied
            Run(target).write_metrics(training_metrics(run))
    command = recorded_command(recipe, config, result)
    KeptRecord(command, finished.strftime("%Y-%m-%d"), note).write(target / RECORD)
    replace_file(results, format_results(collect_results(runs)).encode())
    return [target, results]


def unused_folder(folder: Path) -> Path:
    """Return ``folder``, or a path with a number appended if it exists, so that no record is replaced."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], numbered) if not path.exists())


def format_table(name: str, results: Sequence[KeptResult] | None = None) -> Iterator[str]:
    """Yield the lines of a table: for each recipe the paper's rows, if there are any, then ours.

    Runs that differ only in their seed share one row, with means and standard deviations.

    Args:
        name: The name of the table, see :data:`egru.experiments.tables.TABLES`.
        results: Our results. If None, those that ship with the package.

    Raises:
        ValueError: If there is no such table.
    """
    table, results = find_table(name), read_results() if results is None else results
    rows: list[tuple[str, ...]] = [COLUMNS]
    notes = [""]
    for model, paper in table.quoted.items():
        rows.append((model, paper.source, *_paper_cells(paper)))
        notes.append(paper.note)
    other_data: list[KeptResult] = []
    for recipe in table.recipes():
        results_of_recipe = [result for result in results if result.recipe == recipe]
        comparable = [result for result in results_of_recipe if result.data == table.data]
        other_data += [result for result in results_of_recipe if result.data != table.data]
        first = len(rows)
        for paper in RECIPES[recipe].papers:
            rows.append(("", paper.source, *_paper_cells(paper)))
            notes.append(paper.note)
        for group in group_seeds(comparable):
            rows.append(("", *_group_cells(group)))
            notes.append(_group_note(group))
        if not comparable:
            option = f" --data {table.data}" if table.data != RECIPES[recipe].make().data else ""
            rows.append(("", "ours", "not run", *[""] * (len(COLUMNS) - 3)))
            notes.append(f"egru train {recipe}{option}")
        rows[first] = (recipe, *rows[first][1:])
    yield table.title
    yield from _align(rows, notes)
    yield from LEGEND
    if other_data:
        yield ""
        yield f"On data other than {table.data}, not comparable with the rows above:"
        groups = group_seeds(other_data)
        rows = [COLUMNS, *((group[0].recipe, *_group_cells(group)) for group in groups)]
        yield from _align(rows, ["", *(f"{_group_note(group)} (data {group[0].data})" for group in groups)])


def list_tables(results: Sequence[KeptResult] | None = None) -> Iterator[str]:
    """Yield one line per table, with the number of its recipes that have been run."""
    results = read_results() if results is None else results
    width = max(map(len, TABLES))
    for name, table in TABLES.items():
        recipes = table.recipes()
        run = {result.recipe for result in results if result.data == table.data} & set(recipes)
        yield f"{name:{width}}  {table.title}: {len(run)} of {len(recipes)} recipes run"


def _paper_cells(paper: Paper) -> tuple[str, ...]:
    quality = f"ppl {paper.perplexity}" if paper.perplexity else f"{paper.accuracy} %"
    validation = f"ppl {paper.validation}" if paper.validation else "-"
    sparsity = (f"{value} %" if value else "-" for value in (paper.activity_sparsity, paper.backward_sparsity))
    return (quality, validation, *sparsity, paper.parameters or "-", paper.macs or "-", "-")


def _group_cells(group: Sequence[KeptResult]) -> tuple[str, ...]:
    """Return source, numbers and machine of one run, or of runs that differ only in their seed."""
    seeds = f"seed {group[0].seed}" if len(group) == 1 else f"{len(group)} seeds"
    if group[0].perplexity is None:
        scores = [spread((getattr(r, name) for r in group), _accuracy) for name in ("accuracy", "validation")]
    else:
        scores = [
            f"ppl {spread((getattr(r, name) for r in group), _perplexity)}" for name in ("perplexity", "validation")
        ]
        one_column = spread((result.validation_one_column for result in group), _perplexity)
        scores[1] += "" if one_column == "-" else f" (one column: {one_column})"
    return (
        f"ours, {seeds}",
        *scores,
        spread((result.activity_sparsity for result in group), format.percent),
        spread((result.backward_sparsity for result in group), format.percent),
        format.count(group[0].parameters),
        spread((result.forward_macs for result in group), format.count),
        ", ".join(dict.fromkeys(result.machine for result in group)),
    )


def _accuracy(value: float) -> str:
    return format.percent(value, 2)


def _perplexity(value: float) -> str:
    return f"{value:.1f}"


def _group_note(group: Sequence[KeptResult]) -> str:
    """Return date, command and remark of a group."""
    dates = " to ".join(dict.fromkeys((min(r.date for r in group), max(r.date for r in group))))
    seeds = f" --seed {' | '.join(str(result.seed) for result in group)}" if len(group) > 1 else ""
    command = group[0].command if len(group) == 1 else without_seed(group[0].command)
    return f"{dates}  {command}{seeds}" + (f" ({group[0].note})" if group[0].note else "")


def _align(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    justify: list[Callable[[str, int], str]] = [str.ljust, str.ljust, *[str.rjust] * (len(widths) - 3), str.ljust]
    for row, note in zip(rows, notes, strict=True):
        cells = (place(cell, width) for place, cell, width in zip(justify, row, widths, strict=True))
        yield f"{'  '.join(cells)}  {note}".rstrip()
