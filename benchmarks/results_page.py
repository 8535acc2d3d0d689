"""Write docs/results.md and its figures from the records of runs, next to the numbers of the paper and of EvNN.

    egru reproduce --keep RUN                                   # store the records of a finished run
    python benchmarks/results_page.py                           # read benchmarks/results/runs/*, write docs/

Each run is a folder with config.json, environment.json, metrics.jsonl and result.json. A language model may also have
engine.json, a streaming benchmark:

    egru export RUN small --weights int8
    python benchmarks/language_engine.py small --out small/engine.json

Runs that differ only in their seed get one row each, followed by their mean. Recipes without a run are listed as
"not run".
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable, Iterable

from results_figures import format_reported, layers_figure, training_figure
from results_records import Record, read_record, training_sparsity, validation_score, wall_clock
from results_tasks import INTRODUCTION, TASKS, Row, Task

from egru.experiments import RECIPES, Paper
from egru.format import count, percent, seconds
from egru.runs.command import recorded_command, train_command

ROOT = pathlib.Path(__file__).parent.parent
RUNS = ROOT / "benchmarks" / "results" / "runs"
FORMATS: dict[str, Callable[[float], str]] = {
    "accuracy": functools.partial(percent, digits=2),
    "perplexity": "{:.2f}".format,
}


def spread(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    """Format one value as it is, and several as mean and standard deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return " ± ".join(map(show, [statistics.mean(known), *([statistics.stdev(known)] if len(known) > 1 else [])]))


def format_row(task: Task, model: str, source: str, runs: list[Record]) -> Row:
    """Return the row of one run, or of the mean of several finished runs."""
    show = FORMATS[task.score]
    results = [run.result for run in runs if run.result is not None]
    summaries = [result.activity for result in results]
    sparsities = [summary.activity_sparsity for run, summary in zip(runs, summaries, strict=False) if run.has_events]
    backward, skippable = (
        spread((training_sparsity(run, f"backward_{name}") for run in runs), percent)
        for name in ("sparsity", "skippable")
    )
    clocks = [wall_clock(run.metrics) for run in runs]
    epochs = len(runs[0].metrics)
    best = ", ".join(str(result.best_epoch) for result in results)
    return (
        model,
        source,
        count(summaries[0].parameters) if summaries else "-",
        f"**{spread((getattr(result.test, task.score) for result in results), show)}**" if results else "-",
        spread((validation_score(run, task.score) for run in runs), show),
        spread(sparsities, percent),
        backward if backward == "-" else f"{backward} (skippable {skippable})",
        spread((summary.forward_macs for summary in summaries), count),
        f"{epochs} (best {best})" if best else f"{epochs} of {runs[0].config.epochs}",
        spread((clock for clock, _ in clocks), seconds)
        + ("" if all(complete for _, complete in clocks) else ", without checkpoints"),
    )


def our_rows(task: Task, model: str, runs: list[Record]) -> list[Row]:
    """Return one row per run of a recipe, and the mean of runs that differ only in their seed."""
    if not runs:
        return [(model, "ours", *["not run"] * (len(task.head()) - 2))]
    groups: dict[str, list[Record]] = {}
    for run in runs:
        settings = train_command(run.recipe, dataclasses.replace(run.config, seed=0))
        groups.setdefault(f"{settings}{run.note}", []).append(run)
    rows = []
    for group in groups.values():
        for run in group:
            rows.append(format_row(task, model, f"ours, seed {run.config.seed}{run.note}", [run]))
        finished = [run for run in group if run.result is not None]
        if len(finished) > 1:
            rows.append(format_row(task, model, f"ours, mean of {len(finished)}{finished[0].note}", finished))
    return rows


def paper_row(task: Task, model: str, paper: Paper) -> Row:
    sparsity = (
        spread([value and value / 100], percent) for value in (paper.activity_sparsity, paper.backward_sparsity)
    )
    score = format_reported(task, paper)
    return (model.split(",")[0], "paper", paper.parameters, score, "-", *sparsity, paper.macs, "-", "-")


def format_table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe_run(run: Record, figure: str | None) -> str:
    """Return the section of a run: command, machine, layers and streaming benchmark."""
    versions = run.environment.versions
    machine = run.environment.cuda or run.environment.machine
    parts = [
        f"### {run.name}\n",
        f"    {recorded_command(run.recipe, run.config, run.result)}\n",
        f"Machine: {machine}, torch {versions['torch']}, Python {versions['python']}. "
        f"Records: `benchmarks/results/runs/{run.name}/`.",
    ]
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
    papers = [(model, RECIPES[recipe].paper) for recipe, model in names.items()]
    rows = [paper_row(task, model, paper) for model, paper in papers if format_reported(task, paper)]
    rows += task.others
    for recipe, model in names.items():
        rows += our_rows(task, model, [run for run in runs if run.recipe == recipe])
    parts = [f"## {task.title}\n", task.before, format_table(task.head(), rows) + "\n", *filter(None, [task.after])]
    first_seeds = {(run.recipe, run.note): run for run in sorted(runs, key=lambda run: -run.config.seed)}
    if trained := [run for run in runs if not run.is_derived and run is first_seeds[run.recipe, run.note]]:
        name = f"{task.name}-training.png"
        training_figure(task, trained).savefig(images / name, dpi=110)
        parts.append(f"![Validation {task.score} and sparsity by epoch](images/{name})\n")
    for run in runs:
        figure, name = None if run.is_derived else layers_figure(run), f"{run.name}-sparsity.png"
        if figure is not None:
            figure.savefig(images / name, dpi=110)
        parts.append(describe_run(run, f"images/{name}" if figure is not None else None))
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=pathlib.Path, default=RUNS, help="folder that contains the records of the runs")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "results.md", help="page to write")
    options = parser.parse_args(arguments)
    images = options.out.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    records = map(read_record, sorted(path.parent for path in options.runs.glob("*/config.json")))
    runs = [run for run in records if run.metrics]
    parts = [INTRODUCTION]
    for task in TASKS:
        task_runs = [run for run in runs if run.recipe.startswith(f"{task.name}-")]
        parts.append(describe_task(task, task_runs, images))
        print(f"{task.title}: {len(task_runs)} runs")
    options.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
