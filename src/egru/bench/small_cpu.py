"""Small and medium layers on the CPU: EGRU against nn.GRU, and EGRUCell against nn.GRUCell.

    egru bench cpu small                     # 59 shapes, training and inference, all threads
    egru bench cpu small --steps 1 16 --units 64 --threads 1

All combinations of steps, batch sizes and units with fewer than 100 x 128 x 512 outputs are measured. A layer has as
many inputs as units, but at most 64. Training is the forward and backward pass, with the gradients of all parameters
but not of the input. All thresholds are 0.08; about 20 to 40 % of the units then emit an event.

The two layers take turns in one process, in an order that alternates between rounds. A ratio is the time of nn.GRU
divided by that of EGRU, as median over rounds: above 1, EGRU is faster. Before timing, the layer is compared with
the float64 reference.
"""

import argparse
import copy
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import egru
from egru.bench import dense_rivals, make_parser, results_file, write_results
from egru.cli.arguments import positive_float, positive_int
from egru.environment import cpu_name

STEPS, BATCHES, UNITS = (1, 16, 100), (1, 8, 32, 128), (32, 64, 128, 256, 512)
INPUTS = 64
"""Largest number of inputs; small layers have as many inputs as units."""
LARGEST = 100 * 128 * 512
"""Shapes with this many values or more are left out: they are not small."""


def shapes(steps: Sequence[int], batches: Sequence[int], units: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return all combinations ``(T, B, H)`` below :data:`LARGEST`."""
    return [(T, B, H) for T in steps for H in units for B in batches if T * B * H < LARGEST]


def make_layer(H: int) -> egru.EGRU:
    """Return a layer of ``H`` units, the same for every call."""
    torch.manual_seed(0)
    return egru.EGRU(min(H, INPUTS), H, threshold=egru.Threshold.constant(0.08, trainable=True))


def compare(T: int, B: int, H: int, seconds: float) -> dict[str, Any]:
    """Measure one shape for about ``seconds`` and return times and ratios."""
    layer = make_layer(H)
    features = layer.input_size
    x = torch.randn(T, B, features)
    with torch.no_grad():
        activity = (layer(x)[0] != 0).float().mean().item()
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "training": (_training(nn.GRU(features, H), x), _training(layer, x)),
        "inference": (_inference(nn.GRU(features, H), x), _inference(layer, x)),
    }
    if T == 1:
        cell = egru.EGRUCell(features, H, threshold=egru.Threshold.constant(0.08, trainable=True))
        dense, events = nn.GRUCell(features, H), lambda m, x: m(x).y
        pairs["cell training"] = (_training(dense, x[0], lambda m, x: m(x)), _training(cell, x[0], events))
        pairs["cell inference"] = (_inference(dense, x[0]), _inference(cell, x[0]))
    result: dict[str, Any] = {"T": T, "B": B, "H": H, "inputs": features, "activity": activity}
    result["error"] = check(layer, x)
    for name, pair in pairs.items():
        gru, ours = measure(pair, seconds)
        ratios = [a / b for a, b in zip(gru, ours, strict=True)]
        result[name] = {
            "gru_us": 1e6 * statistics.median(gru),
            "egru_us": 1e6 * statistics.median(ours),
            "ratio": statistics.median(ratios),
            "rounds": len(ratios),
        }
    return result


def check(layer: egru.EGRU, x: Tensor) -> float:
    """Return the largest difference to the float64 reference over states that stay on their side of the threshold.

    Raises:
        RuntimeError: If the difference exceeds float32 rounding.
    """
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    with torch.no_grad():
        y, expected = layer(x[:1])[0].double(), exact(x[:1].double())[0]
    same = (y != 0) == (expected != 0)
    error = ((y - expected).abs() * same).max().item()
    if error > 1e-5 or same.float().mean() < 0.999:
        raise RuntimeError(f"the layer differs from the reference by {error:.1e}")
    return error


def measure(pair: tuple[Callable[[], Any], Callable[[], Any]], seconds: float) -> tuple[list[float], list[float]]:
    """Return the times of both functions, which take turns for about ``seconds``, at least 5 rounds each."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in pair:
        for _ in range(3):
            run()
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for i in (0, 1) if len(times[0]) % 2 else (1, 0):
            start = time.perf_counter()
            pair[i]()
            times[i].append(time.perf_counter() - start)
    return times


def _training(model: nn.Module, x: Tensor, output: Callable[..., Tensor] = lambda m, x: m(x)[0]) -> Callable[[], Any]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        output(model, x).sum().backward()  # pyright: ignore[reportUnknownMemberType]

    return run


def _inference(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def summarise(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return lowest and median ratio and the number of shapes below 0.95, by measurement."""
    summary: dict[str, dict[str, float]] = {}
    for name in ("training", "inference", "cell training", "cell inference"):
        ratios = [result[name]["ratio"] for result in results if name in result]
        if ratios:
            below = sum(ratio < 0.95 for ratio in ratios)
            summary[name] = {
                "lowest": min(ratios),
                "median": statistics.median(ratios),
                "below 0.95": below,
                "shapes": len(ratios),
            }
    return summary


def describe_summary(name: str, values: Mapping[str, float]) -> str:
    """Return one line of the summary."""
    return (
        f"{name}: lowest {values['lowest']:.2f}x, median {values['median']:.2f}x, "
        f"{values['below 0.95']} of {values['shapes']} shapes below 0.95x"
    )


def plot(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the ratios as heat maps: one per measurement and number of steps."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    steps = sorted({result["T"] for result in results})
    figure, axes = plt.subplots(2, len(steps), figsize=(3.2 * len(steps), 6), squeeze=False, layout="constrained")
    units, batches = sorted({r["H"] for r in results}), sorted({r["B"] for r in results})
    for row, name in enumerate(("training", "inference")):
        for column, T in enumerate(steps):
            axis = axes[row][column]
            grid = [[float("nan")] * len(batches) for _ in units]
            for result in results:
                if result["T"] == T:
                    ratio = result[name]["ratio"]
                    grid[units.index(result["H"])][batches.index(result["B"])] = ratio
                    at = (batches.index(result["B"]), units.index(result["H"]))
                    color = "black" if 0.4 < ratio < 2.4 else "white"
                    axis.text(*at, f"{ratio:.1f}", ha="center", va="center", fontsize=8, color=color)
            axis.imshow(grid, norm=LogNorm(0.25, 4), cmap="RdBu", aspect="auto")
            axis.set_xticks(range(len(batches)), batches)
            axis.set_yticks(range(len(units)), units)
            axis.set(title=f"{name}, {T} step{'s' * (T > 1)}", xlabel="batch", ylabel="units")
    figure.suptitle("Time of nn.GRU divided by that of EGRU")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """Add the options --steps, --batches and --units."""
    for name, default, text in (
        ("--steps", STEPS, "numbers of steps per sequence"),
        ("--batches", BATCHES, "batch sizes"),
        ("--units", UNITS, "numbers of units"),
    ):
        shown = " ".join(map(str, default))
        parser.add_argument(
            name, nargs="+", type=positive_int, default=list(default), metavar="N", help=f"{text} (default: {shown})"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("cpu small", __doc__)
    add_shapes(parser)
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="number of threads (default: the setting of torch)"
    )
    parser.add_argument(
        "--seconds", type=positive_float, default=0.5, metavar="S", help="seconds per measurement (default: 0.5)"
    )
    args = parser.parse_all(arguments)
    out = results_file(parser, args.out, "small_cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    results: list[dict[str, Any]] = []
    for T, B, H in shapes(args.steps, args.batches, args.units):
        result = compare(T, B, H, args.seconds)
        results.append(result)
        parts = [
            f"{name} {result[name]['egru_us']:9.0f} µs {result[name]['ratio']:6.2f}x"
            for name in ("training", "inference", "cell training", "cell inference")
            if name in result
        ]
        print(f"T {T:3} B {B:3} H {H:3}, activity {result['activity']:4.0%}: {', '.join(parts)}", flush=True)
    summary = summarise(results)
    for name, values in summary.items():
        print(describe_summary(name, values))
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": dense_rivals.versions(),
    }
    write_results(out, {**facts, "summary": summary, "shapes": results}, lambda file: plot(results, file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
