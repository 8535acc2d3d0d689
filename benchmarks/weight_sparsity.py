"""Time the streaming engine against weight sparsity, with each layout of the weights.

    python benchmarks/weight_sparsity.py                              # prints the table
    python benchmarks/weight_sparsity.py --out weight_sparsity.json --plot weight_sparsity.png
    python benchmarks/weight_sparsity.py --quick                      # one size, two sparsities

A network is an EGRU with as many inputs as units and random weights, pruned in blocks of 16 outputs to each of
SPARSITIES. About ACTIVITY of its units send events at a step, and as many inputs are not zero. Contestants are engines
with dense, sparse and automatic packing. Outputs are compared bit by bit first. Then the contestants take turns of
--turn steps, in one process and on one thread. The median over turns is reported. Times are CPU times of the thread, so
that other processes disturb them less.

Three of the weight sparsities are also measured with ACTIVITIES. For each size, number format and packing, R2 is that
of the least-squares line through the points (effective MACs per step, time per step) of all networks. Effective MACs
are products of a non-zero weight with a non-zero input or event, as `engine.activity` counts them. A second R2 is that
of the plane over effective MACs and active rows: the non-zero inputs and events, each of which is looked up.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import torch

import egru
from egru.types import PACKINGS, WEIGHT_FORMATS, WeightFormat

try:
    from benchmarks.conditions import conditions, load_average
except ImportError:  # run as a script
    from conditions import conditions, load_average

SIZES = (590, 1344)
SPARSITIES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95)
ACTIVITY = 0.15
ACTIVITIES = (0.05, 0.15, 0.3)
"""Fractions of active units and inputs; with every second of SPARSITIES from the second on."""
BLOCK = 16


def build(hidden: int, sparsity: float, activity: float, seed: int = 0) -> tuple[egru.EGRU, torch.Tensor]:
    """Return a pruned layer in which about ``activity`` of the units are active, and an input sequence."""
    generator = torch.Generator().manual_seed(seed)
    size = hidden // BLOCK * BLOCK  # blocks must divide the number of units
    torch.manual_seed(seed)
    layer = egru.EGRU(size, size, threshold=egru.Threshold("identity", mean=0.0, std=0.0)).eval()
    if sparsity:
        egru.compress.prune_weights(layer, sparsity, block=BLOCK, scope="layer")
    x = torch.randn(64, size, generator=generator) * (torch.rand(64, size, generator=generator) < activity)
    low, high = 0.0, 2.0
    with torch.no_grad():
        for parameter in (layer.get_parameter("weight_ih_l0"), layer.get_parameter("weight_hh_l0")):
            parameter.mul_(2 / (1 - sparsity) ** 0.5)  # keep the variance of the sums
        for _ in range(12):
            middle = (low + high) / 2
            layer.get_parameter("threshold_l0").fill_(middle)
            active = float((layer(x[:, None])[0][16:] != 0).float().mean())
            low, high = (middle, high) if active > activity else (low, middle)
    return layer, x


def measure(layer: egru.EGRU, x: torch.Tensor, weights: WeightFormat, turns: int, turn: int) -> dict[str, Any]:
    """Return the time per step with each packing, and the effective MACs per step."""
    engines = {packing: egru.EventEngine(layer, weights=weights, packing=packing) for packing in PACKINGS}
    outputs = [engine.run(x) for engine in engines.values()]
    if not all(torch.equal(output, outputs[0]) for output in outputs):
        raise AssertionError("the outputs of the packings differ")
    times: dict[str, list[float]] = {packing: [] for packing in PACKINGS}
    steps, out = {packing: itertools.cycle(x) for packing in PACKINGS}, torch.empty(layer.hidden_size)
    for engine in engines.values():
        engine.reset_activity()
    for first in range(turns + 1):
        for packing in (PACKINGS * 2)[first % 3 : first % 3 + 3]:  # each comes first equally often
            engine = engines[packing]
            inputs = list(itertools.islice(steps[packing], turn))
            start = time.thread_time()
            for vector in inputs:
                engine.step(vector, out)
            if first:  # the first turn warms up
                times[packing].append((time.thread_time() - start) / turn)
    activity, core = engines["auto"].activity, engines["auto"]._core
    row: dict[str, Any] = {"effective_macs": activity.macs / activity.steps, "activity": activity.rates[0]}
    row["active_rows"] = float((x != 0).float().sum(1).mean()) + activity.rates[0] * layer.hidden_size
    row["auto_is_sparse"] = None if core is None else core.sparse_matrices()
    for packing in PACKINGS:
        row[packing] = 1e6 * statistics.median(times[packing])
    return row


def fit(columns: list[list[float]], y: list[float]) -> tuple[float, list[float]]:
    """Return R2 and coefficients, the constant first, of the least-squares fit of ``y``."""
    matrix = torch.tensor([[1.0] * len(y), *columns], dtype=torch.float64).T
    values = torch.tensor(y, dtype=torch.float64)
    coefficients = torch.linalg.lstsq(matrix, values[:, None]).solution[:, 0]
    residual = (values - matrix @ coefficients).square().sum()
    return float(1 - residual / (values - values.mean()).square().sum()), coefficients.tolist()


def compare(sizes: tuple[int, ...], sparsities: tuple[float, ...], turns: int, turn: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    fits: list[dict[str, Any]] = []
    for hidden in sizes:
        networks = {(s, ACTIVITY): build(hidden, s, ACTIVITY) for s in sparsities}
        networks |= {(s, a): build(hidden, s, a) for s in sparsities[1::2] for a in ACTIVITIES if a != ACTIVITY}
        for weights in WEIGHT_FORMATS:
            macs: list[float] = []
            active: list[float] = []
            times: dict[str, list[float]] = {"auto": [], "sparse": []}
            for (sparsity, _), (layer, x) in networks.items():
                measured = measure(layer, x, weights, turns, turn)
                rows.append({"hidden": layer.hidden_size, "weights": weights, "sparsity": sparsity, **measured})
                macs.append(measured["effective_macs"])
                active.append(measured["active_rows"])
                for packing in times:
                    times[packing].append(measured[packing])
                _print(rows[-1])
            for packing, values in times.items():
                r2, (intercept, slope) = fit([macs], values)
                plane, _ = fit([macs, active], values)
                fits.append({"hidden": rows[-1]["hidden"], "weights": weights, "packing": packing, "r2": r2})
                fits[-1] |= {"r2_with_rows": plane, "ns_per_mac": 1e3 * slope, "intercept_us": intercept}
                print(
                    f"{hidden} {weights} {packing}: R2 {r2:.4f} ({plane:.4f} with active rows), "
                    f"{1e3 * slope:.4f} ns per MAC + {intercept:.1f} us"
                )
    return {"rows": rows, "fits": fits}


def _print(row: dict[str, Any]) -> None:
    times = ", ".join(f"{packing} {row[packing]:7.1f}" for packing in PACKINGS)
    print(
        f"{row['hidden']:5} {row['weights']:8} weights {100 * row['sparsity']:3.0f} % zero, "
        f"{100 * row['activity']:4.1f} % active, {row['effective_macs'] / 1e3:7.1f}K MACs: {times} us per step; "
        f"auto over dense {row['dense'] / row['auto']:.2f} x",
        flush=True,
    )


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draw time per step against weight sparsity, one panel per size."""
    import matplotlib.pyplot as plt

    sizes = sorted({row["hidden"] for row in result["rows"]})
    figure, axes = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 3.6), squeeze=False, layout="constrained")
    for axis, hidden in zip(axes[0], sizes, strict=True):
        for colour, weights in enumerate(WEIGHT_FORMATS):
            rows = [
                row
                for row in result["rows"]
                if row["hidden"] == hidden and row["weights"] == weights and abs(row["activity"] - ACTIVITY) < 0.04
            ]
            x = [100 * row["sparsity"] for row in rows]
            for packing, style in (("auto", "-o"), ("dense", ":")):
                label = weights if packing == "auto" else None
                axis.plot(x, [row[packing] for row in rows], style, color=f"C{colour}", label=label)
        axis.set(title=f"{hidden} units", xlabel="weights that are zero (%)", ylabel="µs per step", yscale="log")
        axis.legend(title="solid: auto, dotted: dense")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def use_fresh_pages() -> None:
    """Make glibc map new pages for large matrices. Engines in reused memory may have no huge pages and be slower."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="turns per contestant; default: %(default)s")
    parser.add_argument("--turn", type=int, default=64, help="steps per turn; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one small network")
    parser.add_argument("--out", type=pathlib.Path, help="write the result to this JSON file")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the result to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    use_fresh_pages()
    load = load_average()
    sizes, sparsities = ((64,), (0.0, 0.9)) if options.quick else (SIZES, SPARSITIES)
    result = compare(sizes, sparsities, options.turns, options.turn)
    result |= {
        "block": BLOCK,
        "unit": "microseconds per step",
        **conditions(load),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.plot:
        plot(result, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
