"""docs/results.md and its figures, from the records of runs: ours beside the paper's numbers and EvNN's.

    egru export RUN small --weights int8                        # records and weights of a run
    python benchmarks/language_engine.py small --out small/engine.json
    egru reproduce --keep RUN                                   # its records; copy small/engine.json beside them
    python benchmarks/language_results.py                       # reads benchmarks/results/runs/*, writes docs/

A run there is a folder with config.json, environment.json, metrics.jsonl and result.json, as `egru export` leaves them;
engine.json beside them is optional. The first run of a recipe, by name, stands for it. What was not run is said to be.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
from typing import Any

from egru.recipes import RECIPES
from egru.report import LIGHT

ROOT = pathlib.Path(__file__).parent.parent
RUNS = ROOT / "benchmarks" / "results" / "runs"
MODELS = {
    "ptb-evnn": "EGRU 1350, EvNN's settings",
    "ptb-egru-1350": "EGRU 1350, the paper's settings",
    "ptb-gru-1350": "GRU 1350",
    "ptb-awd-lstm": "AWD-LSTM 1150",
}
PAPER = [
    ("EGRU 1350", "paper, main table", "33M", "57.2", "79.7 %", "46.3 %", "9.9M", "-", "-"),
    ("EGRU 1350", "paper, supplement", "33M", "58.7", "79.9 %", "46.0 %", "6.8M + 3.1M", "2500", "-"),
    ("EGRU 1350", "EvNN", "32M", "not published", "-", "-", "-", "1000", "-"),
    ("GRU 1350", "paper", "28M", "66.3", "-", "-", "27.6M", "-", "-"),
    ("AWD-LSTM 1150", "paper, quoted", "24M", "57.3", "-", "-", "24.0M", "-", "-"),
]
"""What others report: model, source, parameters, perplexity, both sparsities, MACs, epochs, time."""
HEAD = (
    "model",
    "source",
    "parameters",
    "test perplexity",
    "activity sparsity, test",
    "backward sparsity, training",
    "MACs a step",
    "epochs",
    "wall-clock",
)


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run left, apart from its weights."""

    name: str
    recipe: str
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None
    engine: dict[str, Any] | None


def read(folder: pathlib.Path) -> Record:
    def optional(name: str) -> Any:
        path = folder / name
        return json.loads(path.read_text()) if path.exists() else None

    stored = json.loads((folder / "config.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    environment = optional("environment.json") or {}
    return Record(
        folder.name,
        stored["recipe"],
        stored["config"],
        environment,
        lines,
        optional("result.json"),
        optional("engine.json"),
    )


def wall_clock(metrics: list[dict[str, Any]]) -> tuple[float, bool]:
    """Seconds of all sittings, and whether checkpoints are in it; the clock starts anew when a run is resumed."""
    if not metrics or any("elapsed" not in line for line in metrics):
        return sum(line["seconds"] for line in metrics), False
    following = [line["elapsed"] for line in metrics[1:]] + [0.0]
    return sum(line["elapsed"] for line, after in zip(metrics, following, strict=True) if after < line["elapsed"]), True


def training_sparsity(metrics: list[dict[str, Any]], name: str) -> float | None:
    """Mean over the epochs, as the paper has it."""
    values = [(line.get("training_activity") or {}).get(name) for line in metrics]
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def our_row(model: str, run: Record | None) -> tuple[str, ...]:
    if run is None:
        return (model, "ours", *["not run"] * (len(HEAD) - 2))
    seconds, whole = wall_clock(run.metrics)
    backward = [training_sparsity(run.metrics, name) for name in ("backward_sparsity", "backward_skippable")]
    both = f"{percent(backward[0])} (skippable {percent(backward[1])})" if backward[0] is not None else "-"
    clock = f"{seconds / 60:.1f} min{'' if whole else ', checkpoints not counted'}"
    done = f"{len(run.metrics)} of {run.config['epochs']}"
    if run.result is None:
        best = min(line["validation"]["perplexity"] for line in run.metrics)
        return (model, "ours, unfinished", "-", f"validation {best:.1f}", "-", both, "-", done, clock)
    overall = run.result["activity"]["overall"]
    events = overall["backward_sparsity"] is not None
    return (
        model,
        "ours",
        f"{overall['parameters'] / 1e6:.1f}M",
        f"**{run.result['test']['perplexity']:.2f}**",
        percent(overall["activity_sparsity"]) if events else "-",
        both if events else "-",
        f"{overall['forward_macs'] / 1e6:.2f}M",
        f"{run.result['best_epoch']} best of {len(run.metrics)}",
        clock,
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def perplexity_figure(runs: list[Record]) -> Any:
    with LIGHT.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter, ScalarFormatter

        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.subplots()
        for run, colour in zip(runs, LIGHT.event * len(runs), strict=False):
            epochs = [line["epoch"] for line in run.metrics]
            axes.plot(epochs, [line["validation"]["perplexity"] for line in run.metrics], color=colour, label=run.name)
            trained = [math.exp(min(line["train"]["loss"], 20)) for line in run.metrics]
            axes.plot(epochs, trained, color=colour, alpha=0.4, linewidth=1, label=f"{run.name}, training")
        axes.axhline(57.2, color=LIGHT.muted, linewidth=1, linestyle=(0, (4, 2)), label="paper, test (57.2)")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        ticks = [40, 50, 60, 80, 100, 150, 200, 400, 800]
        low, high = axes.get_ylim()
        if low < 100:
            axes.set_ylim(top=min(high, 500))  # what the first epochs do is of no interest
        axes.set_yticks([tick for tick in ticks if low <= tick <= high])
        axes.set_title("Validation perplexity")
        axes.set_xlabel("epoch")
        axes.legend(fontsize=8.5)
        LIGHT.grid(axes)
    return figure


def sparsity_figure(run: Record) -> Any | None:
    """Layer by layer: silence in validation, the backward pass in training. None where a run did not record them."""
    known = [line for line in run.metrics if line.get("layers")]
    if not known:
        return None
    with LIGHT.context():
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

        figure = Figure(figsize=(6.4, 5.2), layout="constrained")
        panels = (
            ("Silent in validation (activity sparsity)", "layers", "activity_sparsity"),
            (
                "Outside the window in training (backward sparsity, the paper's count)",
                "training_layers",
                "backward_sparsity",
            ),
        )
        rows: Any = figure.subplots(2, 1, sharex=True)
        for axes, (title, group, name) in zip(rows, panels, strict=True):
            lines = [line for line in known if line.get(group)]
            for layer, colour in zip(lines[0][group] if lines else (), LIGHT.event * 9, strict=False):
                points = [(line["epoch"], line[group][layer][name]) for line in lines]
                if all(value is not None for _, value in points):
                    axes.plot(*zip(*points, strict=True), color=colour, label=layer)
            axes.set_title(title)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
            LIGHT.grid(axes)
        rows[1].set_xlabel("epoch")
        if rows[0].get_legend_handles_labels()[0]:
            rows[0].legend(ncols=3)
    return figure


def about(run: Record, figure: str | None) -> str:
    """A run's own section."""
    versions = run.environment.get("versions", {})
    machine = run.environment.get("cuda") or run.environment.get("machine", "unknown machine")
    plain = {"device": run.config["device"], "precision": run.config["precision"], "graph": run.config["graph"]}
    default = RECIPES[run.recipe].make()
    changed = {
        name: value
        for name, value in run.config.items()
        if name not in plain and name != "root" and json.loads(json.dumps(_plain(getattr(default, name)))) != value
    }
    given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in (changed | plain).items())
    lines = [f"## {run.name}", "", f"    egru train {run.recipe} {given}", ""]
    lines.append(
        f"On {machine}, torch {versions.get('torch', '?')}, Python {versions.get('python', '?')}; "
        f"its records: `benchmarks/results/runs/{run.name}/`."
    )
    if run.result is not None:
        chosen = next((x for x in run.metrics if x["epoch"] == run.result["best_epoch"]), None)
        if chosen is not None:
            lines.append(f"Validation perplexity of the chosen epoch: {chosen['validation']['perplexity']:.2f}.")
        layers = [
            (x["name"], str(x["hidden_size"]), percent(x["activity_sparsity"]), f"{x['forward_macs'] / 1e6:.2f}M")
            for x in run.result["activity"]["layers"]
        ]
        readout = [
            (x["name"], str(x["out_features"]), percent(1 - x["input_density"]), f"{x['macs'] / x['calls'] / 1e6:.2f}M")
            for x in run.result["activity"]["linears"]
        ]
        lines += [
            "",
            table(("layer, test", "units", "silent (its input, of the readout)", "MACs a step"), layers + readout),
        ]
    if figure is not None:
        lines += ["", f"![Layer-wise sparsity against the epoch]({figure})"]
    if run.engine is not None:
        rows = [
            (
                name,
                f"{row['words_per_second']:.0f}",
                f"{row['times_torch']:.1f}" if "times_torch" in row else "1",
                f"{row['perplexity']:.3f}",
            )
            for name, row in run.engine["contestants"].items()
        ]
        lines += [
            "",
            f"Word by word on the CPU ({run.engine['machine']}, one thread, {run.engine['date']}, "
            f"`benchmarks/language_engine.py`): {run.engine['timed']} words of the test split on the clock, "
            f"perplexities over {run.engine['words']}.",
            "",
            table(("", "words a second", "times torch", "perplexity"), rows),
        ]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


INTRODUCTION = """# Results: Penn Treebank

Written by `benchmarks/language_results.py` from the records in `benchmarks/results/runs/`; not by hand.

Test split read once, in one column, state (`c` and `y`) carried from its first word to its last, by the epoch that
validation chose. MACs as the paper counts them: layer-wise activity, and the readout. Backward sparsity as the paper
counts it, states with `|c - threshold|` at or above the surrogate's width, and what a kernel can skip, `dy/dc = 0`; in
training mode, one batch an epoch, mean over all epochs. With embedding 750 (31.7M parameters) a step is below 10M MACs
from 75.7 % silent on, and below 8M from 82.7 %.
"""
EVNN = """EvNN's README offers weights and names no perplexity. Its code and settings on an H200, measured at the
start of this project: validation perplexity 392, 150, 122, 109, 102, 98, 94 after epochs 1, 6, 11, 16, 21, 26, 31,
activity 15 %, backward sparsity 68 %; it was not run further. [Training](training.md) lists where our code differs.
"""


def write(runs: list[Record], page: pathlib.Path) -> None:
    images = page.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    first: dict[str, Record] = {}
    for run in runs:
        first.setdefault(run.recipe, run)
    ours = [our_row(model, first.get(recipe)) for recipe, model in MODELS.items()]
    parts = [INTRODUCTION, table(HEAD, PAPER + ours) + "\n", EVNN]
    if runs:
        perplexity_figure(runs).savefig(images / "ptb-perplexity.png", dpi=110)
        parts.append("![Validation perplexity against the epoch](images/ptb-perplexity.png)\n")
    for run in runs:
        figure = sparsity_figure(run)
        name = f"{run.name}-sparsity.png"
        if figure is not None:
            figure.savefig(images / name, dpi=110)
        parts.append(about(run, f"images/{name}" if figure is not None else None) + "\n")
    page.write_text("\n".join(parts))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=pathlib.Path, default=RUNS, help="a folder of runs' records")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "results.md")
    options = parser.parse_args(arguments)
    found = sorted(path.parent for path in options.runs.glob("*/config.json")) if options.runs.is_dir() else []
    runs = [run for run in map(read, found) if run.recipe.startswith("ptb") and run.metrics]
    write(runs, options.out)
    print(f"{options.out}: {len(runs)} runs")


if __name__ == "__main__":
    main()
