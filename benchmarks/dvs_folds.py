"""Ablate the `dvs` recipe by cross-validation over sessions of the training recordings, one change at a time.

    python benchmarks/dvs_folds.py --device cuda --workers 8 --out result.json
    python benchmarks/dvs_folds.py --variants recipe --epochs 2 --folds 0      # a quick check on a CPU

A fold holds out 14 of the 98 training sessions, which are mostly other subjects. The test recordings are not used. Each
variant is trained for the number of epochs in the recipe. Its accuracy is the mean over the last five epochs and all
folds, so no epoch is selected by it. The data are those of the recipe, from EGRU_DATA.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import pathlib
import shlex
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

LAST_EPOCHS = 5
"""Number of epochs that the accuracy is averaged over."""
FIRST_ROUND: dict[str, Any] = {"epochs": 30, "time_crop": 1.0, "roll": False}
"""Settings of the recipes after the first round of trials, for both networks."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "recipe": ("dvs", {}),
    "settings of the first round": ("dvs", {**FIRST_ROUND, "rate_loss": 0.5}),
    "30 epochs": ("dvs", {"epochs": 30}),
    "not moved in time": ("dvs", {"time_crop": 1.0, "roll": False}),
    "not translated": ("dvs", {"shift": 0.0}),
    "translated by 2 pixels": ("dvs", {"shift": 2.5}),
    "augmented": ("dvs", {"augment": True}),
    "not smoothed": ("dvs", {"smooth": False}),
    "not centred": ("dvs", {"centre": False}),
    "neither": ("dvs", {"smooth": False, "centre": False}),
    "not pooled": ("dvs", {"pool": 1}),
    "squares of 4 pixels": ("dvs", {"pool": 4}),
    "learning rate 0.001, weight decay 0.5": ("dvs", {"learning_rate": 1e-3, "weight_decay": 0.5}),
    "more dropout": ("dvs", {"input_dropout": 0.3, "dropout": 0.3, "output_dropout": 0.3, "dropconnect": 0.3}),
    "readout of the trace": ("dvs", {"readout": "trace"}),
    "no batch normalisation": ("dvs", {"normalise": False}),
    "the paper's reset": ("dvs", {"reset": "output"}),
    "thresholds start at 0.5": ("dvs", {"threshold": Threshold(mean=0.0)}),
    "rate loss 0.03": ("dvs", {"rate_loss": 0.03}),
    "no activity loss": ("dvs", {"rate_loss": 0.0}),
    "one layer": ("dvs", {"layers": 1, "dropout": 0.0}),
    "384 units": ("dvs", {"hidden": 384}),
    "GRU": ("dvs-gru", {}),
    "GRU, settings of the first round": ("dvs-gru", FIRST_ROUND),
    "GRU, 30 epochs": ("dvs-gru", {"epochs": 30}),
    "GRU, not moved in time": ("dvs-gru", {"time_crop": 1.0, "roll": False}),
    "GRU, not translated": ("dvs-gru", {"shift": 0.0}),
    "GRU, more dropout": ("dvs-gru", {"input_dropout": 0.3, "dropout": 0.3}),
    "GRU, neither": ("dvs-gru", {"smooth": False, "centre": False}),
}


def select_fold(data: Classification, fold: int) -> Classification:
    """Split training and validation recordings such that one fold is both the validation and the test split."""
    x, y = (torch.cat(parts) for parts in zip(data.train, data.validation, strict=True))
    in_fold = sessions(y) // VALIDATION_SESSIONS == fold
    if not in_fold.any():
        raise ValueError(f"fold must be 0 to {int(sessions(y)[-1]) // VALIDATION_SESSIONS}, got {fold}")
    validation = Split(x[in_fold], y[in_fold])
    return dataclasses.replace(data, train=Split(x[~in_fold], y[~in_fold]), validation=validation, test=validation)


def train_variant(variant: str, fold: int, changes: dict[str, Any], threads: int = 2) -> dict[str, float]:
    """Train a variant without one fold, and return its mean accuracy and activity sparsity on that fold."""
    torch.set_num_threads(threads)
    name, variant_changes = VARIANTS[variant]
    settings = {**variant_changes, **changes, "save_every": 1_000_000}
    config = dataclasses.replace(experiments.find(name).make(), **settings)
    assert isinstance(config, ClassifierConfig)
    whole = experiments.load_data(config)
    assert isinstance(whole, Classification)
    data = select_fold(whole, fold)
    model, task = experiments.build(config, data)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(pathlib.Path(folder) / "run", {}, lambda _: None)
        train(model, task, config, run, NoProgress())
        lines = run.metrics()[-LAST_EPOCHS:]
    return {
        "accuracy": statistics.mean(line.validation.accuracy for line in lines),
        "activity_sparsity": statistics.mean(line.activity.activity_sparsity for line in lines),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(VARIANTS)
    parser.add_argument("--variants", nargs="+", default=names, choices=names, help="variants to train; default: all")
    parser.add_argument(
        "--folds", nargs="+", type=int, default=[0, 2, 4, 6], help="folds to hold out; default: 0 2 4 6"
    )
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, help="replaces the number of epochs of the recipe")
    parser.add_argument("--workers", type=int, default=1, help="number of parallel trainings; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads per training; default: %(default)s")
    parser.add_argument("--out", type=pathlib.Path, help="write the record to this JSON file")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    changes: dict[str, Any] = {"device": options.device}
    if options.device.startswith("cuda"):
        changes["precision"] = "bfloat16"
    if options.epochs:
        changes["epochs"] = options.epochs
    results: dict[str, dict[int, dict[str, float]]] = {name: {} for name in options.variants}
    print(f"{'':26s} {'accuracy':>8s} {'sparsity':>8s}   accuracy by fold {options.folds}")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
        jobs = {
            pool.submit(train_variant, variant, fold, changes, options.threads): (variant, fold)
            for variant in options.variants
            for fold in options.folds
        }
        for job in concurrent.futures.as_completed(jobs):
            variant, fold = jobs[job]
            results[variant][fold] = job.result()
            if options.out:
                record = {
                    "command": "python benchmarks/dvs_folds.py " + shlex.join(arguments),
                    "date": datetime.date.today().isoformat(),
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
                    "results": results,
                }
                options.out.write_text(json.dumps(record, indent=1) + "\n")
            if len(results[variant]) == len(options.folds):
                folds = [results[variant][fold] for fold in options.folds]
                accuracy = 100 * statistics.mean(fold["accuracy"] for fold in folds)
                sparsity = 100 * statistics.mean(fold["activity_sparsity"] for fold in folds)
                by_fold = " ".join(f"{100 * fold['accuracy']:.1f}" for fold in folds)
                print(f"{variant:26s} {accuracy:7.1f}% {sparsity:7.1f}%   {by_fold}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
