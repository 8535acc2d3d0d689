"""docs/results.md and its figures, from the records of runs: ours beside the paper's numbers and EvNN's.

    egru reproduce --keep RUN                                   # the records of a finished run
    python benchmarks/results_page.py                           # reads benchmarks/results/runs/*, writes docs/

A run there is a folder with config.json, environment.json, metrics.jsonl and result.json. Of a language model
engine.json beside them is optional:

    egru export RUN small --weights int8
    python benchmarks/language_engine.py small --out small/engine.json

Runs of one recipe that differ in nothing but their seed are one row each and a mean. What was not run is said to be.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from egru.environment import Environment
from egru.experiments import RECIPES, Config, Paper
from egru.experiments.config import read_config
from egru.experiments.tables import ALIASES
from egru.report import LIGHT
from egru.report.format import count, percent, seconds
from egru.runs.command import recorded_command, train_command
from egru.runs.load import training_metrics
from egru.training import EpochMetrics, Result, Run

ROOT = pathlib.Path(__file__).parent.parent
RUNS = ROOT / "benchmarks" / "results" / "runs"
Row = tuple[str, ...]
SHOW: dict[str, Callable[[float], str]] = {
    "accuracy": functools.partial(percent, digits=2),
    "perplexity": "{:.2f}".format,
}
BEST = {"accuracy": max, "perplexity": min}


@dataclasses.dataclass(frozen=True)
class Task:
    """A section: recipes and their models, what others report that no recipe holds, a text before and after the table.

    Figures show the paper's number of the first recipe that has one.
    """

    name: str
    title: str
    score: str
    models: dict[str, str]
    before: str
    others: tuple[Row, ...] = ()
    after: str = ""

    def head(self) -> Row:
        score = (f"test {self.score}", f"validation {self.score}, chosen epoch")
        sparsity = ("activity sparsity, test", "backward sparsity, training")
        return ("model", "source", "parameters", *score, *sparsity, "MACs a step", "epochs", "wall-clock")


TASKS = (
    Task(
        "smnist",
        "Sequential MNIST",
        "accuracy",
        {
            "smnist-stable": "EGRU 590, settings that train",
            "smnist-egru-590": "EGRU 590, the paper's settings",
            "smnist-stable-gru": "GRU 590, trained and started alike",
            "smnist-gru-590": "GRU 590, the paper's settings",
            "smnist-cornn-256": "coRNN 256",
        },
        others=(
            (
                "EGRU 590",
                "paper, supplement, 4 runs",
                "1.048M",
                "95.5 ± 1.6 %",
                "-",
                "80.5 ± 4.9 %",
                "25.6 ± 1.7 %, epoch 100",
                "(210 ± 51)K",
                "200",
                "-",
            ),
            ("EGRU 590", "EvNN", "-", "not published", "-", "-", "-", "-", "200", "-"),
        ),
        before="""\
784 pixels one at a time; 55,000 images to learn from, 5,000 to choose the epoch by, the 10,000 of the test file scored
once a run. The recipe's settings were chosen on images of the training file: [the study](smnist-study.md). It does not
clear states at events, the paper's EGRU does. The paper quotes coRNN's number.
""",
        after="""\
EvNN has a command for this task and names no accuracy (`benchmarks/README.md`). Its trace sends gradients
back from the last step only: the recursion is commented out in `frameworks/pytorch/egru.py`. When it was tried at the
start of this project it did not learn; with the trace repaired its gradients exploded.
""",
    ),
    Task(
        "psmnist",
        "Permuted sequential MNIST",
        "accuracy",
        {
            "psmnist-stable": "EGRU 590, settings that train",
            "psmnist-egru-590": "EGRU 590, the paper's settings",
            "psmnist-gru-590": "GRU 590, the paper's settings",
            "psmnist-cornn-256": "coRNN 256",
        },
        before="The same with the pixels in one fixed random order.\n",
    ),
    Task(
        "ptb",
        "Penn Treebank",
        "perplexity",
        {
            "ptb-evnn": "EGRU 1350, EvNN's settings",
            "ptb-egru-1350": "EGRU 1350, the paper's settings",
            "ptb-evnn-gru": "GRU 1350, trained alike",
            "ptb-gru-1350": "GRU 1350, the paper's settings",
            "ptb-awd-lstm": "AWD-LSTM 1150",
        },
        others=(
            ("EGRU 1350", "paper, supplement", "33M", "58.7", "-", "79.9 %", "46.0 %", "6.8M + 3.1M", "2500", "-"),
            ("EGRU 1350", "EvNN", "32M", "not published", "-", "-", "-", "-", "1000", "-"),
        ),
        before="""\
Test split read once, in one column, state (`c` and `y`) carried from its first word to its last; validation after
every epoch in 64 columns (AWD-LSTM: 10), each of which starts without a state. With embedding 750 (31.7M parameters) a
step takes 3.05M + 10.9M a + 8.5M b + 9.2M c MACs, where a, b and c are the layers' activities: here the busy last layer
costs more than the other two. The paper quotes the AWD-LSTM's number.

Weights are not kept here: 60.5 MiB in bfloat16, 30.5 in int8. The command under a run makes them again, and `egru
export RUN small --weights int8` packs them.
""",
        after="""\
EvNN's README offers weights and names no perplexity. Its code and settings on an H200, measured at the
start of this project: validation perplexity 392, 150, 122, 109, 102, 98, 94 after epochs 1, 6, 11, 16, 21, 26, 31,
activity 15 %, backward sparsity 68 %; it was not run further. [Training](training.md) lists where our code differs.

"Thresholds raised" is the run of 1000 epochs after `egru quieten`: its weights, nothing trained again, floors under the
thresholds that were chosen on validation in one column, as the test split is read
([how](pruning.md#raising-thresholds)). "Trained on" went on from the same run, by 120 epochs with floors of 0.1,
0.2 and 0.4 and without clearing at events: training did not win back what that cost.

GRU and AWD-LSTM have fewer epochs than their recipes (1000 and 500): as many as the time on the GPU allowed. An epoch
of the GRU takes 3.1 s in cuDNN, one of the EGRU 1.14. GRU and EGRU learn at a constant rate for 70 % of their epochs.
Still at that rate, the EGRU's validation perplexity was 69.5 after as many epochs as the GRU has in all (241), and 65.7
after as many minutes. The GRU has the EGRU's settings, not its own.
""",
    ),
)


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run left, apart from its weights."""

    name: str
    recipe: str
    config: Config
    environment: Environment
    metrics: list[EpochMetrics]
    result: Result | None
    engine: dict[str, Any] | None

    @property
    def quietened(self) -> bool:
        """Made of another run, whose metrics it has."""
        return self.result is not None and self.result.derivation is not None

    @property
    def note(self) -> str:
        """What a row says of it beside its seed."""
        if self.quietened:
            return ", thresholds raised"
        return ", unfinished" if self.result is None else ", trained on" if self.config.start_from else ""

    @property
    def events(self) -> bool:
        return self.metrics[-1].activity.backward_sparsity is not None


def record(folder: pathlib.Path) -> Record:
    run, engine = Run.open(folder), folder / "engine.json"
    recipe, config = read_config(run.config())
    measured = json.loads(engine.read_text()) if engine.exists() else None
    recipe = ALIASES.get(recipe, recipe)
    return Record(folder.name, recipe, config, run.environment(), training_metrics(run), run.result(), measured)


def wall_clock(metrics: list[EpochMetrics]) -> tuple[float, bool]:
    """Seconds of all sittings, and whether checkpoints are in it; the clock starts anew when a run is resumed."""
    elapsed = [line.elapsed for line in metrics if line.elapsed is not None]
    if not metrics or len(elapsed) < len(metrics):
        return sum(line.seconds for line in metrics), False
    return sum(now for now, after in zip(elapsed, [*elapsed[1:], 0.0], strict=True) if after < now), True


def points(run: Record, *keys: str) -> list[tuple[int, float]]:
    """Epochs and what their lines hold under ``keys``, where they do."""
    found = []
    for line in run.metrics:
        value: Any = line
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        if value is not None:
            found.append((line.epoch, value))
    return found


def training_sparsity(run: Record, name: str) -> float | None:
    """Mean over the epochs, as the paper has it."""
    known = [value for _, value in points(run, "training_activity", name)]
    return statistics.mean(known) if known else None


def spread(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    """One value as it is, several as mean and standard deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return " ± ".join(map(show, [statistics.mean(known), *([statistics.stdev(known)] if len(known) > 1 else [])]))


def chosen(run: Record, score: str) -> float:
    """The validation score of the epoch that was chosen, or the best so far."""
    if run.result is not None and run.result.derivation is not None:
        return getattr(run.result.derivation.validation, score)
    scores = dict(points(run, "validation", score))
    return BEST[score](scores.values()) if run.result is None else scores[run.result.best_epoch]


def our_row(task: Task, model: str, source: str, runs: list[Record]) -> Row:
    """One run, or several as means; all of them finished, or none."""
    show = SHOW[task.score]
    results = [run.result for run in runs if run.result is not None]
    overall = [result.activity for result in results]
    silent = [each.activity_sparsity for run, each in zip(runs, overall, strict=False) if run.events]
    backward, skippable = (
        spread((training_sparsity(run, f"backward_{name}") for run in runs), percent)
        for name in ("sparsity", "skippable")
    )
    clocks = [wall_clock(run.metrics) for run in runs]
    best = ", ".join(str(result.best_epoch) for result in results)
    done = f"{best} best of {len(runs[0].metrics)}" if best else f"{len(runs[0].metrics)} of {runs[0].config.epochs}"
    return (
        model,
        source,
        count(overall[0].parameters) if overall else "-",
        f"**{spread((getattr(result.test, task.score) for result in results), show)}**" if results else "-",
        spread((chosen(run, task.score) for run in runs), show),
        spread(silent, percent),
        backward if backward == "-" else f"{backward} (skippable {skippable})",
        spread((each.forward_macs for each in overall), count),
        done,
        spread((clock for clock, _ in clocks), seconds)
        + ("" if all(whole for _, whole in clocks) else ", checkpoints not counted"),
    )


def our_rows(task: Task, model: str, runs: list[Record]) -> list[Row]:
    """Every run of a recipe, and the mean where they differ in nothing but their seed."""
    if not runs:
        return [(model, "ours", *["not run"] * (len(task.head()) - 2))]
    alike: dict[str, list[Record]] = {}
    for run in runs:
        settings = train_command(run.recipe, dataclasses.replace(run.config, seed=0))
        alike.setdefault(f"{settings}{run.note}", []).append(run)
    rows = []
    for group in alike.values():
        for run in group:
            rows.append(our_row(task, model, f"ours, seed {run.config.seed}{run.note}", [run]))
        finished = [run for run in group if run.result is not None]
        if len(finished) > 1:
            rows.append(our_row(task, model, f"ours, mean of {len(finished)}", finished))
    return rows


def paper_row(task: Task, model: str, paper: Paper) -> Row:
    sparsity = (
        spread([value and value / 100], percent) for value in (paper.activity_sparsity, paper.backward_sparsity)
    )
    return (model.split(",")[0], "paper", paper.parameters, reported(task, paper), "-", *sparsity, paper.macs, "-", "-")


def reported(task: Task, paper: Paper) -> str:
    """The paper's score, to the digits it has; empty where it has none."""
    value = getattr(paper, task.score)
    return "" if value is None else f"{value} %" if task.score == "accuracy" else str(value)


def table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def training_figure(task: Task, runs: list[Record]) -> Any:
    """Score and silence in validation, backward sparsity in training, of every run against the epoch."""
    hues = itertools.cycle(LIGHT.event)
    colours = [next(hues) if run.events else LIGHT.dense for run in runs]
    panels = (
        (f"Validation {task.score}", "validation", task.score),
        ("Silent in validation (activity sparsity)", "activity", "activity_sparsity"),
        ("Backward sparsity in training (the paper's count)", "training_activity", "backward_sparsity"),
    )
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 7.8), layout="constrained")
        rows: Any = figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 1, 1))
        for axes, (title, *keys) in zip(rows, panels, strict=True):
            shown = [(run, colour) for run, colour in zip(runs, colours, strict=True) if run.events or axes is rows[0]]
            panel(axes, title, [(run.name, colour, points(run, *keys)) for run, colour in shown])
        paper = next(paper for paper in (RECIPES[name].paper for name in task.models) if reported(task, paper))
        value = getattr(paper, task.score) / (100 if task.score == "accuracy" else 1)
        label = f"paper, test ({reported(task, paper)})"
        rows[0].axhline(value, color=LIGHT.muted, linewidth=1, linestyle=(0, (4, 2)), label=label)
        if task.score == "accuracy" and max(chosen(run, "accuracy") for run in runs) > 0.95:
            rows[0].set_ylim(0.9, 1)  # what the first epochs do is of no interest
        if task.score == "perplexity":
            for run, colour in zip(runs, colours, strict=True):
                epochs, losses = zip(*points(run, "train", "loss"), strict=True)
                trained = [math.exp(min(loss, 20)) for loss in losses]
                rows[0].plot(epochs, trained, color=colour, alpha=0.4, linewidth=1)
            rows[0].plot([], [], color=LIGHT.muted, alpha=0.4, linewidth=1, label="in training, with dropout")
            logarithmic(rows[0])
        rows[0].legend(fontsize=8.5)
        rows[-1].set_xlabel("epoch")
    return figure


def layers_figure(run: Record) -> Any | None:
    """Layer by layer: silence in validation, the backward pass in training. None for one layer, or none recorded."""
    layers = run.metrics[-1].layers
    if len(layers) < 2 or not run.events:
        return None
    panels = (
        ("Silent in validation (activity sparsity)", "layers", "activity_sparsity"),
        ("Backward sparsity in training (the paper's count)", "training_layers", "backward_sparsity"),
    )
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 5.2), layout="constrained")
        rows: Any = figure.subplots(2, 1, sharex=True)
        for axes, (title, group, name) in zip(rows, panels, strict=True):
            colours = zip(layers, itertools.cycle(LIGHT.event), strict=False)
            panel(axes, title, [(layer, colour, points(run, group, layer, name)) for layer, colour in colours])
        rows[0].legend(ncols=3)
        rows[-1].set_xlabel("epoch")
    return figure


def panel(axes: Any, title: str, curves: Iterable[tuple[str, str, list[tuple[int, float]]]]) -> None:
    """Shares against the epoch: label, colour and points of every curve; dense models, in grey, differ in dashes."""
    from matplotlib.ticker import PercentFormatter

    dashes = itertools.cycle(("-", ":", "-."))
    for label, colour, known in curves:
        if known:
            style = next(dashes) if colour == LIGHT.dense else "-"
            axes.plot(*zip(*known, strict=True), color=colour, linestyle=style, label=label)
    axes.set_title(title)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    LIGHT.grid(axes)


def logarithmic(axes: Any) -> None:
    """Perplexities at round ticks; where they come below 100, those above 200 are left out."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if low < 100:
        high = min(high, 200)
        axes.set_ylim(top=high)
    axes.set_yticks([tick for tick in (20, 30, 40, 50, 60, 80, 100, 150, 200, 400, 800) if low <= tick <= high])


def about(run: Record, figure: str | None) -> str:
    """A run's own section."""
    versions = run.environment.versions
    machine = run.environment.cuda or run.environment.machine
    lines = [
        f"### {run.name}\n",
        f"    {recorded_command(run.recipe, run.config, run.result)}\n",
        f"On {machine}, torch {versions['torch']}, Python {versions['python']}; "
        f"its records: `benchmarks/results/runs/{run.name}/`.",
    ]
    if run.result is not None:
        activity = run.result.activity
        layers = [
            (x.name, str(x.hidden_size), str(x.active.count(0)), percent(x.activity_sparsity), count(x.cost.forward))
            for x in activity.layers
        ]
        readout = [
            (x.name, str(x.out_features), "-", percent(1 - x.input_density), count(x.macs / activity.steps))
            for x in activity.linears
        ]
        head = ("layer, test", "units", "never active", "silent (its input, of the readout)", "MACs a step")
        lines += ["", table(head, layers + readout)]
    if figure is not None:
        lines += ["", f"![Layer-wise sparsity against the epoch]({figure})"]
    if run.engine is not None:
        rows = [
            (
                name,
                f"{row['words_per_second']:.0f}",
                f"{row['times_torch']:.1f}" if "times_torch" in row else "1",
                f"{row['perplexity']:.3f}",
                count(row["macs_per_word"]) if "macs_per_word" in row else "-",
            )
            for name, row in run.engine["contestants"].items()
        ]
        lines += [
            "",
            f"Word by word on the CPU ({run.engine['machine']}, one thread, {run.engine['date']}, "
            f"`benchmarks/language_engine.py`): {run.engine['timed']} words of the test split on the clock, "
            f"perplexities over {run.engine['words']}. The engine keeps the first layer's products with a word's "
            "embedding for when it comes again.",
            "",
            table(("", "words a second", "times torch", "perplexity", "MACs a word"), rows),
        ]
    return "\n".join(lines) + "\n"


INTRODUCTION = """# Results

Written by `benchmarks/results_page.py` from the records in `benchmarks/results/runs/`; not by hand.

The test split is read once, by the epoch that validation chose. MACs as the paper counts them: layer-wise activity, and
the readout. Backward sparsity as the paper counts it, states with `|c - threshold|` at or above the surrogate's width,
and what a kernel can skip, `dy/dc = 0`; in training mode, one batch an epoch, mean over all epochs. Wall-clock:
training, validation and checkpoints, until the last epoch's end. Of several seeds: mean and standard deviation (n - 1).
"""


def section(task: Task, runs: list[Record], images: pathlib.Path) -> str:
    """A task's table, figure and runs."""
    names = task.models | {run.recipe: run.recipe for run in runs if run.recipe not in task.models}
    papers = [(model, RECIPES[recipe].paper) for recipe, model in names.items()]
    rows = [paper_row(task, model, paper) for model, paper in papers if reported(task, paper)]
    rows += task.others
    for recipe, model in names.items():
        rows += our_rows(task, model, [run for run in runs if run.recipe == recipe])
    parts = [f"## {task.title}\n", task.before, table(task.head(), rows) + "\n", *filter(None, [task.after])]
    if trained := [run for run in runs if not run.quietened]:
        name = f"{task.name}-training.png"
        training_figure(task, trained).savefig(images / name, dpi=110)
        parts.append(f"![Validation {task.score} and sparsity against the epoch](images/{name})\n")
    for run in runs:
        figure, name = None if run.quietened else layers_figure(run), f"{run.name}-sparsity.png"
        if figure is not None:
            figure.savefig(images / name, dpi=110)
        parts.append(about(run, f"images/{name}" if figure is not None else None))
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=pathlib.Path, default=RUNS, help="a folder of runs' records")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "results.md")
    options = parser.parse_args(arguments)
    images = options.out.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    runs = [
        run for run in map(record, sorted(path.parent for path in options.runs.glob("*/config.json"))) if run.metrics
    ]
    parts = [INTRODUCTION]
    for task in TASKS:
        mine = [run for run in runs if run.recipe.startswith(f"{task.name}-")]
        parts.append(section(task, mine, images))
        print(f"{task.title}: {len(mine)} runs")
    options.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
