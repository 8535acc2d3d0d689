"""Streaming inference on the CPU with one sequence and one thread: EventEngine against dense GRUs.

    egru bench cpu infer                                  # all sizes, all contestants that are installed
    egru bench cpu infer --sizes 590x1 --rounds 15

Contestants take turns in one process. Times are medians over rounds, in microseconds per step. Ratios compare times of
the same run. Outputs are checked first: a contestant whose output is wrong gets no ratio. With `--energy`, the energy
of all steps of a sequence is measured, one step at a time.

Activity comes from the dynamics of the network: the threshold of each unit is a quantile of its states. A layer with
one input reads random numbers. A layer with as many inputs as units reads the events of another layer, as in a stack;
a second set of engines reads random numbers ("dense input").
"""

import argparse
import datetime
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from egru import EventEngine
from egru.bench import dense_rivals, make_parser, results_file, write_results
from egru.bench.energy import add_option, measure_energy
from egru.bench.event_networks import Contestant, event_contestants, event_layer
from egru.cli.arguments import fraction, positive_int
from egru.energy import EnergyMeter
from egru.environment import cpu_name
from egru.types import RESET_GATES, WEIGHT_FORMATS, ResetGate, WeightFormat

SIZES = ((590, 1), (1024, 1024), (1350, 1350))  # (units, inputs)
SPARSITIES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


# ---- timing ----------------------------------------------------------------------------------------------------------


def measure(contestants: Sequence[Contestant], length: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure microseconds per step of every contestant: ``length`` single steps, then a sequence of that length.

    Steps are timed one by one. The result is the mean over steps of the median over rounds: steps differ in activity,
    so a median over steps would not be the cost of a stream. Each turn first runs the same steps untimed: in a steady
    stream the weights in use are in the caches, and a sparse network needs many steps to touch them all.
    """
    steps = {c.name: np.empty((rounds, length)) for c in contestants if c.step is not None}
    sequences = {c.name: np.empty(rounds) for c in contestants if c.sequence is not None}
    with torch.inference_mode():
        for turn in range(rounds):
            for c in contestants:
                if c.step is not None:
                    for i in range(length):
                        c.step(i)
                    for i in range(length):
                        begin = time.perf_counter()
                        c.step(i)
                        steps[c.name][turn, i] = time.perf_counter() - begin
                if c.sequence is not None:
                    c.sequence()
                    begin = time.perf_counter()
                    c.sequence()
                    sequences[c.name][turn] = (time.perf_counter() - begin) / length
    return {
        c.name: {
            "step": float(np.median(steps[c.name], 0).mean() * 1e6) if c.name in steps else None,
            "sequence": float(np.median(sequences[c.name]) * 1e6) if c.name in sequences else None,
            "wrong": c.wrong,
            **c.facts(),
        }
        for c in contestants
    }


def call_overhead() -> dict[str, float]:
    """Measure microseconds per step of four units, which is the overhead of a call, with and without ``out``."""
    layer = event_layer(4, 4, seed=0)
    engine, tokens = EventEngine(layer), EventEngine(layer, embedding=nn.Embedding(8, 4))
    inputs: dict[str, tuple[EventEngine, Any, Any]] = {
        "tensor": (engine, torch.randn(4), torch.empty(4)),
        "array": (engine, np.ones(4, np.float32), np.empty(4, np.float32)),
        "token": (tokens, 3, torch.empty(4)),
    }
    result: dict[str, float] = {}
    for name, (contestant, x, buffer) in inputs.items():
        for label, out in ((name, buffer), (f"{name}, new result", None)):
            best = float("inf")
            for _ in range(50):
                begin = time.perf_counter()
                for _ in range(500):
                    contestant.step(x, out)
                best = min(best, (time.perf_counter() - begin) / 500 * 1e6)
            result[label] = best
    return result


def straight_line(rows: dict[str, dict[str, Any]], weight: str, mode: str = "step") -> dict[str, Any] | None:
    """Fit time against activity for sparsities from 50 to 99 %: slope, intercept and R²."""
    points = [
        (1 - row["sparsity"], row[mode])
        for name, row in rows.items()
        if name.startswith(f"ours {weight} ") and "dense" not in name and row["sparsity"] > 0.4
    ]
    if len(points) < 3:
        return None
    x, y = np.array(points).T
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - (slope * x + intercept)
    r2 = 1 - residual @ residual / ((y - y.mean()) @ (y - y.mean()))
    return {"slope": slope, "intercept": intercept, "r2": r2, "points": points}


RATIOS = (
    # ours, rival, mode, required, target
    ("ours float32 80%", "torch.nn.GRU", "step", 9, 12),
    ("ours float32 80%", "ONNX Runtime float32", "step", 5, 6),
    ("ours int8 80%", "ONNX Runtime int8", "step", 3.5, 5),
    ("ours float32 80%", "torch.nn.GRU", "sequence", 4.5, 8),
    ("ours float32 0%", "torch.nn.GRU", "step", 2, 2),
)


def ratios(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for ours, rival, mode, must, aim in RATIOS:
        if ours not in rows or rival not in rows or rows[rival][mode] is None:
            continue
        row = {"ours": ours, "rival": rival, "mode": mode, "must": must, "aim": aim}
        row["wrong"] = rows[ours]["wrong"] or rows[rival]["wrong"]
        if not row["wrong"]:
            row["ratio"] = rows[rival][mode] / rows[ours][mode]
        result.append(row)
    return result


# ---- report ----------------------------------------------------------------------------------------------------------


def show(size: str, result: dict[str, Any]) -> None:
    def number(value: float | None) -> str:
        return "       -" if value is None else f"{value:8.1f}"

    print(f"\n{size}: µs per step    step by step   whole sequence")
    for name, row in result["contestants"].items():
        note = f"  WRONG: {row['wrong']}" if row["wrong"] else ""
        active = f"  {1 - row['sparsity']:6.1%} active" if "sparsity" in row else ""
        print(f"  {name:32s} {number(row['step'])} {number(row['sequence'])}{active}{note}")
    for row in result["ratios"]:
        value = f"wrong output: {row['wrong']}" if row["wrong"] else f"{row['ratio']:5.1f}x"
        bounds = f"required {row['must']}, target {row['aim']}"
        print(f"  {row['ours']} against {row['rival']}, {row['mode']}: {value} ({bounds})")
    for weight, line in result["lines"].items():
        if line:
            slope = line["slope"] / 100
            print(f"  {weight}: {line['intercept']:.1f} µs + {slope:.2f} µs per % active, R² {line['r2']:.4f}")


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 4), squeeze=False)
    for axis, (size, result) in zip(axes[0], results.items(), strict=True):
        for weight, line in result["lines"].items():
            if not line:
                continue
            x, y = np.array(sorted(line["points"])).T
            points = axis.plot(100 * x, y, "o", label=f"{weight}, R² {line['r2']:.4f}")
            axis.plot(100 * x, line["slope"] * x + line["intercept"], color=points[0].get_color(), linewidth=1)
        top = 1.1 * max(row["step"] for row in result["contestants"].values() if row.get("sparsity", 0) > 0.4)
        rivals = {name: row["step"] for name, row in result["contestants"].items() if not name.startswith("ours")}
        for name, value in rivals.items():
            if value < top:  # the title names the others
                axis.axhline(value, linestyle=":", color="grey", linewidth=1)
                axis.text(1, value, name, fontsize=7, va="bottom")
        beyond = ", ".join(f"{name} {value:.0f}" for name, value in rivals.items() if value >= top)
        axis.set_title(f"{size}, one step at a time\n{beyond} µs", fontsize=8)
        axis.set(xlabel="active units, %", ylabel="µs per step", xlim=(0, 52), ylim=(0, top))
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def bench(
    sizes: Sequence[tuple[int, int]] = SIZES,
    sparsities: Sequence[float] = SPARSITIES,
    weights: Sequence[WeightFormat] = WEIGHT_FORMATS,
    length: int = 128,
    rounds: int = 7,
    reset_gate: ResetGate = "before",
    energy: bool = False,
) -> dict[str, Any]:
    """Run the benchmark for all sizes, print the tables and return the results."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for units, inputs in sizes:
        size = f"{units} units, {inputs} input{'s' if inputs > 1 else ''}"
        torch.manual_seed(0)
        rivals = [
            Contestant(rival.name, rival.step, rival.sequence, rival.wrong)
            for rival in dense_rivals.rivals(nn.GRU(inputs, units).eval(), torch.randn(length, inputs))
        ]
        ours = event_contestants(units, inputs, sparsities, weights, length, False, reset_gate=reset_gate)
        if inputs > 1:
            ours += event_contestants(units, inputs, (0.8,), weights, length, True, reset_gate=reset_gate)
        rows = measure([*rivals, *ours], length, rounds)
        results[size] = {
            "rounds": rounds,
            "length": length,
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "contestants": rows,
            "ratios": ratios(rows),
            "lines": {weight: straight_line(rows, weight) for weight in weights},
        }
        show(size, results[size])
        if energy:
            results[size]["energy"] = stream_energy([*rivals, *ours], length)
    return results


def stream_energy(contestants: Sequence[Contestant], length: int) -> dict[str, Any]:
    """Measure the energy of ``length`` single steps of every contestant that supports them."""

    def stream(step: Callable[[int], Any]) -> None:
        for i in range(length):
            step(i)

    runs = {c.name: functools.partial(stream, c.step) for c in contestants if c.step is not None}
    with EnergyMeter() as meter, torch.inference_mode():
        return measure_energy(runs, meter)


def _size(text: str) -> tuple[int, int]:
    """Convert "590x1" to units and inputs."""
    units, _, inputs = text.partition("x")
    if not (units.isdecimal() and inputs.isdecimal() and int(units) and int(inputs)):
        raise argparse.ArgumentTypeError(f"must be UNITSxINPUTS such as 590x1, got {text!r}")
    return int(units), int(inputs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("cpu infer", __doc__)
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_size,
        default=list(SIZES),
        metavar="HxI",
        help="units x inputs (default: 590x1 1024x1024 1350x1350)",
    )
    parser.add_argument(
        "--sparsities",
        nargs="+",
        type=fraction,
        default=list(SPARSITIES),
        metavar="S",
        help=f"activity sparsities of the event layers (default: {' '.join(map(str, SPARSITIES))})",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=list(WEIGHT_FORMATS),
        choices=WEIGHT_FORMATS,
        help="number formats of the engine's weights (default: all)",
    )
    parser.add_argument(
        "--length", type=positive_int, default=128, metavar="T", help="steps per sequence (default: 128)"
    )
    parser.add_argument("--rounds", type=positive_int, default=7, metavar="N", help="rounds per median (default: 7)")
    parser.add_argument(
        "--reset-gate", default="before", choices=RESET_GATES, help="where the reset gate acts (default: before)"
    )
    add_option(parser)
    args = parser.parse_all(arguments)
    out = results_file(parser, args.out, "infer_cpu")
    earlier: dict[str, Any] = {}
    if out.exists():  # keep sizes that were measured before
        try:
            earlier = json.loads(out.read_text())["sizes"]
        except (KeyError, TypeError, ValueError):
            parser.error(f"--out: {out} exists and does not hold results of this benchmark; name another file")
    settings = (args.sizes, args.sparsities, args.weights, args.length, args.rounds, args.reset_gate, args.energy)
    results = earlier | bench(*settings)
    overhead = call_overhead()
    print("\ncall overhead, µs:", ", ".join(f"{name} {value:.2f}" for name, value in overhead.items()))
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "cpu": cpu_name(),
        "versions": dense_rivals.versions(),
        "reset_gate": args.reset_gate,
    }
    write_results(out, {**facts, "call_overhead_us": overhead, "sizes": results}, lambda file: plot(results, file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
