"""Streaming inference on the CPU, one sequence, one thread: EventEngine against dense GRUs.

    python benchmarks/infer_cpu.py                        # all sizes, all contestants that are installed
    python benchmarks/infer_cpu.py --sizes 590x1 --rounds 15

Contestants run by turns in one process; times are medians over rounds, in microseconds per step, ratios are of times
of the same run. Activity comes from the network's own dynamics: per-unit thresholds are quantiles of its states. A
layer with as many inputs as units reads the events of such a layer below it, as in a stack ("events"), or random
numbers ("dense"); a layer with one input reads random numbers. A contestant whose output is wrong gets no ratio.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dense_rivals
import numpy as np
import torch
from torch import Tensor, nn

from egru import EGRU, EventEngine, EventState, Threshold
from egru.runtime.network import extract_network
from egru.runtime.reference import ReferenceRunner

SIZES = ((590, 1), (1024, 1024), (1350, 1350))  # (units, inputs)
SPARSITIES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
WEIGHTS = ("float32", "bfloat16", "int8")
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass
class Contestant:
    """``step`` advances by one row of ``x``, ``sequence`` runs all of it; None where it cannot. ``wrong`` says why.

    ``facts`` is asked after the measurement.
    """

    name: str
    step: Callable[[int], Any] | None
    sequence: Callable[[], Any] | None
    wrong: str = ""
    facts: Callable[[], dict[str, Any]] = dict


# ---- networks of a wanted activity -----------------------------------------------------------------------------------


def calibrate(layer: EGRU, x: Tensor, sparsity: float, iterations: int = 10) -> None:
    """Set the layer's thresholds to quantiles of its own states on ``x``, until its activity is as wanted."""
    threshold = layer.get_parameter("threshold_l0")
    with torch.no_grad():
        if sparsity == 0:
            threshold.fill_(-10)
            return
        threshold.fill_(0.1)
        states: list[Tensor] = []
        undo = layer.observe(lambda record: states.append(record.c[len(x) // 5 :, 0]))
        for _ in range(iterations):
            layer(x[:, None])
            threshold.copy_((threshold + states.pop().quantile(sparsity, 0)) / 2)
        undo()


def event_layer(units: int, inputs: int, seed: int, **options: Any) -> EGRU:
    torch.manual_seed(seed)
    return EGRU(inputs, units, threshold=Threshold("identity"), **options).eval()


def input_events(inputs: int, steps: int, sparsity: float) -> Tensor:
    """What a layer of ``inputs`` units sends upwards at this sparsity when it is driven by 32 random signals."""
    below = event_layer(inputs, 32, seed=1)
    x = torch.randn(steps, 32)
    calibrate(below, x, sparsity)
    with torch.no_grad():
        return below(x)[0]


# ---- our contestants -------------------------------------------------------------------------------------------------


def check_engine(engine: EventEngine, layer: EGRU, x: Tensor) -> str:
    """Why ``engine`` is wrong, or "": every step against the same step in float64, from the same state.

    States within ``margin`` of their threshold are ties. int8 rounds what it multiplies: float32 and float64 may
    disagree by one part in 255 where that is a tie, which moves a state by some 1e-4.
    """
    margin = 2e-3 if engine.weights == "int8" else 1e-5
    exact = ReferenceRunner(extract_network(layer, None, None, None), engine.weights, 1, dtype=torch.float64)
    theta = layer.thresholds()["l0"].detach()
    expected = np.empty((1, 1, layer.hidden_size))
    engine.reset()
    for t, row in enumerate(x):
        engine.step(row)
        exact.run(row.numpy()[None, None], None, False, expected)
        ours, right = engine.state, exact.get_state(0)
        assert isinstance(ours, EventState)
        seen = right.c[0] if layer.reset != "threshold" else right.c[0] + layer.reset_scale * theta * (right.y[0] != 0)
        clear = (seen - theta).abs() > margin
        if not torch.equal((ours.y[0] != 0)[clear], (right.y[0] != 0)[clear]):
            return f"events differ at step {t}"
        error = float((ours.c[0] - right.c[0]).abs()[clear].max())
        if error > margin:
            return f"state off by {error:.1e} at step {t}"
        exact.set_state(0, ours.c, ours.y)
    return ""


def our_contestants(
    units: int, inputs: int, sparsities: Sequence[float], weights: Sequence[str], length: int, kind: str, **options: Any
) -> list[Contestant]:
    result: list[Contestant] = []
    for sparsity in sparsities:
        layer = event_layer(units, inputs, seed=0, **options)
        torch.manual_seed(2)
        enough = length + 384  # steps to find thresholds with
        numbers = kind == "dense" or inputs == 1
        x = torch.randn(enough, inputs) if numbers else input_events(inputs, enough, sparsity)
        calibrate(layer, x, sparsity)
        x = x[-length:].contiguous()
        for weight in weights:
            engine = EventEngine(layer, weight)
            wrong = check_engine(engine, layer, x[:12])
            engine.reset_activity()
            rows, out = list(x), torch.empty(length, units)

            def facts(engine: EventEngine = engine, density: float = float((x != 0).float().mean())) -> dict[str, Any]:
                activity = engine.activity
                return {
                    "sparsity": 1 - activity.rates[0],
                    "input_density": density,
                    "macs_per_step": activity.macs / activity.steps,
                    "level": engine.level,
                }

            result.append(
                Contestant(
                    f"ours {weight} {sparsity:.0%}" + (" dense input" if kind == "dense" and inputs > 1 else ""),
                    lambda i, engine=engine, rows=rows: engine.step(rows[i]),
                    lambda engine=engine, x=x, out=out: engine.run(x, out=out),
                    wrong,
                    facts,
                )
            )
    return result


# ---- timing ----------------------------------------------------------------------------------------------------------


def measure(contestants: Sequence[Contestant], length: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Microseconds per step of every contestant, by turns: ``length`` single steps, then a sequence of as many.

    Steps are timed one by one: the median of each over all rounds, then the mean over steps, since steps differ in
    activity and a median over them would not be what a stream costs. Each turn runs the same steps once untimed: in a
    steady stream the weights in use are in the caches, and a sparse contestant needs many steps to touch them all.
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
    """Microseconds of a step of four units: what a call costs before there is any work."""
    layer = event_layer(4, 4, seed=0)
    engine, tokens = EventEngine(layer), EventEngine(layer, embedding=nn.Embedding(8, 4))
    inputs: dict[str, tuple[EventEngine, Any]] = {
        "tensor": (engine, torch.randn(4)),
        "array": (engine, np.ones(4, np.float32)),
        "token": (tokens, 3),
    }
    result: dict[str, float] = {}
    for name, (each, x) in inputs.items():
        best = float("inf")
        for _ in range(50):
            begin = time.perf_counter()
            for _ in range(500):
                each.step(x)
            best = min(best, (time.perf_counter() - begin) / 500 * 1e6)
        result[name] = best
    return result


def straight_line(rows: dict[str, dict[str, Any]], weight: str, mode: str = "step") -> dict[str, Any] | None:
    """Least squares of time against activity over 50 % to 99 % sparse: slope, intercept, R²."""
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
    # ours, rival, mode, must reach, aim
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
        value = f"wrong: {row['wrong']}" if row["wrong"] else f"{row['ratio']:5.1f}x"
        print(f"  {row['ours']} against {row['rival']}, {row['mode']}: {value} (must {row['must']}, aim {row['aim']})")
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
            if value < top:  # the others are named above the axes
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
    weights: Sequence[str] = WEIGHTS,
    length: int = 128,
    rounds: int = 7,
    reset_gate: str = "before",
) -> dict[str, Any]:
    """Everything, as one dictionary; prints as it goes."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for units, inputs in sizes:
        size = f"{units} units, {inputs} input{'s' if inputs > 1 else ''}"
        torch.manual_seed(0)
        rivals = [
            Contestant(rival.name, rival.step, rival.sequence, rival.wrong)
            for rival in dense_rivals.rivals(nn.GRU(inputs, units).eval(), torch.randn(length, inputs))
        ]
        ours = our_contestants(units, inputs, sparsities, weights, length, "events", reset_gate=reset_gate)
        if inputs > 1:
            ours += our_contestants(units, inputs, (0.8,), weights, length, "dense", reset_gate=reset_gate)
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
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=[f"{h}x{i}" for h, i in SIZES], help="units x inputs")
    parser.add_argument("--sparsities", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--length", type=int, default=128, help="steps of a sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--reset-gate", default="before", choices=("before", "after"))
    parser.add_argument("--out", type=Path, default=RESULTS / "infer_cpu.json")
    args = parser.parse_args()
    sizes = [(int(h), int(i)) for h, i in (size.split("x") for size in args.sizes)]
    results = bench(sizes, args.sparsities, args.weights, args.length, args.rounds, args.reset_gate)
    overhead = call_overhead()
    print("\ncall overhead, µs:", ", ".join(f"{name} {value:.2f}" for name, value in overhead.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "cpu": dense_rivals.cpu_name(),
        "versions": dense_rivals.versions(),
        "reset_gate": args.reset_gate,
    }
    if args.out.exists():  # sizes measured in other runs stay
        results = {**json.loads(args.out.read_text())["sizes"], **results}
    args.out.write_text(json.dumps({**facts, "call_overhead_us": overhead, "sizes": results}, indent=1))
    plot(results, args.out.with_suffix(".png"))
    print(f"written: {args.out}, {args.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
