"""Time a converted GRU with delta events on the CPU against activity, next to `torch.nn.GRU`.

    python benchmarks/train_delta.py                        # prints the table, about two minutes
    python benchmarks/train_delta.py --out train_delta.json
    python benchmarks/train_delta.py --quick                # one small layer, two activities

The layer is `egru.convert(torch.nn.GRU(...))` with the default initialisation. Its thresholds are adjusted until a
given share of its units send an event per step. The input is a random walk. Outputs and gradients of the layer are
compared with the reference in float64 first, those of a layer without thresholds with `torch.nn.GRU`. Then the
contestants take turns in one process. Medians of a call without gradients and of a training step are reported. The
gradient of the input is included if there are several inputs.
"""

import argparse
import copy
import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import egru
from egru.bench import train_cpu

try:
    from benchmarks.conditions import conditions, load_average
except ImportError:  # run as a script
    from conditions import conditions, load_average

ACTIVITIES = (1.0, 0.5, 0.2, 0.1, 0.05)


class Size(NamedTuple):
    steps: int
    batch: int
    inputs: int
    hidden: int


SIZES = (Size(200, 64, 1, 590), Size(100, 32, 4, 128), Size(35, 64, 1350, 1350))


def set_activity(layer: nn.Module, x: Tensor, activity: float) -> float:
    """Scale the thresholds, which differ between units, and return the activity that they give."""
    low, high, reached = 0.0, 1.0, 1.0
    threshold = layer.get_parameter("threshold_l0")
    shape = 0.5 + torch.rand_like(threshold)
    with torch.no_grad():
        for _ in range(0 if activity == 1.0 else 10):
            scale = (low + high) / 2
            threshold.copy_(scale * shape)
            y = layer(x)[0]
            reached = (y[1:] != y[:-1]).float().mean().item()
            low, high = (scale, high) if reached > activity else (low, scale)
    return reached


def outputs_and_gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)[0]
    y.square().sum().backward()
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    gradients = [x.grad, *(layer.get_parameter(name).grad for name in names)]
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


def check(layer: nn.Module, other: nn.Module, x: Tensor) -> None:
    """Compare a part of the sequences in float64."""
    layer, other, part = copy.deepcopy(layer).double(), copy.deepcopy(other).double(), x[:, :4].double()
    for value, expected in zip(outputs_and_gradients(layer, part), outputs_and_gradients(other, part), strict=True):
        error = (value - expected).abs().max().item() / expected.abs().max().item()
        if not error < 1e-10:
            raise SystemExit(f"the outputs or gradients differ by {error:.2g}: nothing was timed")


def measure(size: Size, activity: float, repeats: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(size.steps, size.batch, size.inputs).cumsum(0) / size.steps**0.5
    gru = nn.GRU(size.inputs, size.hidden)
    layer = egru.convert(gru)
    check(layer, gru, x)
    reached = set_activity(layer, x, activity)
    reference = copy.deepcopy(layer)
    reference.backend = "reference"  # pyright: ignore[reportArgumentType]
    check(layer, reference, x)
    x.requires_grad_(size.inputs > 1)
    gradient = torch.randn(size.steps, size.batch, size.hidden)
    models: dict[str, nn.Module] = {"torch.nn.GRU": gru, "delta": layer}

    def inference(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                model(x)

        return run

    row: dict[str, Any] = {**size._asdict(), "activity": reached}
    work: dict[str, Callable[[nn.Module], Callable[[], None]]] = {
        "inference": inference,
        "training": lambda model: train_cpu.training_step(model, x, gradient),
    }
    for name, start in work.items():
        times = train_cpu.interleave({key: start(model) for key, model in models.items()}, repeats, seconds)
        row[name] = {key: statistics.median(values) * 1e3 for key, values in times.items()}
        row[name]["ratio"] = row[name]["torch.nn.GRU"] / row[name]["delta"]
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls per contestant (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="time limit per time (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small layer, two activities")
    parser.add_argument("--out", type=pathlib.Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    load = load_average()
    sizes, activities = (SIZES, ACTIVITIES) if not options.quick else ((Size(70, 20, 2, 40),), (1.0, 0.1))
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for activity in activities:
            rows.append(measure(size, activity, options.repeats, options.seconds))
            parts = [
                f"{name} {rows[-1][name]['delta']:7.1f} ms, {rows[-1][name]['ratio']:.2f} x nn.GRU"
                for name in ("inference", "training")
            ]
            print(f"H {size.hidden:4}, {100 * rows[-1]['activity']:5.1f} % active: {'; '.join(parts)}", flush=True)
    result = {
        "rows": rows,
        "unit": "milliseconds per call",
        **conditions(load),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
