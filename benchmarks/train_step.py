"""Measure the overhead of the trainer: its step against the bare model, and on a GPU against the time of its kernels.

    python benchmarks/train_step.py                             # Penn Treebank, EGRU 1350, on the CPU
    python benchmarks/train_step.py --hidden 256 --batch 16     # a smaller model
    python benchmarks/train_step.py --device cuda               # with a profile: kernels, busy fraction, waits

``egru.training.train`` runs with a task that supplies the same batches in every turn. Between turns, a copy of the
model processes the same batches with a minimal loop: forward, loss, backward and optimiser, without clipping, schedule
or records. Both start a turn from the same weights and random state, so the same events occur, and the first losses
must agree. Medians over turns are reported. The data are those of the recipe, from EGRU_DATA. The exit status is 1 if
the trainer takes more than ``LIMIT`` times as long.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import datetime
import itertools
import json
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from egru import experiments
from egru.data import Text
from egru.experiments import LanguageConfig
from egru.models import detach_state
from egru.training import LanguageTask, NoProgress, make_optimiser, progress_bar, train
from egru.training.tasks import Batch, autocast

LIMIT = 1.15
"""Maximum ratio of the trainer's time to that of the bare model (CPU) or of the kernels (GPU)."""
CATEGORIES = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Categories of events in a trace of the torch profiler that count as work of the device."""


class StopTraining(Exception):
    """Raised by the task to end the training."""


class NullRun:
    """A run that stores nothing."""

    def remove_temporary_files(self) -> None: ...
    def require_no_metrics(self) -> None: ...
    def save(self, *_: Any) -> None: ...
    def saved_epochs(self) -> list[int]:
        return []

    def metrics(self) -> list[Any]:
        return []


class BareModel:
    """A copy of the model with its loss and optimiser."""

    def __init__(self, model: nn.Module, config: LanguageConfig) -> None:
        self.model: Any = copy.deepcopy(model).train()
        self.optimiser = make_optimiser(self.model, config)
        self.autocast, self.state = autocast(config), None

    def step(self, batch: Batch) -> torch.Tensor:
        with self.autocast:
            _, dropped, state = self.model.features(batch.x, self.state)
            loss = F.cross_entropy(self.model.decode(dropped).flatten(0, 1), batch.y.flatten())
        self.state = detach_state(state)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    @torch.no_grad()
    def copy_weights(self, model: nn.Module) -> None:
        for target, source in zip(self.model.parameters(), model.parameters(), strict=True):
            target.copy_(source)


class TimedTask:
    """A task that supplies the same batches in every turn and measures the time until the trainer asks for more."""

    def __init__(self, task: LanguageTask, model: nn.Module, config: LanguageConfig, steps: int, turns: int) -> None:
        self.task, self.model, self.turns = task, model, turns
        self.device = torch.device(config.device)
        self.bare = BareModel(model, config)
        self.evaluate, self.merit = task.evaluate, task.merit
        start = time.perf_counter()
        self.group = list(itertools.islice(task.batches(), steps))
        self.data_seconds = (time.perf_counter() - start) / len(self.group)
        self.times: dict[str, list[float]] = {"bare": [], "trainer": [], "host": []}
        self.losses: dict[str, list[torch.Tensor]] = {"bare": [], "trainer": []}
        self.trace: list[dict[str, Any]] = []

    def synchronise(self) -> float:
        """Wait for the device and return the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def loss(self, model: nn.Module, batch: Batch, state: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        result = self.task.loss(model, batch, state)
        if len(self.losses["trainer"]) < len(self.group):
            self.losses["trainer"].append(result[0].detach())
        return result

    def batches(self) -> Iterator[Batch]:
        for turn in range(self.turns + 1):
            bare = self.run_bare_turn(keep_losses=turn == 0)
            start = self.synchronise()
            yield from self.group
            host = time.perf_counter() - start
            trainer = self.synchronise() - start
            if turn:  # the first turn warms up
                for name, seconds in (("bare", bare), ("trainer", trainer), ("host", host)):
                    self.times[name].append(seconds / len(self.group))
        yield from self.profile(self.group[:1])  # warms up the profiler
        yield from self.profile(self.group)
        raise StopTraining

    def run_bare_turn(self, keep_losses: bool) -> float:
        self.bare.copy_weights(self.model)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            start = self.synchronise()
            losses = [self.bare.step(batch) for batch in self.group]
            seconds = self.synchronise() - start
        if keep_losses:
            self.losses["bare"] = losses
        return seconds

    def profile(self, group: list[Batch]) -> Iterator[Batch]:
        activity = torch.profiler.ProfilerActivity
        self.synchronise()
        activities = [activity.CUDA if self.device.type == "cuda" else activity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            yield from group
            self.synchronise()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            self.trace = json.loads(path.read_text(errors="replace"))["traceEvents"]


# ---- reading a trace -------------------------------------------------------------------------------------------------


def summarise_trace(trace: list[dict[str, Any]], device: str, steps: int) -> dict[str, Any]:
    """Return milliseconds per step of the device's work and of the host's waits, by kernel, and the longest gaps."""
    complete = [event for event in trace if event.get("ph") == "X"]
    work = sorted((e for e in complete if e.get("cat") in CATEGORIES[device]), key=lambda e: e["ts"])
    if not work:
        categories = sorted({str(e.get("cat")) for e in complete})
        raise RuntimeError(f"the trace contains no work of {device}, got the categories {categories}")
    busy, end, gaps = 0.0, work[0]["ts"], []
    before = ""
    for event in work:
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > end:
            gaps.append((start - end, before, event["name"]))
        busy += max(0.0, stop - max(start, end))
        if stop >= end:
            end, before = stop, event["name"]
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for event in work:
        kernels[event["name"]].append(event["dur"])
    waits = [e for e in complete if e.get("cat") == "cuda_runtime" and "Synchronize" in e["name"]]
    scale = 1e3 * steps
    return {
        "sum_ms": sum(e["dur"] for e in work) / scale,
        "busy_ms": busy / scale,
        "span_ms": (end - work[0]["ts"]) / scale,
        "launches": len(work) / steps,
        "host_waits": {"calls": len(waits) / steps, "ms": sum(e["dur"] for e in waits) / scale},
        "kernels": [
            {"name": name, "calls": len(times) / steps, "ms": sum(times) / scale}
            for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))
        ],
        "gaps": [{"us": gap, "after": a, "before": b} for gap, a, b in sorted(gaps, reverse=True)[:5]],
    }


def profile_text(record: dict[str, Any], top: int = 15) -> str:
    """Format the profile of a record, with the ``top`` most expensive kernels."""
    profile, trainer = record["profile"], record["milliseconds"]["trainer"]
    lines = [
        f"trainer {trainer:.3f} ms per step, kernels {profile['busy_ms']:.3f} ms "
        f"(union; sum {profile['sum_ms']:.3f} ms): {trainer / profile['busy_ms']:.3f} x, "
        f"device busy {100 * profile['busy_ms'] / trainer:.1f} %",
        f"with the profiler {profile['span_ms']:.3f} ms per step, {profile['launches']:.0f} launches; the host waits "
        f"{profile['host_waits']['calls']:.2f} times per step, {profile['host_waits']['ms']:.3f} ms",
        "",
        f"{'ms/step':>10} {'share':>6} {'calls':>7}  kernel",
    ]
    for row in profile["kernels"][:top]:
        name = row["name"] if len(row["name"]) <= 110 else row["name"][:107] + "..."
        lines.append(f"{row['ms']:10.4f} {100 * row['ms'] / profile['sum_ms']:5.1f}% {row['calls']:7.1f}  {name}")
    rest = profile["kernels"][top:]
    lines.append(f"{sum(r['ms'] for r in rest):10.4f} {'':6} {sum(r['calls'] for r in rest):7.1f}  {len(rest)} others")
    lines += ["", "longest gaps:"]
    lines += [f"{g['us']:10.1f} us  {g['after'][:50]} -> {g['before'][:50]}" for g in profile["gaps"]]
    return "\n".join(lines) + "\n"


# ---- running ---------------------------------------------------------------------------------------------------------


def measure(config: LanguageConfig, text: Text, steps: int, turns: int) -> dict[str, Any]:
    """Return times, ratio and profile of ``turns`` turns of ``steps`` steps."""
    model, task = experiments.build(config, text)
    assert isinstance(task, LanguageTask)
    timed = TimedTask(task, model, config, steps, turns)
    with contextlib.suppress(StopTraining), optional_progress_bar(config.epochs) as progress:
        train(model, timed, config, NullRun(), progress)  # pyright: ignore[reportArgumentType]
    trainer, bare = timed.losses["trainer"][0], timed.losses["bare"][0]
    if not torch.isclose(trainer, bare, rtol=1e-6 if config.device == "cpu" else 1e-3):
        raise RuntimeError(
            f"the first losses must agree, got {trainer.item()} (trainer) and {bare.item()} (bare model)"
        )
    times = {name: 1e3 * statistics.median(values) for name, values in timed.times.items()}
    times["data"] = 1e3 * timed.data_seconds
    times["trainer"] += times["data"]  # gathered in advance here, but a trainer waits for them
    profile = summarise_trace(timed.trace, timed.device.type, len(timed.group))
    return {
        "lengths": [len(batch.x) for batch in timed.group],
        "milliseconds": times,
        "all_milliseconds": {name: [1e3 * t for t in values] for name, values in timed.times.items()},
        "ratio": times["trainer"] / times["bare"],
        "ratio_to_kernels": times["trainer"] / profile["busy_ms"],
        "data_share": times["data"] / times["trainer"],
        "profile": profile,
    }


@contextlib.contextmanager
def optional_progress_bar(epochs: int) -> Iterator[Any]:
    """Show the progress bar of a normal training if rich is installed."""
    with contextlib.ExitStack() as stack:
        try:
            progress = stack.enter_context(progress_bar("train_step", epochs))
        except ImportError:
            progress = NoProgress()
        yield progress


def machine(device: str) -> dict[str, Any]:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else model,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="ptb", help="a language recipe of `egru list`; default: %(default)s")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: %(default)s")
    parser.add_argument(
        "--precision", help="precision of products; default: bfloat16 on cuda, otherwise that of the recipe"
    )
    for name in ("hidden", "embedding", "batch", "bptt"):
        parser.add_argument(f"--{name}", type=int, help="replaces the value of the recipe")
    parser.add_argument("--graph", action="store_true", help="let the trainer use CUDA graphs")
    parser.add_argument(
        "--steps", type=int, help="steps per turn; default: 1, on cuda 60, which includes one read of the losses"
    )
    parser.add_argument("--turns", type=int, default=5, help="number of timed turns; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="number of torch threads; default: %(default)s")
    parser.add_argument("--out", type=pathlib.Path, help="write the record to this JSON file")
    parser.add_argument("--profile", type=pathlib.Path, help="write the profile to this text file")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu because torch finds no CUDA device, got cuda")
    torch.set_num_threads(options.threads)
    config = experiments.find(options.recipe).make()
    if not isinstance(config, LanguageConfig):
        parser.error(f"--recipe must be a language recipe, got {options.recipe}")
    changes = {name: getattr(options, name) for name in ("hidden", "embedding", "batch", "bptt", "precision")}
    if options.device == "cuda" and options.precision is None:
        changes["precision"] = "bfloat16"
    changes = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(config, device=options.device, graph=options.graph, **changes)
    text = experiments.load_data(config)
    assert isinstance(text, Text)
    steps = options.steps or (60 if options.device == "cuda" else 1)
    measured = measure(config, text, steps, options.turns)
    sizes = {name: getattr(config, name) for name in ("cell", "hidden", "embedding", "layers", "batch", "precision")}
    record = {"command": " ".join(["python benchmarks/train_step.py", *arguments]), **machine(options.device), **sizes}
    profiled = options.device == "cuda" or options.profile is not None
    record |= {
        name: value for name, value in measured.items() if profiled or name not in ("profile", "ratio_to_kernels")
    }
    ms = measured["milliseconds"]
    model = (
        f"{config.cell} {config.hidden}, {config.layers} layers, batch {config.batch}, {measured['lengths'][0]} steps"
    )
    baseline = "the kernels" if options.device == "cuda" else "the bare model"
    ratio = measured["ratio_to_kernels" if options.device == "cuda" else "ratio"]
    print(
        f"{options.recipe} ({model}): trainer {ms['trainer']:.2f} ms per step, bare model {ms['bare']:.2f} ms", end=""
    )
    print(
        f": {measured['ratio']:.3f} x; host {ms['host']:.2f} ms; waiting for data {100 * measured['data_share']:.2f} %"
    )
    if profiled:
        print(profile_text(record), end="")
    print(f"at most {LIMIT} x {baseline}: {'yes' if ratio <= LIMIT else 'NO'}, {ratio:.3f} x")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if options.profile:
        options.profile.write_text(
            f"{record['command']}\n{json.dumps(machine(options.device))}\n{profile_text(record)}"
        )
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
