"""Small and medium layers on a GPU: EGRU against cuDNN's GRU.

    egru bench gpu small                     # 59 shapes, three precisions, training and inference
    egru bench gpu small --steps 1 16 --precisions bfloat16 --seconds 30

The shapes, the layers and the number of inputs are those of `egru bench cpu small`. Precisions:

    float32    the settings that torch starts with: nn.GRU uses TF32, because cuDNN may, and EGRU does not
    ieee       TF32 disabled in both layers
    tf32       TF32 allowed in both layers
    bfloat16   autocast to bfloat16, with float32 parameters

Training is the forward and backward pass, with the gradients of all parameters but not of the input. Eight of the
shapes are measured under torch.compile as well.

The two layers take turns in one process, in an order that alternates. A turn is several calls without waiting for the
device, about 4 ms in all, and then a synchronisation. A ratio is the time of nn.GRU divided by that of EGRU, as median
over turns: above 1, EGRU is faster. The host time of a call is recorded too: a call that takes no longer than its host
time is limited by Python and kernel launches, not by the device.

All shapes are measured once. Further turns follow until ``--seconds`` are over. The file is replaced as results arrive.
Before timing, outputs and gradients of EGRU are compared with a float64 reference; a precision that differs is not
timed, and the exit code is 1. The exit code is also 1 if a layer fails under torch.compile.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egru.bench import gpu_check, make_parser, results_file
from egru.bench.small_cpu import add_shapes, describe_summary, make_layer, shapes, summarise
from egru.cli.arguments import positive_float
from egru.files import replace_file

Shape = tuple[int, int, int]
"""Steps, batch size and units."""

PRECISIONS = ("float32", "tf32", "bfloat16", "ieee")
MODES = ("training", "inference")
COMPILED: tuple[Shape, ...] = (
    (16, 32, 128),
    (1, 1, 64),
    (100, 8, 256),
    (1, 32, 128),
    (16, 1, 128),
    (100, 32, 128),
    (1, 128, 512),
    (16, 128, 512),
)
"""Shapes that are also measured under torch.compile, the most common ones first: time can run out."""
TURN = 4e-3
"""Seconds per turn that the number of calls is chosen for."""
MOST_CALLS = 20
COMPILED_SHARE = 0.7
"""Share of the time after which no further shape is compiled."""
KERNEL_SHARE = 0.3
"""Share of the time after which kernels are no longer compiled in advance."""


class Clock:
    """Wall clock and synchronisation of a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def set_precision(precision: str) -> None:
    """Set the flags of torch for float32 products."""
    torch.backends.cudnn.allow_tf32 = precision in ("float32", "tf32")  # True is the default of torch
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def checked_precision(precision: str) -> str:
    """Return the precision by the name that :mod:`egru.bench.gpu_check` uses."""
    return "float32" if precision == "ieee" else precision


def make_round(layer: nn.Module, shape: Shape, precision: str, mode: str, device: str) -> Callable[[], None]:
    """Return a function that runs ``layer`` once, on an input that is the same for all layers."""
    T, B, H = shape
    torch.manual_seed(1)
    x = torch.randn(T, B, make_layer(H).input_size, device=device)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)  # under autocast to bfloat16, cuDNN returns float16
    gradients = {dtype: torch.randn(T, B, H, device=device, dtype=dtype) for dtype in dtypes}
    autocast = gpu_check.autocast(device, checked_precision(precision))

    def train() -> None:
        layer.zero_grad(set_to_none=True)
        with autocast:
            y = layer(x)[0]
        y.backward(gradients[y.dtype])

    def infer() -> None:
        with torch.no_grad(), autocast:
            layer(x)

    return train if mode == "training" else infer


@dataclasses.dataclass
class Pair:
    """One round of nn.GRU and of EGRU on one shape, and their times so far in seconds."""

    shape: Shape
    precision: str
    mode: str
    rounds: dict[str, Callable[[], None]]
    calls: int = 0
    times: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"gru": [], "egru": []})
    host: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"gru": [], "egru": []})

    @classmethod
    def build(cls, shape: Shape, precision: str, mode: str, device: str, compiled: bool = False) -> "Pair":
        events = make_layer(shape[2])
        layers: dict[str, Any] = {"gru": nn.GRU(events.input_size, events.hidden_size), "egru": events}
        for name, layer in layers.items():
            layers[name] = layer.to(device).train(mode == "training")
            if compiled:
                layers[name] = torch.compile(layers[name], dynamic=False)
        rounds = {name: make_round(layer, shape, precision, mode, device) for name, layer in layers.items()}
        return cls(shape, precision, mode, rounds)

    def warm_up(self, clock: Clock) -> None:
        """Run both layers a few times and choose the number of calls per turn."""
        set_precision(self.precision)
        slowest = 0.0
        for run in self.rounds.values():
            for _ in range(3):
                run()
            clock.wait()
            start = clock.now()
            run()
            clock.wait()
            slowest = max(slowest, clock.now() - start)
        self.calls = max(1, min(MOST_CALLS, round(TURN / max(slowest, 1e-9))))

    def turn(self, clock: Clock) -> None:
        """Run one turn of both layers, in an order that alternates between turns."""
        if not self.calls:
            self.warm_up(clock)
        set_precision(self.precision)
        for name in ("gru", "egru") if len(self.times["gru"]) % 2 else ("egru", "gru"):
            run = self.rounds[name]
            clock.wait()
            start = clock.now()
            for _ in range(self.calls):
                run()
            host = clock.now()
            clock.wait()
            self.times[name].append((clock.now() - start) / self.calls)
            self.host[name].append((host - start) / self.calls)

    def result(self) -> dict[str, Any]:
        """Return medians in microseconds and the median ratio."""
        ratios = [gru / ours for gru, ours in zip(self.times["gru"], self.times["egru"], strict=True)]
        medians = {f"{name}_us": 1e6 * statistics.median(values) for name, values in self.times.items()}
        host = {f"{name}_host_us": 1e6 * statistics.median(values) for name, values in self.host.items()}
        return {**medians, **host, "ratio": statistics.median(ratios), "turns": len(ratios), "calls": self.calls}


class Record:
    """The results so far, and the file that holds them."""

    def __init__(self, out: Path, facts: dict[str, Any], clock: Clock) -> None:
        self.out, self.facts, self.clock = out, facts, clock
        self.eager: list[Pair] = []
        self.compiled: list[Pair] = []
        self.failed: dict[str, str] = {}
        self.written = clock.now()

    def content(self) -> dict[str, Any]:
        groups = {"shapes": merge(self.eager), "compiled": merge(self.compiled)}
        summary = {name: summarise_precisions(results) for name, results in groups.items()}
        return {**self.facts, "failed": self.failed, "summary": summary, **groups}

    def write(self, every: float = 0.0) -> None:
        """Replace the file, unless that was done less than ``every`` seconds ago."""
        if self.clock.now() - self.written >= every:
            replace_file(self.out, (json.dumps(self.content(), indent=1) + "\n").encode())
            self.written = self.clock.now()


def merge(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """Return one entry per shape and precision, with the results of both modes."""
    entries: dict[Any, dict[str, Any]] = {}
    for pair in pairs:
        if pair.times["gru"]:
            T, B, H = pair.shape
            entry = entries.setdefault(
                (pair.shape, pair.precision), {"T": T, "B": B, "H": H, "precision": pair.precision}
            )
            entry[pair.mode] = pair.result()
    return list(entries.values())


def summarise_precisions(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the summary of `egru bench cpu small` by precision and mode, and the shapes below 0.95."""
    summary: dict[str, dict[str, Any]] = {}
    for precision in PRECISIONS:
        selected = [result for result in results if result["precision"] == precision]
        for mode, values in summarise(selected).items():
            slower = sorted(
                (result[mode]["ratio"], describe_slower(result, mode))
                for result in selected
                if mode in result and result[mode]["ratio"] < 0.95
            )
            summary[f"{precision} {mode}"] = {**values, "slower": [text for _, text in slower]}
    return summary


def describe_slower(result: dict[str, Any], mode: str) -> str:
    """Name a shape with its ratio, and say whether the host or the device limits EGRU."""
    values = result[mode]
    limit = "host" if values["egru_host_us"] > 0.8 * values["egru_us"] else "device"
    return f"T {result['T']} B {result['B']} H {result['H']}: {values['ratio']:.2f}x, {limit}"


def check(grid: Sequence[Shape], precisions: Sequence[str], device: str) -> dict[str, str]:
    """Compare EGRU with float64 at the smallest and largest batch and layer.

    Returns:
        The precisions that differ, each with the reason.
    """
    extremes = {(B, H) for B in _extremes(s[1] for s in grid) for H in _extremes(s[2] for s in grid)}
    wrong: dict[str, str] = {}
    for precision, (B, H) in itertools.product(precisions, sorted(extremes)):
        layer = make_layer(H).to(device)
        x = torch.randn(6, B, layer.input_size, device=device)
        try:
            gpu_check.check_layer(layer, x, checked_precision(precision), gradients=True)
        except gpu_check.Wrong as error:
            wrong.setdefault(precision, f"B {B} H {H}: {error}")
    return wrong


def _extremes(values: Iterable[int]) -> set[int]:
    values = set(values)
    return {min(values), max(values)}


def compile_kernels(grid: Sequence[Shape], precisions: Sequence[str], seconds: float) -> None:
    """Compile the CUDA kernels of all shapes into the cache on disk, in several processes, for at most ``seconds``."""
    sizes = sorted({(B, H) for _, B, H in grid})
    kinds = sorted({"bfloat16" if precision == "bfloat16" else "ieee" for precision in precisions})
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=context)
    jobs = [pool.submit(run_once, B, H, precision) for precision in kinds for B, H in sizes]
    done, late = concurrent.futures.wait(jobs, timeout=seconds)
    failed = [job.exception() for job in done if job.exception()]
    print(f"kernels compiled: {len(done) - len(failed)} of {len(jobs)} layers", *failed[:1], flush=True)
    for process in list(getattr(pool, "_processes", {}).values()) if late else []:
        process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)


def run_once(B: int, H: int, precision: str) -> None:
    """Run a layer once in every mode, so that its kernels are compiled."""
    for T, mode in itertools.product((1, 16), MODES):
        Pair.build((T, B, H), precision, mode, "cuda").rounds["egru"]()
    torch.cuda.synchronize()


def measure(record: Record, grid: Sequence[Shape], precisions: Sequence[str], end: float, start: float) -> None:
    """Measure all shapes once, then those under torch.compile, then all of them again until ``end``."""
    clock, device = record.clock, record.clock.device
    for precision, shape, mode in itertools.product(precisions, grid, MODES):
        record.eager.append(Pair.build(shape, precision, mode, device))
        record.eager[-1].turn(clock)
        record.write(every=5.0)
    print_summary("eager, one turn", record.content()["summary"]["shapes"])
    compile_end = start + COMPILED_SHARE * (end - start)
    for precision, shape, mode in itertools.product(precisions, COMPILED, MODES):
        if shape in grid and clock.now() < compile_end:
            torch.compiler.reset()  # the number of compiled versions of one function is limited
            pair = Pair.build(shape, precision, mode, device, compiled=True)
            try:
                for _ in range(7):
                    pair.turn(clock)
            except Exception as error:  # of any kind: the other measurements are still worth having
                record.failed[f"{precision} {mode} {shape}"] = f"{type(error).__name__}: {error}"
                continue
            record.compiled.append(pair)
            record.write(every=5.0)
    while clock.now() < end:
        for pair in record.eager:
            pair.turn(clock)
            if clock.now() >= end:
                break
        record.write(every=5.0)
    record.write()


def print_summary(title: str, summary: dict[str, dict[str, Any]]) -> None:
    print(title)
    for name, values in summary.items():
        print(f"  {describe_summary(name, values)}")
        for text in values["slower"]:
            print(f"    {text}")
    sys.stdout.flush()


def run(options: argparse.Namespace, out: Path, clock: Clock) -> int:
    """Check, measure and write the record. Returns the exit code."""
    start = clock.now()
    grid = shapes(options.steps, options.batches, options.units)
    cuda = clock.device == "cuda"
    if cuda:
        compile_kernels(grid, options.precisions, KERNEL_SHARE * options.seconds)
    wrong = check(grid, options.precisions, clock.device)
    for precision, reason in wrong.items():
        print(f"{precision} is left out, it differs from the reference: {reason}")
    facts = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else clock.device,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "wrong": wrong,
    }
    record = Record(out, facts, clock)
    correct = [precision for precision in options.precisions if precision not in wrong]
    measure(record, grid, correct, start + options.seconds, start)
    for name, summary in record.content()["summary"].items():
        print_summary("eager" if name == "shapes" else "compiled", summary)
    for name, reason in record.failed.items():
        print(f"{name} failed under torch.compile: {reason.splitlines()[0]}")
    print(f"written: {out}")
    return int(bool(wrong or record.failed))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("gpu small", __doc__)
    add_shapes(parser)
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        default=list(PRECISIONS[:3]),
        help="precisions, see above (default: float32 tf32 bfloat16)",
    )
    parser.add_argument(
        "--seconds", type=positive_float, default=140.0, metavar="S", help="seconds in all (default: 140)"
    )
    options = parser.parse_all(arguments)
    if not torch.cuda.is_available():
        parser.error("this benchmark requires a CUDA device")
    return run(options, results_file(parser, options.out, "small_gpu"), Clock("cuda"))


if __name__ == "__main__":
    sys.exit(main())
