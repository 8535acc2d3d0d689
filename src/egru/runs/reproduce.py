"""The paper's tables, ours beside them: every number of ours with the command that made it and its date.

Ours are kept in the repository's ``benchmarks/results/runs/``, a folder a run: what `egru reproduce --keep RUN` copied,
without the checkpoints. Each is a run that `egru report` can read.
"""

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from egru.experiments.config import Config, read_config
from egru.experiments.registry import RECIPES, Paper
from egru.report import format
from egru.runs.command import recorded_command
from egru.training import Run, RunError
from egru.training.checkpoint import replace_file
from egru.training.run import CONFIG, RESULT

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "runs"
RECORD = "record.json"
ALIASES = {"smnist": "smnist-egru-590", "psmnist": "psmnist-egru-590", "ptb": "ptb-egru-1350"}
ALIASES |= {"wikitext2": "wikitext2-egru-1350"}
"""Recipes that are another row under a shorter name."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or study: the recipes whose names start or are like this. ``data`` is its task, where recipes can also
    run on another."""

    title: str
    prefixes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    data: str | None = None

    def rows(self) -> list[str]:
        mine = (name for name in RECIPES if name in self.names or name.startswith(self.prefixes))
        return [name for name in mine if name not in ALIASES]


_GESTURES = ("dvs-egru-", "dvs-gru-", "dvs-lstm-", "dvs-cnn-")
_LANGUAGE = ("ptb-egru-", "ptb-gru-", "ptb-awd-lstm", "ptb-indrnn", "ptb-evnn")
TABLES = {
    "gestures": Table("DVS128 Gesture (the paper's Table 1 and its supplement)", _GESTURES, data="dvs-raw"),
    "ablation": Table("DVS128 Gesture, ablation study", ("dvs-ablation-",), data="dvs-raw"),
    "smnist": Table("Sequential MNIST (the paper's Table 2 and its supplement)", ("smnist-",)),
    "psmnist": Table("Permuted sequential MNIST (the paper's supplement)", ("psmnist-",)),
    "ptb": Table("Penn Treebank (the paper's Table 3 and its supplement)", _LANGUAGE),
    "wikitext2": Table("WikiText-2 (the paper's Table 3)", ("wikitext2-",)),
    "thresholds": Table("Penn Treebank, start of the thresholds", ("ptb-threshold",)),
    "epsilon": Table("Penn Treebank, width of the surrogate", ("ptb-epsilon-",)),
    "scaling": Table("Sequential MNIST of 14 by 14 pixels, size of the layer", ("smnist14-",)),
    "frames": Table("Gestures on packed frames: our own task, not the paper's", names=("dvs", "dvs-gru"), data="dvs"),
    "digits": Table("Digits, one pixel at a time: our own task", names=("digits", "digits-gru")),
}


@dataclasses.dataclass(frozen=True)
class Kept:
    """A number of ours."""

    recipe: str
    config: Config
    command: str
    date: str
    scores: dict[str, Any]
    overall: dict[str, Any]


def kept(folder: Path = RESULTS) -> list[Kept]:
    """Every result that is kept, by date."""
    if not folder.is_dir():
        raise FileNotFoundError("egru reproduce needs the repository, which keeps our results: clone it")
    found: list[Kept] = []
    for path in sorted(folder.glob(f"*/{CONFIG}")):
        run = Run.open(path.parent)
        result, record = run.result(), path.with_name(RECORD)
        if result is None:  # the records of a run that was stopped
            continue
        recipe, config = read_config(run.config())
        made = {"command": recorded_command(recipe, config, result), "date": "undated"}
        if record.exists():
            made = json.loads(record.read_text(encoding="utf-8"))
        overall = result["activity"]["overall"]
        found.append(Kept(ALIASES.get(recipe, recipe), config, made["command"], made["date"], result["test"], overall))
    return sorted(found, key=lambda result: result.date)


def keep(run_folder: Path, folder: Path = RESULTS) -> Path:
    """Copy a finished run's small files among the results; paths of this machine stay behind."""
    run = Run.open(run_folder)
    if run.result() is None:
        raise RunError(f"{run_folder} is not finished; only whole runs are kept")
    plain = run.config()
    recipe, config = read_config(plain)
    if config.limit is not None:
        raise RunError(f"{run_folder} saw only the first {config.limit} of each split; only whole runs are kept")
    plain["config"]["root"] = None
    if config.start_from is not None:
        config = dataclasses.replace(config, start_from=Path(config.start_from).name)
        plain["config"]["start_from"] = config.start_from
    finished = datetime.datetime.fromtimestamp((run.folder / RESULT).stat().st_mtime, datetime.UTC)
    record = {"command": recorded_command(recipe, config, run.result()), "date": finished.strftime("%Y-%m-%d")}
    stamp = finished.strftime("%Y%m%d-%H%M")
    target = folder / f"{recipe}-seed{config.seed}-{stamp}"
    target.mkdir(parents=True, exist_ok=True)
    run.copy_records(target)
    replace_file(target / CONFIG, json.dumps(plain, indent=2).encode() + b"\n")
    replace_file(target / RECORD, json.dumps(record, indent=2).encode() + b"\n")  # last: now it counts
    return target


COLUMNS = ("", "", "quality", "silent", "backward", "parameters", "MACs a step")


def lines(name: str, results: Sequence[Kept] | None = None) -> Iterator[str]:
    """The table ``name`` as text: a row of the paper's, where it has one, then ours."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; there are {', '.join(TABLES)}")
    table, results = TABLES[name], kept() if results is None else results
    rows: list[tuple[str, ...]] = [COLUMNS]
    notes = [""]
    apart: list[Kept] = []
    for recipe in table.rows():
        paper = RECIPES[recipe].paper
        mine = [result for result in results if result.recipe == recipe]
        same = [result for result in mine if table.data in (None, result.config.data)]
        apart += [result for result in mine if result not in same]
        label = recipe
        if any(cell != "-" for cell in _of_paper(paper)):
            rows.append((recipe, "paper", *_of_paper(paper)))
            notes.append(paper.note)
            label = ""
        for result in same:
            rows.append((label, "ours", *_of_ours(result)))
            notes.append(f"{result.date}  {result.command}")
            label = ""
        if not same:
            option = f" --data {table.data}" if table.data not in (None, RECIPES[recipe].make().data) else ""
            rows.append((label, "ours", "not run", *[""] * 4))
            notes.append(f"egru train {recipe}{option}")
    yield table.title
    yield from _aligned(rows, notes)
    yield "Sparsity and MACs of ours: recurrent layers and readout on the test split; backward as the paper counts it."
    if apart:
        yield ""
        yield f"On other data than {table.data}: another task, not to be held against the rows above"
        rows = [COLUMNS, *((result.recipe, "ours", *_of_ours(result)) for result in apart)]
        yield from _aligned(rows, ["", *(f"{r.date}  {r.command} (data {r.config.data})" for r in apart)])


def listing(results: Sequence[Kept] | None = None) -> Iterator[str]:
    """Every table, and how much of it has been run."""
    results = kept() if results is None else results
    width = max(map(len, TABLES))
    for name, table in TABLES.items():
        rows = table.rows()
        done = {r.recipe for r in results if table.data in (None, r.config.data)} & set(rows)
        yield f"{name:{width}}  {table.title}: {len(done)} of {len(rows)} rows run"


def _of_paper(paper: Paper) -> tuple[str, ...]:
    quality = "-" if paper.accuracy is None else f"{paper.accuracy} %"
    if paper.perplexity is not None:
        quality = f"ppl {paper.perplexity}"
    sparsity = ("-" if value is None else f"{value} %" for value in (paper.activity_sparsity, paper.backward_sparsity))
    return (quality, *sparsity, paper.parameters or "-", paper.macs or "-")


def _of_ours(result: Kept) -> tuple[str, ...]:
    accuracy, perplexity = result.scores["accuracy"], result.scores["perplexity"]
    quality = format.percent(accuracy, 2) if perplexity is None else f"ppl {perplexity:.1f}"
    overall = result.overall
    sparsity = overall["activity_sparsity"] if overall["backward_sparsity"] is not None else None
    counts = (format.count(overall[name]) for name in ("parameters", "forward_macs"))
    return (quality, format.percent(sparsity), format.percent(overall["backward_sparsity"]), *counts)


def _aligned(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    place: list[Callable[[str, int], str]] = [str.ljust, str.ljust, *[str.rjust] * (len(widths) - 2)]
    for row, note in zip(rows, notes, strict=True):
        cells = (put(cell, width) for put, cell, width in zip(place, row, widths, strict=True))
        yield f"{'  '.join(cells)}  {note}".rstrip()
