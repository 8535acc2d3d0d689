"""Which settings train on sequential MNIST: short runs of named variants on a CPU, one line of JSON each.

    python benchmarks/smnist_screen.py                          # every variant that is not in the file yet
    python benchmarks/smnist_screen.py --variants base fast     # these
    python benchmarks/smnist_screen.py --add RUN NAME           # a run that `egru train` made, as one more line
    python benchmarks/smnist_screen.py --table                  # what was found, as Markdown
    python benchmarks/smnist_screen.py --figure                 # gradient norms of every line, docs/images/

A variant is a recipe's fields that differ from the base. Each trains for the same number of updates with a whole course
of the learning rate, on 20,000 images and is judged on 2,000 others, all from the training file; images of 14 by 14
pixels unless a variant says otherwise. The test file is never read into a score.
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

from egru import experiments
from egru.data import Classification, Split
from egru.events import Surrogate
from egru.experiments import ClassifierConfig
from egru.experiments.config import read_config
from egru.layers import Threshold
from egru.report import LIGHT
from egru.training import EpochMetrics, NoProgress, Run, RunError, to_plain, train
from egru.training.statistics import EXPLODED

RESULTS = pathlib.Path(__file__).parent / "results" / "smnist_screen.jsonl"
FIGURE = pathlib.Path(__file__).parent.parent / "docs" / "images" / "smnist-gradients.png"
TRAINED, JUDGED = 20_000, 2_000
BASE: dict[str, Any] = {
    "data": "smnist",
    "side": 14,
    "hidden": 96,
    "batch": 100,
    "learning_rate": 3e-3,
    "schedule": "one-cycle",
    "clip": 1.0,
    "trace": 200.0,
    "normalise": True,
    "uniform_gates": True,
    "reset": "none",
    "reset_gate": "before",
    "threshold": Threshold(mean=-4.0),
    "surrogate": Surrogate(width=0.3, height=0.5),
}
"""The demo's settings without zoneout and label smoothing, the learning rate of the first screen."""

FAST: dict[str, Any] = {"learning_rate": 1e-2, "centre": True, "input_scale": 3.0}
"""The two winners of the first round together: a higher learning rate, pixels of mean 0 and standard deviation 1."""
SPARSE: dict[str, Any] = {**FAST, "threshold": Threshold(mean=-2.0)}
RARE: dict[str, Any] = {**FAST, "rate_loss": 1.0}
OSCILLATORS: dict[str, Any] = {
    "cell": "cornn",
    "hidden": 128,
    "oscillators": (0.168, 2.7, 4.7),
    "readout": "last",
    "normalise": False,
    "uniform_gates": False,
}
"""coRNN; its step is four times its authors', who have four times the pixels."""

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "rate 0.1": {"rate_loss": 0.1},
    "rate 1": {"rate_loss": 1.0},
    "thresholds 0.12": {"threshold": Threshold(mean=-2.0)},
    "wide": {"surrogate": Surrogate(width=1.0, height=0.3)},
    "lr1e-2": {"learning_rate": 1e-2},
    "log-gates": {"uniform_gates": False, "longest_memory": 196.0},
    "plain-gates": {"uniform_gates": False},
    "standardised": {"centre": True, "input_scale": 3.0},
    "input x3": {"input_scale": 3.0},
    "thresholds 0.5": {"threshold": Threshold(mean=0.0)},
    "thresholds 0.27": {"threshold": Threshold(mean=-1.0)},
    "centred": {"centre": True},
    "zoneout 0.1": {"zoneout": 0.1},
    "reset gate after": {"reset_gate": "after"},
    "smoothed labels": {"label_smoothing": 0.1},
    "not normalised": {"normalise": False},
    "trace 40": {"trace": 40.0},
    "trace 1000": {"trace": 1000.0},
    "bounded": {"surrogate": Surrogate(width=0.3, height=1.0, bounded=True)},
    "memory 28": {"uniform_gates": False, "longest_memory": 28.0},
    "clearing by output": {"reset": "output"},
    "clearing by threshold": {"reset": "threshold"},
    "height 0.1": {"surrogate": Surrogate(width=0.3, height=0.1)},
    "height 1": {"surrogate": Surrogate(width=0.3, height=1.0)},
    "fast": FAST,
    "fast, rate 0.3": {**FAST, "rate_loss": 0.3},
    "fast, rate 0.3, permuted": {**FAST, "rate_loss": 0.3, "data": "psmnist"},
    **{
        f"fast, rate 0.3, {task}{name}": {**FAST, "rate_loss": 0.3, **data, **changes}
        for task, data in (("", {}), ("permuted, ", {"data": "psmnist"}))
        for name, changes in (
            ("zoneout 0.1", {"zoneout": 0.1}),
            ("dropconnect 0.2", {"dropconnect": 0.2}),
            ("smoothed labels", {"label_smoothing": 0.1}),
            ("reset gate after", {"reset_gate": "after"}),
            ("squared", {"rate_loss": 10.0, "squared_rate": True}),
            ("width 1, height 0.3", {"surrogate": Surrogate(width=1.0, height=0.3)}),
            ("height 1", {"surrogate": Surrogate(width=0.3, height=1.0)}),
            ("width 0.1", {"surrogate": Surrogate(width=0.1, height=0.5)}),
            ("thresholds 0.002", {"threshold": Threshold(mean=-6.0)}),
            ("lr 2e-2", {"learning_rate": 2e-2}),
            ("lr 5e-3", {"learning_rate": 5e-3}),
            ("trace 40", {"trace": 40.0}),
        )
    },
    **{
        f"fast, rate 0.3, permuted, 256 units{name}": {
            **FAST,
            "rate_loss": 0.3,
            "data": "psmnist",
            "hidden": 256,
            "input_scale": 4.9,
            **changes,
        }
        for name, changes in (("", {}), (", reset gate after", {"reset_gate": "after"}))
    },
    "fast, rate 1": RARE,
    "fast, rate 3": {**FAST, "rate_loss": 3.0},
    "fast, thresholds 0.05": {**FAST, "threshold": Threshold(mean=-3.0)},
    "fast, permuted": {**FAST, "data": "psmnist"},
    "fast, rate 1, permuted": {**RARE, "data": "psmnist"},
    "fast, rate 1, permuted, memory 196": {
        **RARE,
        "data": "psmnist",
        "uniform_gates": False,
        "longest_memory": 196.0,
    },
    "fast, rate 1, 28 by 28": {**RARE, "side": 28, "trace": 800.0},
    "fast, rate 1, 256 units": {**RARE, "hidden": 256, "input_scale": 4.9},
    "fast, rate 1, 256 units, lr 4e-3": {**RARE, "hidden": 256, "input_scale": 4.9, "learning_rate": 4e-3},
    "fast, rate 1, 590 units": {**RARE, "hidden": 590, "input_scale": 7.5},
    "fast, rate 0.5, 590 units, lr 5e-3": {
        **FAST,
        "hidden": 590,
        "input_scale": 7.5,
        "learning_rate": 5e-3,
        "rate_loss": 0.5,
    },
    "fast, rate 1, not normalised": {**RARE, "normalise": False},
    "fast, rate 1, clearing by output": {**RARE, "reset": "output"},
    "fast, rate 1, clearing by output, bounded": {
        **RARE,
        "reset": "output",
        "surrogate": Surrogate(width=0.3, height=0.5, bounded=True),
    },
    "fast, rate 1, clearing by threshold": {**RARE, "reset": "threshold"},
    "fast, rate 1, zoneout 0.1": {**RARE, "zoneout": 0.1},
    "fast, rate 1, lr 2e-2": {**RARE, "learning_rate": 2e-2},
    "fast, rate 1, memory 196": {**RARE, "uniform_gates": False, "longest_memory": 196.0},
    "fast, thresholds 0.12": SPARSE,
    "fast, thresholds 0.27": {**FAST, "threshold": Threshold(mean=-1.0)},
    "fast, thresholds 0.12, rate 0.3": {**SPARSE, "rate_loss": 0.3},
    "fast, thresholds 0.12, lr 2e-2": {**SPARSE, "learning_rate": 2e-2},
    "fast, thresholds 0.12, memory 196": {**SPARSE, "uniform_gates": False, "longest_memory": 196.0},
    "fast, thresholds 0.12, wide": {**SPARSE, "surrogate": Surrogate(width=1.0, height=0.3)},
    "fast, thresholds 0.12, zoneout 0.1": {**SPARSE, "zoneout": 0.1},
    "fast, thresholds 0.12, smoothed labels": {**SPARSE, "label_smoothing": 0.1},
    "fast, thresholds 0.12, reset gate after": {**SPARSE, "reset_gate": "after"},
    "fast, thresholds 0.12, clearing by output": {**SPARSE, "reset": "output"},
    "fast, thresholds 0.12, clearing by threshold": {**SPARSE, "reset": "threshold"},
    "fast, thresholds 0.12, mean": {**SPARSE, "readout": "mean"},
    "fast, thresholds 0.12, trace 40": {**SPARSE, "trace": 40.0},
    "fast, thresholds 0.12, permuted": {**SPARSE, "data": "psmnist"},
    "fast, thresholds 0.12, 28 by 28": {**SPARSE, "side": 28, "trace": 800.0},
    "fast, gru": {"cell": "gru", "uniform_gates": False, "learning_rate": 1e-2, "centre": True},
    "paper": {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "clip": 0.25,
        "trace": 10.0,
        "normalise": False,
        "uniform_gates": False,
        "reset": "output",
        "threshold": Threshold(mean=0.0),
        "surrogate": Surrogate(),
    },
    "gru": {"cell": "gru", "uniform_gates": False},
    "gru, alike": {"cell": "gru", **FAST, "input_scale": 7.3},
    "gru, alike, lr 3e-3": {"cell": "gru", **FAST, "input_scale": 7.3, "learning_rate": 3e-3},
    **{f"cornn, lr {rate}": {**OSCILLATORS, "learning_rate": float(rate)} for rate in ("2e-3", "5e-3", "1e-2", "2e-2")},
}


@functools.cache
def data_for(name: str, side: int) -> Classification:
    """The first images of the training file to learn from, the last to judge by; these stand in for the test too."""
    whole = experiments.load_data(ClassifierConfig(data=name, side=side))  # pyright: ignore[reportArgumentType]
    assert isinstance(whole, Classification)
    judged = Split(*(part[-JUDGED:] for part in whole.validation))
    return dataclasses.replace(
        whole, train=Split(*(part[:TRAINED] for part in whole.train)), validation=judged, test=judged
    )


def one(name: str, changes: dict[str, Any], updates: int, seed: int) -> dict[str, Any]:
    """Train a variant; the line it leaves."""
    config = ClassifierConfig(**{**BASE, **changes, "seed": seed, "save_every": 1_000_000, "epochs": 1})
    config = dataclasses.replace(config, epochs=max(1, math.ceil(updates * config.batch / TRAINED)))
    model, task = experiments.build(config, data_for(config.data, config.side or 28))
    start, stopped, said = time.perf_counter(), "", []
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(pathlib.Path(folder) / "run", {}, said.append)
        try:
            train(model, task, config, run, NoProgress())
        except RunError as error:
            stopped = str(error)
        lines = run.metrics()
    spent = time.perf_counter() - start
    plain = {key: to_plain(value) if dataclasses.is_dataclass(value) else value for key, value in changes.items()}
    return entry(name, seed, plain, lines, spent, stopped, said) | {"asked": updates}


def finished(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """The line of a run that `egru train` made: its validation split is the judge, its last epoch counts."""
    run = Run.open(folder)
    config, lines = to_plain(read_config(run.config())[1]), run.metrics()
    if run.result() is None:
        raise RunError(f"{folder} is not finished; only whole runs are added")
    base = to_plain(ClassifierConfig(**BASE))
    changes = {key: value for key, value in config.items() if value != base[key] and key not in ("seed", "root")}
    record = entry(name, config["seed"], changes, lines, lines[-1].elapsed or 0.0)
    return record | {"asked": record["updates"]}


def entry(
    name: str,
    seed: int,
    changes: dict[str, Any],
    lines: list[EpochMetrics],
    seconds: float,
    stopped: str = "",
    said: Sequence[str] = (),
) -> dict[str, Any]:
    """A line of the file, from a run's metrics."""
    record: dict[str, Any] = {
        "variant": name,
        "seed": seed,
        "updates": sum(line.train.steps for line in lines),
        "changes": changes,
        "stopped": stopped,
        "said": said,
        "seconds": round(seconds),
        "date": datetime.date.today().isoformat(),
    }
    if not lines:
        return record
    last = lines[-1]
    stability = to_plain(last.stability[0]) if last.stability else {}
    return record | {
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


def found(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def known(path: pathlib.Path, name: str, seed: int, updates: int) -> bool:
    return any((r["variant"], r["seed"], r["asked"]) == (name, seed, updates) for r in found(path))


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    name, accuracy = record["variant"], 100 * record.get("accuracy", 0)
    print(f"{name:20s} seed {record['seed']}: {accuracy:.1f} %, {record['seconds']} s {record['stopped']}", flush=True)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, best first within a number of updates."""
    head = (
        "variant",
        "seed",
        "updates",
        "accuracy %",
        "active %",
        "gradient norm median / p99",
        "adjoint a step",
        "above 1",
    )
    rows = [head, ("---",) * len(head)]
    for r in sorted(records, key=lambda r: (r["updates"], -r.get("accuracy", 0))):
        if "accuracy" not in r:
            rows.append((r["variant"], str(r["seed"]), str(r["updates"]), r["stopped"][:40], *[""] * 4))
            continue
        growth, share = r["adjoint_growth"], r["diagonal_above_one"]
        rows.append((
            r["variant"], str(r["seed"]), str(r["updates"]) + (" (stopped)" if r["stopped"] else ""),
            f"{100 * r['accuracy']:.1f}", f"{100 * r['activity']:.1f}",
            f"{r['gradient_norm']:.2g} / {r['gradient_norm_p99']:.2g}",
            "-" if growth is None else f"{growth:+.3f}", "-" if share is None else f"{100 * share:.1f} %",
        ))  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figure(records: list[dict[str, Any]], columns: int = 5) -> Any:
    """A panel a variant, a colour a seed: the gradient norm's median and 99th percentile of every epoch."""
    variants: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for r in sorted(records, key=lambda r: (r["updates"] < 2500, -r.get("accuracy", 0))):
        if "curve" in r:
            variants[r["variant"]].append(r)
    rows = math.ceil(len(variants) / columns)
    with LIGHT.context():
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator

        drawing = Figure(figsize=(2 * columns, 1.62 * rows + 0.6), layout="constrained")
        panels: Any = drawing.subplots(rows, columns, squeeze=False)
        for axes in panels.flat[len(variants) :]:
            axes.set_axis_off()
        for axes, (name, mine) in zip(panels.flat, variants.items(), strict=False):
            for r in mine:
                colour = LIGHT.dense if r["adjoint_growth"] is None else LIGHT.event[r["seed"] % len(LIGHT.event)]
                epochs = range(1, len(r["curve"]) + 1)
                for style, values in zip(("-", ":"), list(zip(*r["curve"], strict=True))[1:3], strict=True):
                    axes.plot(epochs, values, style, color=colour, linewidth=1.4, marker="." if len(epochs) < 9 else "")
            axes.set_yscale("log")
            largest = max(r["gradient_norm_p99"] for r in mine)
            axes.set_ylim(0.01, EXPLODED if largest <= EXPLODED else 10 * largest)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.minorticks_off()
            axes.tick_params(labelsize=7)
            colour = LIGHT.alarm if largest > EXPLODED else LIGHT.ink
            axes.set_title(textwrap.fill(name, 25), fontsize=8, fontweight="normal", pad=4, color=colour)
            LIGHT.grid(axes)
        ink = {"color": LIGHT.muted, "linewidth": 1.4}
        keys = [Line2D([], [], label="median", **ink), Line2D([], [], label="99th percentile", linestyle=":", **ink)]
        seeds = sorted({r["seed"] for r in records})
        keys += [Line2D([], [], color=LIGHT.event[seed % len(LIGHT.event)], label=f"seed {seed}") for seed in seeds]
        keys += [Line2D([], [], color=LIGHT.dense, label="no events")]
        drawing.legend(handles=keys, loc="outside upper left", ncols=len(keys), fontsize=8.5)
        drawing.supxlabel("epoch", fontsize=9, color=LIGHT.muted)
        drawing.supylabel("norm of the gradient before clipping", fontsize=9, color=LIGHT.muted)
    return drawing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--add", nargs=2, metavar=("RUN", "NAME"), help="add a finished run's records, train nothing")
    parser.add_argument("--table", action="store_true", help="print what is in the file, and train nothing")
    parser.add_argument("--figure", type=pathlib.Path, nargs="?", const=FIGURE, help="draw it, and train nothing")
    options = parser.parse_args(arguments)
    if options.add:
        record = finished(pathlib.Path(options.add[0]), options.add[1])
        if not known(options.out, record["variant"], record["seed"], record["asked"]):
            append(options.out, record)
    if options.table:
        print(table(found(options.out)))
    if options.figure:
        from PIL import Image

        whole = io.BytesIO()
        figure(found(options.out)).savefig(whole, dpi=90)
        Image.open(whole).convert("RGB").quantize(64).save(options.figure, optimize=True)  # a third of the bytes
    if options.add or options.table or options.figure:
        return 0
    torch.set_num_threads(options.threads)
    for name in options.variants:
        for seed in options.seeds:
            if not known(options.out, name, seed, options.updates):
                append(options.out, one(name, VARIANTS[name], options.updates, seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
