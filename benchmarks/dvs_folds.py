"""What of the `dvs` recipe matters: cross-validation over sessions of the training recordings, one change at a time.

    python benchmarks/dvs_folds.py --device cuda --workers 8 --out result.json
    python benchmarks/dvs_folds.py --variants recipe --epochs 2 --folds 0      # to see it work, on a CPU

A fold holds out 14 of the 98 training sessions, so mostly other people; the test recordings are never looked at. Each
variant is trained by the trainer for the recipe's epochs; its accuracy is the mean over the last five of them, over all
folds: nothing is chosen by it. The data are the recipe's, from EGRU_DATA.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import torch

from egru import experiments
from egru.data import Classification, Split
from egru.data.gestures import VALIDATION_SESSIONS, sessions
from egru.experiments import ClassifierConfig
from egru.layers import Threshold
from egru.training import NoProgress, Run, train

LAST = 5
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "recipe": ("dvs", {}),
    "not smoothed": ("dvs", {"smooth": False}),
    "not centred": ("dvs", {"centre": False}),
    "neither": ("dvs", {"smooth": False, "centre": False}),
    "no input dropout": ("dvs", {"input_dropout": 0.0}),
    "readout of the trace": ("dvs", {"readout": "trace"}),
    "no batch normalisation": ("dvs", {"normalise": False}),
    "weight decay 0.05": ("dvs", {"weight_decay": 0.05}),
    "no clearing": ("dvs", {"reset": "none"}),
    "thresholds start at 0.5": ("dvs", {"threshold": Threshold(mean=0.0)}),
    "no loss on the rate": ("dvs", {"rate_loss": 0.0}),
    "one layer": ("dvs", {"layers": 1}),
    "GRU": ("dvs-gru", {}),
    "GRU, neither": ("dvs-gru", {"smooth": False, "centre": False}),
}


def fold_of(data: Classification, fold: int) -> Classification:
    """The training and validation recordings anew: one fold validates, and stands in for the test recordings too."""
    x, y = (torch.cat(parts) for parts in zip(data.train, data.validation, strict=True))
    held = sessions(y) // VALIDATION_SESSIONS == fold
    if not held.any():
        raise ValueError(f"fold must be 0 to {int(sessions(y)[-1]) // VALIDATION_SESSIONS}, got {fold}")
    validation = Split(x[held], y[held])
    return dataclasses.replace(data, train=Split(x[~held], y[~held]), validation=validation, test=validation)


def one(variant: str, fold: int, changes: dict[str, Any]) -> dict[str, float]:
    """Train a variant without one fold; its accuracy and silence there, over the last epochs."""
    torch.set_num_threads(2)
    name, own = VARIANTS[variant]
    config = dataclasses.replace(experiments.find(name).make(), **own, **changes, save_every=1_000_000)
    assert isinstance(config, ClassifierConfig)
    whole = experiments.load_data(config)
    assert isinstance(whole, Classification)
    data = fold_of(whole, fold)
    model, task = experiments.build(config, data)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(pathlib.Path(folder) / "run", {}, lambda _: None)
        train(model, task, config, run, NoProgress())
        lines = run.metrics()[-LAST:]
    return {
        "accuracy": statistics.mean(line.validation.accuracy for line in lines),
        "silent": statistics.mean(line.activity.activity_sparsity for line in lines),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--folds", nargs="+", type=int, default=[0, 2, 4, 6])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--workers", type=int, default=1, help="trainings side by side")
    parser.add_argument("--out", type=pathlib.Path, help="write the numbers here as JSON")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    changes: dict[str, Any] = {"device": options.device}
    if options.device.startswith("cuda"):
        changes["precision"] = "bfloat16"
    if options.epochs:
        changes["epochs"] = options.epochs
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in options.variants}
    print(f"{'':26s} {'accuracy':>8s} {'silent':>8s}   by fold {options.folds}")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
        jobs = {pool.submit(one, v, fold, changes): (v, fold) for v in options.variants for fold in options.folds}
        for job in concurrent.futures.as_completed(jobs):
            variant, fold = jobs[job]
            found[variant][fold] = job.result()
            if len(found[variant]) == len(options.folds):
                folds = [found[variant][fold] for fold in options.folds]
                accuracy, silent = (100 * statistics.mean(f[key] for f in folds) for key in ("accuracy", "silent"))
                each = " ".join(f"{100 * f['accuracy']:.1f}" for f in folds)
                print(f"{variant:26s} {accuracy:7.1f}% {silent:7.1f}%   {each}", flush=True)
    if options.out:
        record = {
            "command": "python benchmarks/dvs_folds.py " + " ".join(given),
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
            "found": found,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
