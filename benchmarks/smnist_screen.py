"""Compare settings on sequential MNIST: train short runs of named variants on a CPU and store one JSON line each.

    python benchmarks/smnist_screen.py                          # train every variant that is not stored yet
    python benchmarks/smnist_screen.py --variants base fast     # train these variants
    python benchmarks/smnist_screen.py --add RUN NAME           # add a finished run of `egru train`
    python benchmarks/smnist_screen.py --table                  # print the results as Markdown
    python benchmarks/smnist_screen.py --figure                 # plot the gradient norms to docs/results/images/

The variants are defined in smnist_variants.py. Each is trained for the same number of updates with a complete learning
rate schedule. It trains on 20,000 images of the training file and is scored on 2,000 others. Images have 14 by 14
pixels unless the variant sets another size. The test file is not used.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import io
import json
import math
import pathlib
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import torch
from smnist_variants import BASE, VARIANTS

from egru import experiments
from egru.data import Classification, Split
from egru.experiments import ClassifierConfig
from egru.experiments.config import read_config
from egru.report import LIGHT
from egru.training import EpochMetrics, NoProgress, Run, RunError, to_plain, train
from egru.training.statistics import EXPLODED

RESULTS = pathlib.Path(__file__).parent / "results" / "smnist_screen.jsonl"
FIGURE = pathlib.Path(__file__).parent.parent / "docs" / "results" / "images" / "smnist-gradients.png"
TRAINING_IMAGES, VALIDATION_IMAGES = 20_000, 2_000


@functools.cache
def data_for(name: str, side: int) -> Classification:
    """Return the first images of the training file for training and the last for validation, also as test split."""
    full = experiments.load_data(ClassifierConfig(data=name, side=side))  # pyright: ignore[reportArgumentType]
    assert isinstance(full, Classification)
    validation = Split(*(part[-VALIDATION_IMAGES:] for part in full.validation))
    return dataclasses.replace(
        full,
        train=Split(*(part[:TRAINING_IMAGES] for part in full.train)),
        validation=validation,
        test=validation,
    )


def train_variant(name: str, changes: dict[str, Any], updates: int, seed: int) -> dict[str, Any]:
    """Train a variant and return its entry."""
    config = ClassifierConfig(**{**BASE, **changes, "seed": seed, "save_every": 1_000_000, "epochs": 1})
    config = dataclasses.replace(config, epochs=max(1, math.ceil(updates * config.batch / TRAINING_IMAGES)))
    model, task = experiments.build(config, data_for(config.data, config.side or 28))
    messages: list[str] = []
    start, stopped = time.perf_counter(), ""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(pathlib.Path(folder) / "run", {}, messages.append)
        try:
            train(model, task, config, run, NoProgress())
        except RunError as error:
            stopped = str(error)
        lines = run.metrics()
    seconds = time.perf_counter() - start
    plain = {key: to_plain(value) if dataclasses.is_dataclass(value) else value for key, value in changes.items()}
    return make_entry(name, seed, plain, lines, seconds, stopped, messages) | {"requested_updates": updates}


def read_run(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Return the entry of a finished run of `egru train`, with the scores of its last epoch on its validation split."""
    run = Run.open(folder)
    config, lines = to_plain(read_config(run.config())[1]), run.metrics()
    if run.result() is None:
        raise RunError(f"--add requires a finished run, but {folder} is not finished")
    base = to_plain(ClassifierConfig(**BASE))
    changes = {key: value for key, value in config.items() if value != base[key] and key not in ("seed", "root")}
    entry = make_entry(name, config["seed"], changes, lines, lines[-1].elapsed or 0.0)
    return entry | {"requested_updates": entry["updates"]}


def make_entry(
    name: str,
    seed: int,
    changes: dict[str, Any],
    lines: list[EpochMetrics],
    seconds: float,
    stopped: str = "",
    messages: Sequence[str] = (),
) -> dict[str, Any]:
    """Return one line of the results file."""
    entry: dict[str, Any] = {
        "variant": name,
        "seed": seed,
        "updates": sum(line.train.steps for line in lines),
        "changes": changes,
        "stopped": stopped,
        "messages": messages,
        "seconds": round(seconds),
        "date": datetime.date.today().isoformat(),
    }
    if not lines:
        return entry
    last = lines[-1]
    stability = to_plain(last.stability[0]) if last.stability else {}
    return entry | {
        "accuracy": last.validation.accuracy,
        "activity": 1 - last.activity.activity_sparsity,
        "backward_skippable": last.activity.backward_skippable,
        "loss": last.train.loss,
        "gradient_norm": last.train.gradient_norm,
        "gradient_norm_p99": max(line.train.gradient_norm_p99 or 0.0 for line in lines),
        "diagonal_above_one": stability.get("diagonal_above_one"),
        "adjoint_growth": stability.get("adjoint_growth"),
        "adjoint_peak": stability.get("adjoint_peak"),
        "curve": [
            [
                round(line.validation.accuracy, 4),
                float(f"{line.train.gradient_norm:.3g}"),
                float(f"{line.train.gradient_norm_p99 or 0.0:.3g}"),
                line.stability[0].adjoint_growth if line.stability else None,
            ]
            for line in lines
        ],
    }


def read_entries(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_stored(path: pathlib.Path, name: str, seed: int, updates: int) -> bool:
    keys = ((e["variant"], e["seed"], e["requested_updates"]) for e in read_entries(path))
    return (name, seed, updates) in keys


def append_entry(path: pathlib.Path, entry: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    name, accuracy = entry["variant"], 100 * entry.get("accuracy", 0)
    print(f"{name:20s} seed {entry['seed']}: {accuracy:.1f} %, {entry['seconds']} s {entry['stopped']}", flush=True)


def format_table(entries: list[dict[str, Any]]) -> str:
    """Return a Markdown table sorted by the number of updates, then by decreasing accuracy."""
    head = (
        "variant",
        "seed",
        "updates",
        "accuracy %",
        "activity %",
        "gradient norm median / p99",
        "adjoint growth per step",
        "factors above 1",
    )
    rows = [head, ("---",) * len(head)]
    for entry in sorted(entries, key=lambda entry: (entry["updates"], -entry.get("accuracy", 0))):
        updates = str(entry["updates"])
        if "accuracy" not in entry:
            rows.append((entry["variant"], str(entry["seed"]), updates, entry["stopped"][:40], *[""] * 4))
            continue
        growth, share = entry["adjoint_growth"], entry["diagonal_above_one"]
        row = (
            entry["variant"],
            str(entry["seed"]),
            updates + (" (stopped)" if entry["stopped"] else ""),
            f"{100 * entry['accuracy']:.1f}",
            f"{100 * entry['activity']:.1f}",
            f"{entry['gradient_norm']:.2g} / {entry['gradient_norm_p99']:.2g}",
            "-" if growth is None else f"{growth:+.3f}",
            "-" if share is None else f"{100 * share:.1f} %",
        )
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw_figure(entries: list[dict[str, Any]], columns: int = 5) -> Any:
    """Plot median and 99th percentile of the gradient norm per epoch, with one panel per variant."""
    variants: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for entry in sorted(entries, key=lambda entry: (entry["updates"] < 2500, -entry.get("accuracy", 0))):
        if "curve" in entry:
            variants[entry["variant"]].append(entry)
    rows = math.ceil(len(variants) / columns)
    with LIGHT.context():
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(2 * columns, 1.62 * rows + 0.6), layout="constrained")
        panels: Any = figure.subplots(rows, columns, squeeze=False)
        for axes in panels.flat[len(variants) :]:
            axes.set_axis_off()
        for axes, (name, runs) in zip(panels.flat, variants.items(), strict=False):
            for run in runs:
                colour = LIGHT.dense if run["adjoint_growth"] is None else LIGHT.event[run["seed"] % len(LIGHT.event)]
                epochs = range(1, len(run["curve"]) + 1)
                for style, values in zip(("-", ":"), list(zip(*run["curve"], strict=True))[1:3], strict=True):
                    axes.plot(epochs, values, style, color=colour, linewidth=1.4, marker="." if len(epochs) < 9 else "")
            axes.set_yscale("log")
            largest = max(run["gradient_norm_p99"] for run in runs)
            axes.set_ylim(0.01, EXPLODED if largest <= EXPLODED else 10 * largest)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.minorticks_off()
            axes.tick_params(labelsize=7)
            colour = LIGHT.alarm if largest > EXPLODED else LIGHT.ink
            axes.set_title(textwrap.fill(name, 25), fontsize=8, fontweight="normal", pad=4, color=colour)
            LIGHT.grid(axes)
        ink = {"color": LIGHT.muted, "linewidth": 1.4}
        keys = [Line2D([], [], label="median", **ink), Line2D([], [], label="99th percentile", linestyle=":", **ink)]
        seeds = sorted({entry["seed"] for entry in entries})
        keys += [Line2D([], [], color=LIGHT.event[seed % len(LIGHT.event)], label=f"seed {seed}") for seed in seeds]
        keys += [Line2D([], [], color=LIGHT.dense, label="dense")]
        figure.legend(handles=keys, loc="outside upper left", ncols=len(keys), fontsize=8.5)
        figure.supxlabel("epoch", fontsize=9, color=LIGHT.muted)
        figure.supylabel("gradient norm before clipping", fontsize=9, color=LIGHT.muted)
    return figure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(VARIANTS),
        choices=list(VARIANTS),
        metavar="NAME",
        help="variants to train; default: all",
    )
    parser.add_argument("--updates", type=int, default=600, help="number of optimiser steps")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds to train each variant with")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="results file")
    parser.add_argument("--add", nargs=2, metavar=("RUN", "NAME"), help="add a finished run, without training")
    parser.add_argument("--table", action="store_true", help="print the results, without training")
    parser.add_argument("--figure", type=pathlib.Path, nargs="?", const=FIGURE, help="plot them, without training")
    options = parser.parse_args(arguments)
    if options.add:
        entry = read_run(pathlib.Path(options.add[0]), options.add[1])
        if not is_stored(options.out, entry["variant"], entry["seed"], entry["requested_updates"]):
            append_entry(options.out, entry)
    if options.table:
        print(format_table(read_entries(options.out)))
    if options.figure:
        from PIL import Image

        png = io.BytesIO()
        draw_figure(read_entries(options.out)).savefig(png, dpi=90)
        # A palette reduces the file to a fifth of its size. Maximum coverage keeps the colours of rare curves.
        palette = Image.open(png).convert("RGB").quantize(64, method=Image.Quantize.MAXCOVERAGE)
        palette.save(options.figure, optimize=True)
    if options.add or options.table or options.figure:
        return 0
    torch.set_num_threads(options.threads)
    for name in options.variants:
        for seed in options.seeds:
            if not is_stored(options.out, name, seed, options.updates):
                append_entry(options.out, train_variant(name, VARIANTS[name], options.updates, seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
