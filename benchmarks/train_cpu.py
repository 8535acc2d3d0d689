"""Training on the CPU: forward and backward through ``egru.EGRU`` against ``torch.nn.GRU`` (and EvNN, where installed).

    python benchmarks/train_cpu.py                       # the sizes and sparsities of the table, about two minutes
    python benchmarks/train_cpu.py --hidden 590 --batch 16 --gate after --activity 0.2 --open 0.5
    python benchmarks/train_cpu.py --memory              # peak memory of a training step, lean mode too

Activity comes from the dynamics: a threshold for all units is searched until the wanted share of states crosses it,
then a surrogate width until the wanted share of units is open (fired, or inside the window). The input of a layer with
several features is imposed: events of that activity, as from an event layer below. A kernel that disagrees with the
float64 reference on a short sequence of the same layer is not timed.
"""

import argparse
import copy
import ctypes
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from evnn_rival import evnn
from torch import Tensor, nn

import egru
from egru import compiled
from egru.kernels import Problem, get, info, run_sequence

SIZES = {590: (200, 1), 1350: (35, 1350)}
"""Hidden size: (steps, inputs). Sequential MNIST and Penn Treebank of the paper."""
BATCHES = (16, 64, 128)
GATES = ("after", "before")
SPARSITIES = ((0.2, 0.5), (1.0, 1.0))
"""(activity, share of open units): the paper's regime, and none at all."""


@dataclasses.dataclass(frozen=True)
class Setting:
    hidden: int
    steps: int
    inputs: int
    batch: int
    gate: str
    activity: float
    open: float
    input_gradient: bool = False


# ---- layers with the wanted activity ---------------------------------------------------------------------------------


def make_input(setting: Setting) -> Tensor:
    x = torch.randn(setting.steps, setting.batch, setting.inputs)
    return x if setting.inputs == 1 else x * (torch.rand(x.shape) < setting.activity)


def make_layer(setting: Setting, x: Tensor) -> tuple[egru.EGRU, dict[str, float]]:
    """An event layer with that activity and openness on ``x``, and the values reached."""
    layer = egru.EGRU(setting.inputs, setting.hidden, reset_gate=setting.gate, threshold=egru.Threshold("identity"))
    seen: list[Tensor] = []
    layer.observe(lambda record: seen.append(record.c))
    threshold = layer.get_parameter("threshold_l0")

    def states(theta: float) -> Tensor:
        seen.clear()
        with torch.no_grad():
            threshold.fill_(theta)
            layer(x)
        return seen[0]

    if setting.activity >= 1:
        theta, width = -100.0, 1e6  # under every state, and a window that holds them all
        c = states(theta)
    else:
        low, high = -1.0, 1.0
        for _ in range(14):
            theta = (low + high) / 2
            low, high = (theta, high) if (states(theta) > theta).float().mean() > setting.activity else (low, theta)
        c = states(theta)
        silent = (theta - c)[c <= theta]
        # The window opens silent units by their distance; with those that fired, `open` of all.
        share = (setting.open - (c > theta).float().mean().item()) / (silent.numel() / c.numel())
        k = min(silent.numel(), max(1, round(share * silent.numel())))
        width = silent.kthvalue(k).values.item()
    fresh = egru.EGRU(
        setting.inputs,
        setting.hidden,
        reset_gate=setting.gate,
        threshold=egru.Threshold("identity"),
        surrogate=egru.Surrogate(width=width),
    )
    fresh.load_state_dict(layer.state_dict())
    fired = c > theta
    reached = {
        "activity": fired.float().mean().item(),
        "open": (fired | ((c - theta).abs() < width)).float().mean().item(),
        "theta": theta,
        "width": width,
    }
    return fresh, reached


def problem_of(layer: egru.EGRU, x: Tensor, **changes: Any) -> Problem:
    """The sequence operation that ``layer(x)`` runs."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    c, y = layer.zero_state(x.shape[1])
    return Problem(
        x, c[0], y[0], *(layer.get_parameter(name) for name in names), layer.thresholds()["l0"],
        layer.reset_scale, None, None, layer.reset, layer.reset_gate, layer.surrogate, "", **changes,
    )  # fmt: skip


# ---- correctness first -----------------------------------------------------------------------------------------------


def check(layer: egru.EGRU, x: Tensor) -> float:
    """Largest relative difference of any output or gradient to the float64 reference, on the first steps.

    The kernel runs in float64 as well, where events cannot differ by rounding.
    """
    x = x[:4, :17].double()
    with torch.no_grad():
        problem = problem_of(copy.deepcopy(layer).double(), x)
    results = []
    for name in ("reference", "cpu"):
        forward = get(name).forward(problem, True)
        grads = [torch.ones_like(out) for out in forward[:4]]
        backward = get(name).backward(problem, forward.y, forward.c, forward.reserve, *grads, True)
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
    """Times of each contestant, taken in turns, after one round that does not count."""
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
    """One row: medians in milliseconds, and the ratio nn.GRU / EGRU."""
    torch.manual_seed(0)
    x = make_input(setting)
    layer, reached = make_layer(setting, x)
    difference = check(layer, x)
    if not difference < 1e-12:
        raise SystemExit(f"not timed: the kernel differs from the reference by {difference:.2g} at {setting}")
    x.requires_grad_(setting.input_gradient)
    gru = nn.GRU(setting.inputs, setting.hidden)
    grad = torch.randn(setting.steps, setting.batch, setting.hidden)
    contestants = {"gru": training_step(gru, x, grad), "egru": training_step(layer, x, grad)}
    make_evnn = evnn(cuda=False)
    if not isinstance(make_evnn, str):
        contestants["evnn"] = training_step(make_evnn(setting.inputs, setting.hidden), x, grad)
    times = interleave(contestants, repeats, seconds)
    median = {name: statistics.median(each) * 1e3 for name, each in times.items()}
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
    """Megabytes that one training step adds at its peak, in this process; gradients and outputs included."""
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

    small = x[:2].clone(), grad[:2].clone()  # threads and libraries start here, not in the count
    (gru if contestant == "gru" else layer)(small[0])[0].backward(small[1])
    for parameter in parameters:
        parameter.grad = None
    if compiled.core is not None:
        compiled.core.release_memory()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def memory_rows(hidden: int, batch: int, gate: str) -> dict[str, Any]:
    """Each contestant in a process of its own, so that none profits from another's freed memory."""
    steps, inputs = SIZES[hidden]
    setting = Setting(hidden, steps, inputs, batch, gate, 0.2, 0.5)
    found = {}
    for contestant in ("gru", "egru", "lean"):
        command = [sys.executable, __file__, "--peak-of", contestant, json.dumps(dataclasses.asdict(setting))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[contestant] = float(done.stdout)
    return {**dataclasses.asdict(setting), "megabytes": found, "lean_ratio": found["lean"] / found["gru"]}


# ---- command line ----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": model[0].split(":")[1].strip() if model else platform.processor(),
        "cores": len(model),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernel": info()["cpu"],
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--batch", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--gate", nargs="*", default=list(GATES), choices=GATES)
    parser.add_argument("--activity", type=float, help="with --open: one sparsity instead of the table's two")
    parser.add_argument("--open", type=float, help="share of units that fired or are inside the window")
    parser.add_argument("--input-gradient", action="store_true", help="also the gradient of the input")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=10.0, help="limit per row")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON; default benchmarks/results/train_cpu[_memory].json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(peak_memory(args.peak_of[0], Setting(**json.loads(args.peak_of[1]))))
        return
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
        pairs = SPARSITIES if args.activity is None else ((args.activity, args.open or 0.5),)
        for activity, openness in pairs:
            for hidden in args.hidden:
                for batch in args.batch:
                    for gate in args.gate:
                        setting = Setting(hidden, *SIZES[hidden], batch, gate, activity, openness, args.input_gradient)
                        row = measure(setting, args.repeats, args.seconds)
                        rows.append(row)
                        ms, reached = row["milliseconds"], row["reached"]
                        print(
                            f"H {hidden:4} B {batch:3} {gate:6} activity {reached['activity']:.2f} open"
                            f" {reached['open']:.2f}  nn.GRU {ms['gru']:7.1f} ms  EGRU {ms['egru']:7.1f} ms"
                            f"  {row['ratio']:.2f}x (best {row['best_ratio']:.2f}x)",
                            flush=True,
                        )
    name = "train_cpu_memory.json" if args.memory else "train_cpu.json"
    output = args.output or Path(__file__).parent / "results" / name
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
