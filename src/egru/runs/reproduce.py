"""Print the paper's tables with our results, and add runs to our results.

The records of our runs are in the repository, in ``benchmarks/results/runs``, one folder per run: what
`egru reproduce --keep RUN` copied, without the checkpoints. `egru report` can read each of them. The numbers that the
tables show ship with the package (:mod:`egru.experiments.results`).
"""

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from egru import format
from egru.experiments.custom import Custom
from egru.experiments.registry import RECIPES, Paper
from egru.experiments.results import RESULTS, KeptResult, format_results, read_results
from egru.experiments.tables import ALIASES, TABLES, find_table
from egru.files import replace_file
from egru.records import write_json
from egru.runs.command import recorded_command
from egru.runs.load import read_run_config, training_metrics
from egru.training import Run, RunError
from egru.training.records import KeptRecord
from egru.training.run import CONFIG, RESULT

RUNS = Path(__file__).parents[3] / "benchmarks" / "results" / "runs"
"""Records of our runs, in a checkout of the repository."""
RECORD = "record.json"
COLUMNS = ("", "", "quality", "sparsity", "backward", "parameters", "MACs/step")


def collect_results(runs: Path = RUNS) -> list[KeptResult]:
    """Read the results of all finished runs under ``runs``, in order of their dates.

    Raises:
        FileNotFoundError: If there is no such folder, as in an installed package.
    """
    if not runs.is_dir():
        raise FileNotFoundError(f"{runs} does not exist: the records of our runs are available only in a checkout")
    results = [_read_result(path.parent) for path in runs.glob(f"*/{RECORD}")]
    return sorted(results, key=lambda result: (result.date, result.run))


def _read_result(folder: Path) -> KeptResult:
    """Read the result of a kept run."""
    run, record = Run.open(folder), KeptRecord.read(folder / RECORD)
    result = run.result()
    if result is None:
        raise RunError(f"{folder} has a {RECORD} but no {RESULT}")
    recipe, config = read_run_config(run)
    assert not isinstance(config, Custom)  # refused by keep_run
    activity = result.activity
    is_dense = activity.backward_sparsity is None
    return KeptResult(
        run=folder.name,
        recipe=ALIASES.get(recipe, recipe),
        data=config.data,
        seed=config.seed,
        command=record.command,
        date=record.date,
        accuracy=result.test.accuracy,
        perplexity=result.test.perplexity,
        activity_sparsity=None if is_dense else activity.activity_sparsity,
        backward_sparsity=activity.backward_sparsity,
        parameters=activity.parameters,
        forward_macs=activity.forward_macs,
    )


def keep_run(folder: Path, runs: Path = RUNS, results: Path = RESULTS) -> list[Path]:
    """Copy the records of a finished run to ``runs`` and update the packaged results.

    Checkpoints and absolute paths are left out.

    Args:
        folder: The folder of the run.
        runs: The folder that keeps the records.
        results: The file with the packaged results.

    Returns:
        The folder and the file that were written.

    Raises:
        RunError: If the run is not finished or used only a part of its data.
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
    if config.limit is not None:
        raise RunError(f"{folder} used only the first {config.limit} of each split; only runs on all data are kept")
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
    KeptRecord(command, finished.strftime("%Y-%m-%d")).write(target / RECORD)
    replace_file(results, format_results(collect_results(runs)).encode())
    return [target, results]


def unused_folder(folder: Path) -> Path:
    """Return ``folder``, or a path with a number appended if it exists, so that no record is replaced."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], numbered) if not path.exists())


def format_table(name: str, results: Sequence[KeptResult] | None = None) -> Iterator[str]:
    """Yield the lines of a table: for each recipe the paper's row, if there is one, then ours.

    Args:
        name: The name of the table, see :data:`egru.experiments.tables.TABLES`.
        results: Our results. If None, those that ship with the package.

    Raises:
        ValueError: If there is no such table.
    """
    table, results = find_table(name), read_results() if results is None else results
    rows: list[tuple[str, ...]] = [COLUMNS]
    notes = [""]
    other_data: list[KeptResult] = []
    for recipe in table.recipes():
        paper = RECIPES[recipe].paper
        results_of_recipe = [result for result in results if result.recipe == recipe]
        comparable = [result for result in results_of_recipe if table.data in (None, result.data)]
        other_data += [result for result in results_of_recipe if result not in comparable]
        label = recipe
        if any(cell != "-" for cell in _paper_cells(paper)):
            rows.append((recipe, "paper", *_paper_cells(paper)))
            notes.append(paper.note)
            label = ""
        for result in comparable:
            rows.append((label, "ours", *_result_cells(result)))
            notes.append(f"{result.date}  {result.command}")
            label = ""
        if not comparable:
            option = f" --data {table.data}" if table.data not in (None, RECIPES[recipe].make().data) else ""
            rows.append((label, "ours", "not run", *[""] * 4))
            notes.append(f"egru train {recipe}{option}")
    yield table.title
    yield from _align(rows, notes)
    yield "Ours: sparsity and MACs of the recurrent layers and the readout on the test split."
    if other_data:
        yield ""
        yield f"On data other than {table.data}, not comparable with the rows above:"
        rows = [COLUMNS, *((result.recipe, "ours", *_result_cells(result)) for result in other_data)]
        yield from _align(rows, ["", *(f"{r.date}  {r.command} (data {r.data})" for r in other_data)])


def list_tables(results: Sequence[KeptResult] | None = None) -> Iterator[str]:
    """Yield one line per table, with the number of its recipes that have been run."""
    results = read_results() if results is None else results
    width = max(map(len, TABLES))
    for name, table in TABLES.items():
        recipes = table.recipes()
        run = {r.recipe for r in results if table.data in (None, r.data)} & set(recipes)
        yield f"{name:{width}}  {table.title}: {len(run)} of {len(recipes)} recipes run"


def _paper_cells(paper: Paper) -> tuple[str, ...]:
    quality = "-" if paper.accuracy is None else f"{paper.accuracy} %"
    if paper.perplexity is not None:
        quality = f"ppl {paper.perplexity}"
    sparsity = ("-" if value is None else f"{value} %" for value in (paper.activity_sparsity, paper.backward_sparsity))
    return (quality, *sparsity, paper.parameters or "-", paper.macs or "-")


def _result_cells(result: KeptResult) -> tuple[str, ...]:
    quality = format.percent(result.accuracy, 2) if result.perplexity is None else f"ppl {result.perplexity:.1f}"
    sparsity = (format.percent(value) for value in (result.activity_sparsity, result.backward_sparsity))
    return (quality, *sparsity, format.count(result.parameters), format.count(result.forward_macs))


def _align(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    justify: list[Callable[[str, int], str]] = [str.ljust, str.ljust, *[str.rjust] * (len(widths) - 2)]
    for row, note in zip(rows, notes, strict=True):
        cells = (place(cell, width) for place, cell, width in zip(justify, row, widths, strict=True))
        yield f"{'  '.join(cells)}  {note}".rstrip()
