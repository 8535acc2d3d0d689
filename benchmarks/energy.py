"""Measured energy per epoch of recipes, side by side on this machine.

    python benchmarks/energy.py ptb-evnn ptb-evnn-gru --device cuda --precision bfloat16 --graph --epochs 6
    python benchmarks/energy.py digits digits-gru --epochs 3

Each recipe is trained in a temporary folder, one after the other. The first epochs (``--warmup``) compile kernels and
record graphs and are left out. An epoch is training and validation. Joules are read from the counters of the machine
(``egru.energy``): NVML for the GPU, Linux powercap for CPU packages and memory. They include idle power, which is
measured first, with nothing running. Without counters the record says why and has no joules.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from egru import format, runs
from egru.cli.arguments import positive_int
from egru.energy import EnergyMeter
from egru.environment import Environment, cpu_name
from egru.experiments import find, smoke
from egru.training import Run
from egru.training.progress import PrintedProgress

IDLE_SECONDS = 5.0


def idle_watts(device: str, seconds: float = IDLE_SECONDS) -> dict[str, float]:
    """Return the power of each counter while nothing runs, in watts."""
    if device.startswith("cuda"):
        torch.zeros(1, device=device)  # creates the context, which raises the clock
        torch.cuda.synchronize()
    with EnergyMeter(device) as meter:
        if not meter.sources:
            return {}
        start, before = time.perf_counter(), meter.read()
        time.sleep(seconds)
        joules, passed = meter.since(before), time.perf_counter() - start
    return {name: value / passed for name, value in joules.items()}


def configure(recipe: str, options: argparse.Namespace) -> Any:
    """Return the config of a recipe with the settings of the command line."""
    config = find(recipe).make()
    if options.smoke:
        config = smoke(config)
    epochs = options.warmup + options.epochs
    changes: dict[str, Any] = {"epochs": epochs, "save_every": epochs, "diagnose": False}
    changes |= {"device": options.device, "precision": options.precision, "graph": options.graph}
    if hasattr(config, "test_batch"):
        changes["test_batch"] = config.evaluation_batch  # the test split is not measured: read it quickly
    return dataclasses.replace(config, **changes)


def measure(recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one recipe and return joules and seconds of the epochs after the warm-up."""
    config = configure(recipe, options)
    with tempfile.TemporaryDirectory() as folder:
        runs.train(recipe, config, Path(folder) / "run", progress=PrintedProgress(), page=False)
        run = Run.open(Path(folder) / "run")
        energy, metrics = run.energy(), run.metrics()
    assert energy is not None
    seconds = [line.seconds for line in metrics if line.epoch > options.warmup]
    joules = {
        name: [entry.joules[name] for entry in energy.epochs if entry.epoch > options.warmup and name in entry.joules]
        for name in energy.counters
    }
    return {
        "counters": energy.counters,
        "missing": list(energy.missing),
        "joules_by_epoch": joules,
        "seconds_by_epoch": seconds,
        "joules_per_epoch": {name: statistics.mean(values) for name, values in joules.items() if values},
        "seconds_per_epoch": statistics.mean(seconds),
        "activity_sparsity": metrics[-1].activity.activity_sparsity,
        "config": config_facts(config),
    }


def config_facts(config: Any) -> dict[str, Any]:
    names = ("data", "cell", "hidden", "layers", "batch", "precision", "graph", "device", "seed")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def show(record: dict[str, Any]) -> None:
    """Print joules and seconds per epoch, and the ratios of the first recipe to each other one."""
    results = record["recipes"]
    for recipe, result in results.items():
        joules = ", ".join(f"{name} {format.joules(value)}" for name, value in result["joules_per_epoch"].items())
        text = joules or f"energy not measured: {'; '.join(result['missing'])}"
        print(f"{recipe}: {format.seconds(result['seconds_per_epoch'])} per epoch, {text}")
    first, *others = results
    for other in others:
        for name, value in results[first]["joules_per_epoch"].items():
            if name in results[other]["joules_per_epoch"]:
                ratio = results[other]["joules_per_epoch"][name] / value
                print(f"{name}: {other} uses {ratio:.2f} times the energy of {first}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="recipes to train, see `egru list`")
    parser.add_argument("--device", default="cpu", help="device to train on (default: cpu)")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--graph", action="store_true", help="replay training steps as CUDA graphs")
    parser.add_argument("--warmup", type=positive_int, default=2, help="epochs that are left out (default: 2)")
    parser.add_argument("--epochs", type=positive_int, default=3, help="epochs that are measured (default: 3)")
    parser.add_argument("--smoke", action="store_true", help="small networks and little data")
    parser.add_argument("--out", type=Path, default=Path("energy.json"), help="JSON file to write")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "environment": Environment.current().to_dict(),
        "warmup": options.warmup,
        "idle_watts": idle_watts(options.device),
        "recipes": {},
    }
    for recipe in dict.fromkeys(options.recipes):
        record["recipes"][recipe] = measure(recipe, options)
        options.out.write_text(json.dumps(record, indent=1) + "\n")  # after every recipe, in case the run is cut short
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    show(record)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
