"""What the trainer costs: its step against the bare model, loss and optimiser, and on a GPU against its own kernels.

    python benchmarks/train_step.py                             # Penn Treebank, EGRU 1350, on the CPU
    python benchmarks/train_step.py --hidden 256 --batch 16     # in small
    python benchmarks/train_step.py --device cuda               # also a profile: kernels, busy share, waits

The trainer is ``egru.training.train`` itself, which believes to train: its batches are handed out here, and between two
turns of it the same batches go through a copy of the model, by hand: forward, loss, backward, optimiser; no clipping,
no schedule, no bookkeeping. Both start a turn from the same weights and random numbers, so that the same events happen,
and the first losses must agree. Medians over turns. The data are the recipe's, from EGRU_DATA. Exit status 1 where the
trainer takes more than ``LIMIT`` times as long.
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
KINDS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""What counts as work of the device in a trace of torch's profiler."""


class Enough(Exception):
    """Ends the training."""


class Nowhere:
    """A run that keeps nothing."""

    def remove_temporary_files(self) -> None: ...
    def require_no_metrics(self) -> None: ...
    def save(self, *_: Any) -> None: ...
    def saved_epochs(self) -> list[int]:
        return []

    def metrics(self) -> list[Any]:
        return []


class Bare:
    """The model, its loss and its optimiser, by hand."""

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
    def follow(self, model: nn.Module) -> None:
        """The same weights as ``model``."""
        for own, other in zip(self.model.parameters(), model.parameters(), strict=True):
            own.copy_(other)


class Turns:
    """The task as the trainer sees it; hands out the same batches turn after turn, and looks at the clock."""

    def __init__(self, task: LanguageTask, model: nn.Module, config: LanguageConfig, steps: int, turns: int) -> None:
        self.task, self.model, self.turns = task, model, turns
        self.device = torch.device(config.device)
        self.bare = Bare(model, config)
        self.evaluate, self.merit = task.evaluate, task.merit
        start = time.perf_counter()
        self.group = list(itertools.islice(task.batches(), steps))
        self.waited = (time.perf_counter() - start) / len(self.group)
        self.times: dict[str, list[float]] = {"bare": [], "trainer": [], "host": []}
        self.losses: dict[str, list[torch.Tensor]] = {"bare": [], "trainer": []}
        self.trace: list[dict[str, Any]] = []

    def wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def loss(self, model: nn.Module, batch: Batch, state: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        found = self.task.loss(model, batch, state)
        if len(self.losses["trainer"]) < len(self.group):
            self.losses["trainer"].append(found[0].detach())
        return found

    def batches(self) -> Iterator[Batch]:
        for turn in range(self.turns + 1):
            bare = self.bare_turn(keep=turn == 0)
            start = self.wait()
            yield from self.group
            host = time.perf_counter() - start
            trainer = self.wait() - start
            if turn:  # the first warms up
                for name, seconds in (("bare", bare), ("trainer", trainer), ("host", host)):
                    self.times[name].append(seconds / len(self.group))
        yield from self.profiled(self.group[:1])  # the profiler warms up too
        yield from self.profiled(self.group)
        raise Enough

    def bare_turn(self, keep: bool) -> float:
        self.bare.follow(self.model)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            start = self.wait()
            losses = [self.bare.step(batch) for batch in self.group]
            seconds = self.wait() - start
        if keep:
            self.losses["bare"] = losses
        return seconds

    def profiled(self, group: list[Batch]) -> Iterator[Batch]:
        kind = torch.profiler.ProfilerActivity
        self.wait()
        watched = [kind.CUDA if self.device.type == "cuda" else kind.CPU]
        with torch.profiler.profile(activities=watched, acc_events=True) as profile:
            yield from group
            self.wait()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            self.trace = json.loads(path.read_text(errors="replace"))["traceEvents"]


# ---- what a trace says -----------------------------------------------------------------------------------------------


def digest(trace: list[dict[str, Any]], device: str, steps: int) -> dict[str, Any]:
    """Milliseconds a step of the device's work, of its idle time in between, and of the host's waits; the largest."""
    complete = [event for event in trace if event.get("ph") == "X"]
    work = sorted((e for e in complete if e.get("cat") in KINDS[device]), key=lambda e: e["ts"])
    if not work:
        raise RuntimeError(f"the trace holds no work of {device}: {sorted({str(e.get('cat')) for e in complete})}")
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
    """The digest as a page."""
    found, trainer = record["profile"], record["milliseconds"]["trainer"]
    lines = [
        f"trainer {trainer:.3f} ms a step, kernels {found['busy_ms']:.3f} ms (union; sum {found['sum_ms']:.3f} ms): "
        f"{trainer / found['busy_ms']:.3f} x, device busy {100 * found['busy_ms'] / trainer:.1f} %",
        f"under the profiler {found['span_ms']:.3f} ms a step, {found['launches']:.0f} launches; the host waits "
        f"{found['host_waits']['calls']:.2f} times a step, {found['host_waits']['ms']:.3f} ms",
        "",
        f"{'ms a step':>10} {'share':>6} {'calls':>7}  kernel",
    ]
    for row in found["kernels"][:top]:
        name = row["name"] if len(row["name"]) <= 110 else row["name"][:107] + "..."
        lines.append(f"{row['ms']:10.4f} {100 * row['ms'] / found['sum_ms']:5.1f}% {row['calls']:7.1f}  {name}")
    rest = found["kernels"][top:]
    lines.append(f"{sum(r['ms'] for r in rest):10.4f} {'':6} {sum(r['calls'] for r in rest):7.1f}  {len(rest)} others")
    lines += ["", "longest gaps:"]
    lines += [f"{g['us']:10.1f} us  {g['after'][:50]} -> {g['before'][:50]}" for g in found["gaps"]]
    return "\n".join(lines) + "\n"


# ---- running ---------------------------------------------------------------------------------------------------------


def measure(config: LanguageConfig, text: Text, steps: int, turns: int) -> dict[str, Any]:
    """Times, ratio and profile of ``turns`` turns of ``steps`` steps."""
    model, task = experiments.build(config, text)
    assert isinstance(task, LanguageTask)
    watched = Turns(task, model, config, steps, turns)
    with contextlib.suppress(Enough), progress(config.epochs) as shown:
        train(model, watched, config, Nowhere(), shown)  # pyright: ignore[reportArgumentType]
    for mine, theirs in zip(*(watched.losses[name][:1] for name in ("trainer", "bare")), strict=True):
        if not torch.isclose(mine, theirs, rtol=1e-6 if config.device == "cpu" else 1e-3):
            raise RuntimeError(f"the trainer's loss is {mine.item()}, the bare model's {theirs.item()}")
    times = {name: 1e3 * statistics.median(values) for name, values in watched.times.items()}
    times["data"] = 1e3 * watched.waited
    times["trainer"] += times["data"]  # handed out ready, but the trainer's to wait for
    profile = digest(watched.trace, watched.device.type, len(watched.group))
    return {
        "lengths": [len(batch.x) for batch in watched.group],
        "milliseconds": times,
        "all_milliseconds": {name: [1e3 * t for t in values] for name, values in watched.times.items()},
        "ratio": times["trainer"] / times["bare"],
        "ratio_to_kernels": times["trainer"] / profile["busy_ms"],
        "data_share": times["data"] / times["trainer"],
        "profile": profile,
    }


@contextlib.contextmanager
def progress(epochs: int) -> Iterator[Any]:
    """The bar a person would see, where rich is installed."""
    with contextlib.ExitStack() as stack:
        try:
            shown = stack.enter_context(progress_bar("train_step", epochs))
        except ImportError:
            shown = NoProgress()
        yield shown


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
    parser.add_argument("--recipe", default="ptb", help="a language recipe of `egru list`")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", help="of products; bfloat16 on cuda unless given, the recipe's elsewhere")
    for name in ("hidden", "embedding", "batch", "bptt"):
        parser.add_argument(f"--{name}", type=int, help="instead of the recipe's")
    parser.add_argument("--graph", action="store_true", help="the trainer replays CUDA graphs")
    parser.add_argument("--steps", type=int, help="in a turn; 1, on cuda 60: a look at the losses is among them")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, help="write the numbers here as JSON")
    parser.add_argument("--profile", type=pathlib.Path, help="write the profile here as text")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
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
    found = measure(config, text, steps, options.turns)
    sizes = {name: getattr(config, name) for name in ("cell", "hidden", "embedding", "layers", "batch", "precision")}
    record = {"command": " ".join(["python benchmarks/train_step.py", *given]), **machine(options.device), **sizes}
    profiled = options.device == "cuda" or options.profile is not None
    record |= {name: value for name, value in found.items() if profiled or name not in ("profile", "ratio_to_kernels")}
    ms = found["milliseconds"]
    what = f"{config.cell} {config.hidden}, {config.layers} layers, batch {config.batch}, {found['lengths'][0]} steps"
    on = "the kernels" if options.device == "cuda" else "the bare model"
    ratio = found["ratio_to_kernels" if options.device == "cuda" else "ratio"]
    print(f"{options.recipe} ({what}): trainer {ms['trainer']:.2f} ms, bare {ms['bare']:.2f} ms a step", end="")
    print(f": {found['ratio']:.3f} x; host {ms['host']:.2f} ms; waiting for data {100 * found['data_share']:.2f} %")
    if profiled:
        print(profile_text(record), end="")
    print(f"within {LIMIT} x of {on}: {'yes' if ratio <= LIMIT else 'NO'}, {ratio:.3f} x")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if options.profile:
        options.profile.write_text(
            f"{record['command']}\n{json.dumps(machine(options.device))}\n{profile_text(record)}"
        )
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
