"""Estimate how data-parallel training scales, from bytes and operations. Nothing is run.

    python benchmarks/scaling.py

The compute time of a step assumes the fraction of peak performance that one H200 reached with the ptb-evnn recipe
(benchmarks/results/h200_train_step.json). An all-reduce of the gradients follows: reduce-scatter and all-gather inside
a node, and between nodes one link per GPU with an eighth of the data.

DDP overlaps the all-reduce with the backward pass. How much of it is hidden is not known in advance, so the table shows
both limits: nothing hidden and everything hidden.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from egru import experiments
from egru.models import LanguageModel

MEASURED = Path(__file__).parent / "results" / "h200_train_step.json"
PEAK = 790e12
"""bfloat16 FLOP/s of an H200; see docs/results/gpu-notes.md."""
GPUS_PER_NODE = 8
VOCABULARY = {"33M": 10_000, "1B": 50_000}


@dataclasses.dataclass(frozen=True)
class Links:
    """Assumed network of one GPU.

    Attributes:
        inside: Bytes per second inside a node, one way.
        between: Bytes per second between nodes, one way.
        latency: Seconds per message.
    """

    inside: float = 360e9
    between: float = 42e9
    latency: float = 15e-6


def count_parameters(hidden: int, embedding: int, layers: int, vocabulary: int) -> int:
    with torch.device("meta"):
        model = LanguageModel(vocabulary, embedding, hidden, num_layers=layers)
    return sum(p.numel() for p in model.parameters())


def all_reduce(size: float, gpus: int, links: Links) -> float:
    """Return the seconds that an all-reduce of ``size`` bytes takes."""
    local, nodes = min(gpus, GPUS_PER_NODE), -(-gpus // GPUS_PER_NODE)
    seconds = 2 * (local - 1) / local * size / links.inside + 2 * (local - 1) * links.latency
    if nodes > 1:
        seconds += 2 * (nodes - 1) / nodes * size / local / links.between + 2 * (nodes - 1) * links.latency
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--inside",
        type=float,
        default=Links.inside,
        help="bytes per second and GPU inside a node; default: %(default)g",
    )
    parser.add_argument(
        "--between",
        type=float,
        default=Links.between,
        help="bytes per second and GPU between nodes; default: %(default)g",
    )
    options = parser.parse_args()
    links = Links(options.inside, options.between)
    measured = json.loads(MEASURED.read_text())
    config = experiments.find("ptb-evnn").make()
    words = measured["batch"] * sum(measured["lengths"]) / len(measured["lengths"])
    small = count_parameters(config.hidden, config.embedding, config.layers, VOCABULARY["33M"])  # pyright: ignore
    large = count_parameters(6144, 4096, 4, VOCABULARY["1B"])
    step = measured["milliseconds"]["trainer"] / 1e3
    fraction = 6 * small * words / step / PEAK
    print(
        f"One H200 needs {1e3 * step:.2f} ms (measured) per step of `ptb-evnn`, which has {small / 1e6:.1f}M "
        f"parameters and reads {words:.0f} words per step.\nThat is {6 * small * words / 1e12:.2f} TFLOP per step, or "
        f"{100 * fraction:.0f} % of {PEAK / 1e12:.0f} TFLOP/s. The links of a GPU transfer "
        f"{links.inside / 1e9:.0f} GB/s within a node\nof {GPUS_PER_NODE} GPUs "
        f"and {links.between / 1e9:.0f} GB/s between nodes.\n"
    )
    print(
        "| parameters | of peak | GPUs | gradients | compute, ms | exchange, ms | speed-up without overlap "
        "| with full overlap |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for count, rate in ((small, fraction), (large, fraction), (large, 0.5)):
        compute = 6 * count * words / (rate * PEAK)
        for gpus in (8, 64):
            for dtype, width in (("float32", 4), ("bfloat16", 2)):
                exchange = all_reduce(width * count, gpus, links)
                low, high = gpus * compute / (compute + exchange), gpus * compute / max(compute, exchange)
                cells = f"{count / 1e6:.1f}M | {100 * rate:.0f} % | {gpus} | {dtype}"
                print(f"| {cells} | {1e3 * compute:.1f} | {1e3 * exchange:.1f} | {low:.1f} | {high:.1f} |")


if __name__ == "__main__":
    main()
