"""Time a training step on the CPU against weight sparsity, with and without skipping zero blocks.

    python benchmarks/train_weight_sparsity.py                        # prints the table, about two minutes
    python benchmarks/train_weight_sparsity.py --out train_weight_sparsity.json
    python benchmarks/train_weight_sparsity.py --quick                # one small layer, two sparsities

Layers and inputs are those of `egru bench cpu train` (20 % of the units active, 50 % open, the reset gate before the
product, the gradient of the input included). Random blocks of 16 outputs and one source are set to zero in both
weights; a weight with one source stays as it is. Thresholds are adjusted after that.

Contestants are the core without skipping (`dense`), and the core as it is (`auto`), which skips zero blocks if a weight
has enough of them. Both are compared with the reference in float64 first, skipping enforced for the second one. Then
they take turns in one process. Medians and the ratio dense / auto are reported. All weights receive gradients, zero or
not, so the products for the weight gradients are the same for both.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import egru
from egru.bench import train_cpu
from egru.kernels.cpu import kernel as cpu

try:
    from benchmarks.conditions import conditions, load_average
except ImportError:  # run as a script
    from conditions import conditions, load_average

SPARSITIES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95)
BATCH = 64
BLOCK = 16
NEVER, ALWAYS = 2.0, 0.0
"""Values of ``Limits.zero_blocks``."""


def clear_blocks(weight: Tensor, sparsity: float) -> None:
    """Set random blocks of a weight ``(gates * H, sources)`` to zero, and scale the others to keep the variance."""
    if not sparsity or weight.shape[1] == 1:
        return
    for gate in weight.detach().chunk(3):
        for unit in range(0, len(gate), BLOCK):
            gate[unit : unit + BLOCK] *= (torch.rand(weight.shape[1]) >= sparsity) / (1 - sparsity) ** 0.5


def prune(layer: egru.EGRU, sparsity: float) -> None:
    for name in ("weight_ih_l0", "weight_hh_l0"):
        clear_blocks(layer.get_parameter(name), sparsity)


def with_limit(value: float, function: Callable[[], Any]) -> Any:
    """Call ``function`` with another value of ``Limits.zero_blocks``."""
    before = cpu.limits
    cpu.limits = dataclasses.replace(before, zero_blocks=value)
    try:
        return function()
    finally:
        cpu.limits = before


def measure(setting: train_cpu.Setting, sparsity: float, repeats: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    x = train_cpu.make_input(setting)
    layer, reached = train_cpu.make_layer(setting, x, lambda layer: prune(layer, sparsity))
    for limit in (NEVER, ALWAYS):
        difference = with_limit(limit, lambda: train_cpu.check(layer, x))
        if not difference < 1e-12:
            raise SystemExit(
                f"the kernel differs from the reference by {difference:.2g} at {setting}: nothing was timed"
            )
    x.requires_grad_(setting.input_gradient)
    step = train_cpu.training_step(layer, x, torch.randn(setting.steps, setting.batch, setting.hidden))
    contestants = {"dense": lambda: with_limit(NEVER, step), "auto": step}
    times = train_cpu.interleave(contestants, repeats, seconds)
    median = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return {
        **dataclasses.asdict(setting),
        "sparsity": sparsity,
        "zero_weights": {
            name: (layer.get_parameter(f"weight_{name}_l0") == 0).float().mean().item() for name in ("ih", "hh")
        },
        "reached": reached,
        "milliseconds": median,
        "repeats": len(times["auto"]),
        "ratio": median["dense"] / median["auto"],
        "best_ratio": min(times["dense"]) / min(times["auto"]),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", choices=list(train_cpu.SIZES), default=list(train_cpu.SIZES))
    parser.add_argument("--sparsity", type=float, nargs="+", default=list(SPARSITIES), metavar="S")
    parser.add_argument("--gate", choices=train_cpu.GATES, default="before", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps per contestant (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit per row (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small layer, two sparsities")
    parser.add_argument("--out", type=pathlib.Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    load = load_average()
    settings = [
        train_cpu.Setting(hidden, *train_cpu.SIZES[hidden], BATCH, options.gate, 0.2, 0.5, True)
        for hidden in options.hidden
    ]
    sparsities = options.sparsity
    if options.quick:
        settings, sparsities = [train_cpu.Setting(64, 6, 40, 16, options.gate, 0.2, 0.5, True)], [0.0, 0.9]
    rows: list[dict[str, Any]] = []
    for setting in settings:
        for sparsity in sparsities:
            rows.append(measure(setting, sparsity, options.repeats, options.seconds))
            ms = rows[-1]["milliseconds"]
            print(
                f"H {setting.hidden:4} weights {100 * sparsity:3.0f} % zero: dense {ms['dense']:7.1f} ms, "
                f"auto {ms['auto']:7.1f} ms, {rows[-1]['ratio']:.2f} x (best {rows[-1]['best_ratio']:.2f} x)",
                flush=True,
            )
    result = {
        "rows": rows,
        "block": BLOCK,
        "unit": "milliseconds per training step",
        **conditions(load),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
