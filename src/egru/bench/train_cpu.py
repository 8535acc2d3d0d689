"""Time of a training step (forward and backward pass) on the CPU: EGRU against nn.GRU and, if installed, EvNN.

    egru bench cpu train                                 # all sizes and activities, about two minutes
    egru bench cpu train --hidden 590 --batch 16 --gate after --activity 0.2 --open 0.5
    egru bench cpu train --memory                        # peak memory of a training step, including lean mode

Layers have 590 units (200 steps of 1 input) or 1350 units (35 steps of 1350 inputs), as in the paper's networks.
Two cases are measured by default: 20 % of the units active and 50 % open, and all units active and open. A unit is
active if it emits an event, and open if it is active or its state is inside the surrogate's window. The backward pass
can skip units that are not open. The first case is also measured with the gradient of the input, which both layers
then compute densely, for batches of 64 and the reset gate before the product.

To reach these values, one threshold for all units and the width of the surrogate are adjusted before timing. The 1350
inputs are random events with the same activity. Before timing, the kernel is compared with the reference in float64;
if they differ, nothing is timed. EvNN is the code of the paper's authors.
"""

import argparse
import copy
import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import egru
from egru import compiled
from egru.bench import make_parser, results_file
from egru.bench.evnn import find_evnn
from egru.cli.arguments import fraction, positive_float, positive_int
from egru.environment import cpu_name
from egru.kernels import Problem, get, info, run_sequence
from egru.types import ResetGate

SIZES = {590: (200, 1), 1350: (35, 1350)}
"""Steps and inputs by number of units: sequential MNIST and Penn Treebank in the paper."""
BATCHES = (16, 64, 128)
GATES: tuple[ResetGate, ...] = ("after", "before")
SPARSITIES = ((0.2, 0.5), (1.0, 1.0))
"""Activity and share of open units: as in the paper, and fully dense."""
WITH_INPUT_GRADIENT: tuple[int, ResetGate] = (64, "before")
"""Batch size and reset gate of the rows that are also measured with the gradient of the input by default."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table."""

    hidden: int
    steps: int
    inputs: int
    batch: int
    gate: ResetGate
    activity: float
    open: float
    input_gradient: bool = False


# ---- layers with a given activity ------------------------------------------------------------------------------------


def make_input(setting: Setting) -> Tensor:
    x = torch.randn(setting.steps, setting.batch, setting.inputs)
    return x if setting.inputs == 1 else x * (torch.rand(x.shape) < setting.activity)


def make_layer(
    setting: Setting, x: Tensor, change: Callable[[egru.EGRU], None] | None = None
) -> tuple[egru.EGRU, dict[str, float]]:
    """Return an event layer with the setting's activity and share of open units on ``x``, and the values reached.

    ``change`` may change the weights first.
    """
    layer = egru.EGRU(setting.inputs, setting.hidden, reset_gate=setting.gate, threshold=egru.Threshold("identity"))
    if change is not None:
        change(layer)
    states: list[Tensor] = []
    layer.observe(lambda record: states.append(record.c))
    threshold = layer.get_parameter("threshold_l0")

    def states_at(theta: float) -> Tensor:
        states.clear()
        with torch.no_grad():
            threshold.fill_(theta)
            layer(x)
        return states[0]

    if setting.activity >= 1:
        theta, width = -100.0, 1e6  # below every state, and a window that contains them all
        c = states_at(theta)
    else:
        low, high, theta = -1.0, 1.0, 0.0
        for _ in range(14):
            theta = (low + high) / 2
            low, high = (theta, high) if (states_at(theta) > theta).float().mean() > setting.activity else (low, theta)
        c = states_at(theta)
        distances = (theta - c)[c <= theta]  # of the inactive units
        # Inactive units are open if they are close enough. Active and open units together are `setting.open` of all.
        share = (setting.open - (c > theta).float().mean().item()) / (distances.numel() / c.numel())
        k = min(distances.numel(), max(1, round(share * distances.numel())))
        width = distances.kthvalue(k).values.item()
    calibrated = egru.EGRU(
        setting.inputs,
        setting.hidden,
        reset_gate=setting.gate,
        threshold=egru.Threshold("identity"),
        surrogate=egru.Surrogate(width=width),
    )
    calibrated.load_state_dict(layer.state_dict())
    active = c > theta
    reached = {
        "activity": active.float().mean().item(),
        "open": (active | ((c - theta).abs() < width)).float().mean().item(),
        "theta": theta,
        "width": width,
    }
    return calibrated, reached


def problem_of(layer: egru.EGRU, x: Tensor, lean: bool = False) -> Problem:
    """Return the sequence operation that ``layer(x)`` runs."""
    c, y = layer.zero_state(x.shape[1])
    return Problem(
        input=x,
        c0=c[0],
        y0=y[0],
        weight_ih=layer.get_parameter("weight_ih_l0"),
        weight_hh=layer.get_parameter("weight_hh_l0"),
        bias_ih=layer.get_parameter("bias_ih_l0"),
        bias_hh=layer.get_parameter("bias_hh_l0"),
        theta=layer.thresholds()["l0"],
        reset_scale=layer.reset_scale,
        keep=None,
        lengths=None,
        reset=layer.reset,
        reset_gate=layer.reset_gate,
        surrogate=layer.surrogate,
        precision="",
        lean=lean,
    )


# ---- correctness first -----------------------------------------------------------------------------------------------


def check(layer: egru.EGRU, x: Tensor) -> float:
    """Return the largest relative difference of an output or gradient to the reference, on the first steps.

    Both run in float64, where events do not differ by rounding.
    """
    x = x[:4, :17].double()
    with torch.no_grad():
        problem = problem_of(copy.deepcopy(layer).double(), x)
    results = []
    for name in ("reference", "cpu"):
        forward = get(name).forward(problem, True)
        y, c, c_last, y_last = (torch.ones_like(output) for output in forward[:4])
        backward = get(name).backward(problem, forward.y, forward.c, forward.reserve, y, c, c_last, y_last, True)
        results.append([*forward[:4], *backward])
    return max(((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in zip(*results, strict=True))


# ---- time ------------------------------------------------------------------------------------------------------------


def training_step(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        layer(x)[0].backward(grad)

    return step


def interleave(contestants: dict[str, Callable[[], None]], repeats: int, seconds: float) -> dict[str, list[float]]:
    """Time the contestants in turns, after one round of warm-up. Stop after ``seconds``."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    for i in range(repeats + 1):
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            if i:
                times[name].append(time.perf_counter() - start)
        if i >= 3 and time.perf_counter() > end:
            break
    return times


def measure(setting: Setting, repeats: int = 15, seconds: float = 10.0) -> dict[str, Any]:
    """Measure one row of the table: medians in milliseconds, and the ratio nn.GRU / EGRU."""
    torch.manual_seed(0)
    x = make_input(setting)
    layer, reached = make_layer(setting, x)
    difference = check(layer, x)
    if not difference < 1e-12:
        raise SystemExit(f"the kernel differs from the reference by {difference:.2g} at {setting}: nothing was timed")
    x.requires_grad_(setting.input_gradient)
    gru = nn.GRU(setting.inputs, setting.hidden)
    grad = torch.randn(setting.steps, setting.batch, setting.hidden)
    contestants = {"gru": training_step(gru, x, grad), "egru": training_step(layer, x, grad)}
    make_evnn = find_evnn(cuda=False)
    if not isinstance(make_evnn, str):
        contestants["evnn"] = training_step(make_evnn(setting.inputs, setting.hidden), x, grad)
    times = interleave(contestants, repeats, seconds)
    median = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return {
        **dataclasses.asdict(setting),
        "reached": reached,
        "difference": difference,
        "milliseconds": median,
        "repeats": len(times["gru"]),
        "ratio": median["gru"] / median["egru"],
        "best_ratio": min(times["gru"]) / min(times["egru"]),
    }


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_memory(contestant: str, setting: Setting) -> float:
    """Return the megabytes that one training step adds at its peak, including gradients and outputs."""
    torch.manual_seed(0)
    x = make_input(setting)
    layer, _ = make_layer(setting, x)
    gru = nn.GRU(setting.inputs, setting.hidden)
    grad = torch.randn(setting.steps, setting.batch, setting.hidden)
    parameters = list((gru if contestant == "gru" else layer).parameters())

    def step() -> None:
        if contestant == "lean":
            y, _, _ = run_sequence(problem_of(layer, x, lean=True))
        else:
            y, _ = (gru if contestant == "gru" else layer)(x)
        y.backward(grad)
        for parameter in parameters:
            parameter.grad = None

    short_x, short_grad = x[:2].clone(), grad[:2].clone()  # warm-up: starts threads and libraries
    (gru if contestant == "gru" else layer)(short_x)[0].backward(short_grad)
    for parameter in parameters:
        parameter.grad = None
    if compiled.core is not None:
        compiled.core.release_memory()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def memory_rows(hidden: int, batch: int, gate: ResetGate) -> dict[str, Any]:
    """Measure each contestant in a separate process, so that none reuses the freed memory of another."""
    steps, inputs = SIZES[hidden]
    setting = Setting(hidden, steps, inputs, batch, gate, 0.2, 0.5)
    megabytes = {}
    for contestant in ("gru", "egru", "lean"):
        command = [sys.executable, "-m", "egru.bench.train_cpu", "--peak-of", contestant]
        command.append(json.dumps(dataclasses.asdict(setting)))
        completed = subprocess.run(command, check=True, capture_output=True, text=True)
        megabytes[contestant] = float(completed.stdout)
    return {**dataclasses.asdict(setting), "megabytes": megabytes, "lean_ratio": megabytes["lean"] / megabytes["gru"]}


# ---- command line ----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    return {
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernel": info()["cpu"],
        "date": time.strftime("%Y-%m-%d"),
    }


def settings(args: argparse.Namespace) -> list[Setting]:
    """Return the rows of the table that the command line asks for."""
    pairs = SPARSITIES if args.activity is None else ((args.activity, 0.5 if args.open is None else args.open),)
    rows = [
        Setting(hidden, *SIZES[hidden], batch, gate, activity, openness, args.input_gradient)
        for activity, openness in pairs
        for hidden in args.hidden
        for batch in args.batch
        for gate in args.gate
    ]
    if args.activity is not None or args.input_gradient:
        return rows
    harder = [
        dataclasses.replace(row, input_gradient=True)
        for row in rows
        if (row.batch, row.gate) == WITH_INPUT_GRADIENT and (row.activity, row.open) == SPARSITIES[0]
    ]
    return rows + harder


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("cpu train", __doc__)
    parser.add_argument(
        "--hidden",
        type=int,
        nargs="+",
        default=list(SIZES),
        choices=list(SIZES),
        help="numbers of units (default: all)",
    )
    parser.add_argument(
        "--batch",
        type=positive_int,
        nargs="+",
        default=list(BATCHES),
        metavar="B",
        help="batch sizes (default: 16 64 128)",
    )
    parser.add_argument(
        "--gate",
        nargs="+",
        default=list(GATES),
        choices=GATES,
        help="apply the reset gate after or before the recurrent product (default: both)",
    )
    parser.add_argument(
        "--activity", type=fraction, metavar="A", help="fraction of active units (default: 0.2 and 1.0)"
    )
    parser.add_argument(
        "--open",
        type=fraction,
        metavar="A",
        help="fraction of open units; requires --activity (default: 0.5)",
    )
    parser.add_argument("--input-gradient", action="store_true", help="also compute the gradient of the input")
    parser.add_argument("--threads", type=positive_int, default=2, metavar="N", help="threads of torch (default: 2)")
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=15,
        metavar="N",
        help="timed steps per combination of options (default: 15)",
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=10.0,
        metavar="S",
        help="time limit per combination, in seconds (default: 10)",
    )
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time (Linux only)")
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_all(arguments)
    if args.open is not None and args.activity is None:
        parser.error("--open requires --activity")
    if args.memory and (args.activity is not None or args.input_gradient):
        parser.error("--memory measures layers with activity 0.2 and accepts neither --activity nor --input-gradient")
    if args.memory and sys.platform != "linux":
        parser.error("--memory requires Linux")
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(peak_memory(args.peak_of[0], Setting(**json.loads(args.peak_of[1]))))
        return 0
    out = results_file(parser, args.out, "train_cpu_memory" if args.memory else "train_cpu")
    rows: list[dict[str, Any]] = []
    if args.memory:
        for hidden in args.hidden:
            for batch in args.batch:
                for gate in args.gate:
                    row = memory_rows(hidden, batch, gate)
                    rows.append(row)
                    sizes = "  ".join(f"{name} {x:7.1f} MB" for name, x in row["megabytes"].items())
                    print(f"H {hidden:4} B {batch:3} {gate:6}  {sizes}  lean/gru {row['lean_ratio']:.2f}", flush=True)
    else:
        for setting in settings(args):
            row = measure(setting, args.repeats, args.seconds)
            rows.append(row)
            ms, reached = row["milliseconds"], row["reached"]
            print(
                f"H {setting.hidden:4} B {setting.batch:3} {setting.gate:6} activity {reached['activity']:.2f} open"
                f" {reached['open']:.2f}{' with input gradient' if setting.input_gradient else ''}"
                f"  nn.GRU {ms['gru']:7.1f} ms  EGRU {ms['egru']:7.1f} ms"
                f"  {row['ratio']:.2f}x (best {row['best_ratio']:.2f}x)",
                flush=True,
            )
    out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
