"""Write docs/results/experiments.md and its figures from records of runs, next to the numbers of the paper and EvNN.

    egru reproduce --keep RUN                                   # store the records of a finished run
    python benchmarks/results_page.py                           # read benchmarks/results/runs/*, write docs/

Each run is a folder with config.json, environment.json, metrics.jsonl and result.json. A language model may also have
engine.json, a streaming benchmark:

    egru export RUN small --weights int8
    python benchmarks/language_engine.py small --out small/engine.json

Runs that differ only in their seed get one row each, followed by their mean, and one section below the table. Recipes
without a run are listed as "not run".
"""

import argparse
import functools
import pathlib
import textwrap
from collections.abc import Callable, Iterable

from results_figures import layers_figure, training_figure
from results_records import (
    Record,
    group_seeds,
    one_column_perplexity,
    read_record,
    validation_score,
    wall_clock,
)
from results_tasks import INTRODUCTION, TASKS, Row, Task

from egru.experiments import RECIPES, Paper
from egru.experiments.results import spread
from egru.experiments.tables import TABLES
from egru.format import count, percent, seconds
from egru.runs.command import recorded_command
from egru.runs.reproduce import training_average

ROOT = pathlib.Path(__file__).parent.parent
RUNS = ROOT / "benchmarks" / "results" / "runs"
FORMATS: dict[str, Callable[[float], str]] = {
    "accuracy": functools.partial(percent, digits=2),
    "perplexity": "{:.2f}".format,
}


def format_row(task: Task, model: str, source: str, runs: list[Record], others: list[Record]) -> Row:
    """Return the row of one run, or of the mean of several finished runs. ``others`` are all runs of the task."""
    show = FORMATS[task.score]
    results = [run.result for run in runs if run.result is not None]
    summaries = [result.activity for result in results]
    sparsities = [summary.activity_sparsity for run, summary in zip(runs, summaries, strict=False) if run.has_events]
    backward, skippable = (
        spread((training_average(run.metrics, f"backward_{name}") for run in runs), percent)
        for name in ("sparsity", "skippable")
    )
    validation = spread((validation_score(run, task.score) for run in runs), show)
    if task.score == "perplexity" and (one := [one_column_perplexity(run, others) for run in runs]).count(None) == 0:
        validation += f" (one column: {spread(one, show)})"
    clocks = [wall_clock(run.metrics) for run in runs]
    return (
        model,
        source,
        count(summaries[0].parameters) if summaries else "-",
        f"**{spread((getattr(result.test, task.score) for result in results), show)}**" if results else "-",
        validation,
        spread(sparsities, percent),
        backward if backward == "-" else f"{backward} (skippable {skippable})",
        spread((summary.forward_macs for summary in summaries), count),
        format_epochs(runs),
        ", ".join(dict.fromkeys(run.machine for run in runs)),
        spread((clock for clock, _ in clocks), seconds)
        + ("" if all(complete for _, complete in clocks) else ", without checkpoints"),
    )


def format_epochs(runs: list[Record]) -> str:
    """Return the number of epochs, and which one was tested. Only saved epochs can be tested."""
    epochs, every = len(runs[0].metrics), runs[0].config.save_every
    best = ", ".join(str(run.result.best_epoch) for run in runs if run.result is not None)
    if not best:
        return f"{epochs} of {runs[0].config.epochs}"
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(every % 10 if every not in (11, 12, 13) else 0, "th")
    return f"{epochs} (best {best})" if every == 1 else f"{epochs} (best of every {every}{suffix}: {best})"


def our_rows(task: Task, model: str, runs: list[Record], others: list[Record]) -> list[Row]:
    """Return one row per run of a recipe, and the mean of runs that differ only in their seed."""
    if not runs:
        return [(model, "ours", *["not run"] * (len(task.head()) - 2))]
    rows = []
    for group in group_seeds(runs):
        for run in group:
            rows.append(format_row(task, model, f"ours, seed {run.config.seed}{run.note}", [run], others))
        finished = [run for run in group if run.result is not None]
        if len(finished) > 1:
            rows.append(format_row(task, model, f"ours, mean of {len(finished)}{finished[0].note}", finished, others))
    return rows


def paper_row(task: Task, model: str, paper: Paper) -> Row:
    """Return a row of the paper, with its numbers as printed."""
    unit = " %" if task.score == "accuracy" else ""
    sparsity = (f"{value} %" if value else "-" for value in (paper.activity_sparsity, paper.backward_sparsity))
    return (
        model,
        f"{paper.source}, {paper.note}" if paper.note else paper.source,
        paper.parameters or "-",
        f"{getattr(paper, task.score)}{unit}",
        paper.validation or "-",
        *sparsity,
        paper.macs or "-",
        *["-"] * 3,
    )


def format_table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe_runs(runs: list[Record], figure: str | None) -> str:
    """Return the section of runs that differ only in their seed: command, machine, layers and streaming benchmark."""
    run, *others = runs
    versions = run.environment.versions
    parts = [
        f"### {run.name}\n",
        f"    {recorded_command(run.recipe, run.config, run.result)}\n",
        f"Machine: {run.machine}, torch {versions['torch']}, Python {versions['python']}. "
        f"Records: `benchmarks/results/runs/{run.name}/`.",
    ]
    if others:
        parts[-1] += f" Other seeds: {', '.join(f'`{other.name}`' for other in others)}."
    if run.result is not None:
        parts += ["", layer_table(run)]
    if figure is not None:
        parts += ["", f"![Sparsity of each layer by epoch]({figure})"]
    if run.engine is not None:
        parts += [
            "",
            f"Streaming inference on the CPU, word by word ({run.engine['machine']}, one thread, "
            f"{run.engine['date']}, `benchmarks/language_engine.py`): {run.engine['timed']} words of the test split "
            f"are timed, and perplexities are over {run.engine['words']} words. The engine caches the first layer's "
            "products with the embedding of each word.",
            "",
            engine_table(run.engine["contestants"]),
        ]
    return "\n".join(parts) + "\n"


def layer_table(run: Record) -> str:
    """Return units, sparsity and MACs of each layer on the test split."""
    assert run.result is not None
    activity = run.result.activity
    rows = [
        (
            layer.name,
            str(layer.hidden_size),
            str(layer.active.count(0)),
            percent(layer.activity_sparsity),
            count(layer.cost.forward),
        )
        for layer in activity.layers
    ]
    rows += [
        (
            linear.name,
            str(linear.out_features),
            "-",
            percent(1 - linear.input_density),
            count(linear.macs / activity.steps),
        )
        for linear in activity.linears
    ]
    head = ("layer (test)", "units", "never active", "activity sparsity (readout: of its input)", "MACs per step")
    return format_table(head, rows)


def engine_table(contestants: dict[str, dict[str, float]]) -> str:
    """Return speed and perplexity of each way to run a language model word by word."""
    rows = [
        (
            name,
            f"{row['words_per_second']:.0f}",
            f"{row['times_torch']:.1f}" if "times_torch" in row else "1",
            f"{row['perplexity']:.3f}",
            count(row["macs_per_word"]) if "macs_per_word" in row else "-",
        )
        for name, row in contestants.items()
    ]
    return format_table(("", "words per second", "speed-up", "perplexity", "MACs per word"), rows)


def describe_task(task: Task, runs: list[Record], images: pathlib.Path) -> str:
    """Return the section of a task, and write its figures to ``images``."""
    names = task.models | {run.recipe: run.recipe for run in runs if run.recipe not in task.models}
    published = [
        (model.removesuffix(", the paper's settings"), paper)
        for recipe, model in names.items()
        for paper in RECIPES[recipe].papers
    ]
    published += [(model, paper) for table in task.tables for model, paper in TABLES[table].quoted.items()]
    rows = [paper_row(task, model, paper) for model, paper in published if task.is_comparable(paper)]
    rows += task.others
    for recipe, model in names.items():
        rows += our_rows(task, model, [run for run in runs if run.recipe == recipe], runs)
    parts = [f"## {task.title}\n", task.before, format_table(task.head(), rows) + "\n", *filter(None, [task.after])]
    if other_data := [paper_row(task, model, paper) for model, paper in published if not task.is_comparable(paper)]:
        parts += ["The paper's rows, for its own data and not comparable with the rows above:\n"]
        parts += [format_table(task.head(), other_data) + "\n"]
    groups = [group for recipe in names for group in group_seeds(run for run in runs if run.recipe == recipe)]
    if trained := [group[0] for group in groups if not group[0].is_derived]:
        name = f"{task.name}-training.png"
        training_figure(task, trained).savefig(images / name, dpi=110)
        parts.append(f"![Validation {task.score} and sparsity by epoch](images/{name})\n")
    for group in groups:
        figure, name = None if group[0].is_derived else layers_figure(group[0]), f"{group[0].name}-sparsity.png"
        if figure is not None:
            figure.savefig(images / name, dpi=110)
        parts.append(describe_runs(group, f"images/{name}" if figure is not None else None))
    return "\n".join(parts)


def wrap(page: str) -> str:
    """Break lines of prose after at most 120 characters. Tables and indented code keep their lines."""
    return "\n".join(
        line
        if len(line) <= 120 or line.startswith(("|", "    "))
        else textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False)
        for line in page.split("\n")
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=pathlib.Path, default=RUNS, help="folder that contains the records of the runs")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "docs" / "results" / "experiments.md", help="page to write"
    )
    options = parser.parse_args(arguments)
    images = options.out.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    records = map(read_record, sorted(path.parent for path in options.runs.glob("*/config.json")))
    runs = [run for run in records if run.metrics]
    parts = [INTRODUCTION]
    for task in TASKS:
        recipes = [recipe for table in task.tables for recipe in TABLES[table].recipes()]
        task_runs = [run for run in runs if run.recipe in recipes and run.config.data == task.data]
        parts.append(describe_task(task, task_runs, images))
        print(f"{task.title}: {len(task_runs)} runs")
    options.out.write_text(wrap("\n".join(parts)))


if __name__ == "__main__":
    main()
