"""What data-parallel training should scale like, from bytes and operations: an estimate, nothing is run.

    python benchmarks/scaling.py

A step is operations at the share of the peak that the measured step of the ptb-evnn recipe reaches on one H200
(benchmarks/results/h200_train_step.json), then an all-reduce of the gradients: inside a node by reduce-scatter and
all-gather, between nodes every GPU with its eighth over its own link. DDP starts it while the backward pass still runs;
how much of it that hides is not known beforehand, so both ends are shown: all of it, and nothing.
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
"""bf16 products of an H200, as the kernels' notes count."""
GPUS_PER_NODE = 8
VOCABULARY = {"33M": 10_000, "1B": 50_000}


@dataclasses.dataclass(frozen=True)
class Links:
    """Bytes a second of one GPU, one way, and seconds for a message; ``between`` nodes and ``inside`` one."""

    inside: float = 360e9
    between: float = 42e9
    latency: float = 15e-6


def parameters(hidden: int, embedding: int, layers: int, vocabulary: int) -> int:
    with torch.device("meta"):
        model = LanguageModel(vocabulary, embedding, hidden, num_layers=layers)
    return sum(p.numel() for p in model.parameters())


def all_reduce(size: float, gpus: int, links: Links) -> float:
    """Seconds for ``size`` bytes."""
    local, nodes = min(gpus, GPUS_PER_NODE), -(-gpus // GPUS_PER_NODE)
    seconds = 2 * (local - 1) / local * size / links.inside + 2 * (local - 1) * links.latency
    if nodes > 1:
        seconds += 2 * (nodes - 1) / nodes * size / local / links.between + 2 * (nodes - 1) * links.latency
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", type=float, default=Links.inside, help="bytes/s of a GPU inside a node")
    parser.add_argument("--between", type=float, default=Links.between, help="bytes/s of a GPU between nodes")
    options = parser.parse_args()
    links = Links(options.inside, options.between)
    measured = json.loads(MEASURED.read_text())
    config = experiments.find("ptb-evnn").make()
    words = measured["batch"] * sum(measured["lengths"]) / len(measured["lengths"])
    small = parameters(config.hidden, config.embedding, config.layers, VOCABULARY["33M"])  # pyright: ignore
    large = parameters(6144, 4096, 4, VOCABULARY["1B"])
    step = measured["milliseconds"]["trainer"] / 1e3
    share = 6 * small * words / step / PEAK
    print(f"One H200, ptb-evnn, {small / 1e6:.1f}M parameters, {words:.0f} words a step: {1e3 * step:.2f} ms measured,")
    print(f"{6 * small * words / 1e12:.2f} TFLOP, {100 * share:.0f} % of {PEAK / 1e12:.0f} TFLOP/s. Links of a GPU:")
    print(
        f"{links.inside / 1e9:.0f} GB/s inside a node of {GPUS_PER_NODE}, {links.between / 1e9:.0f} GB/s between nodes."
    )
    print()
    print("| parameters | of the peak | GPUs | gradients | compute, ms | exchange, ms | speed-up: none hidden | all |")
    print("|---|---|---|---|---|---|---|---|")
    for count, rate in ((small, share), (large, share), (large, 0.5)):
        compute = 6 * count * words / (rate * PEAK)
        for gpus in (8, 64):
            for kind, width in (("float32", 4), ("bfloat16", 2)):
                sent = all_reduce(width * count, gpus, links)
                low, high = gpus * compute / (compute + sent), gpus * compute / max(compute, sent)
                cells = f"{count / 1e6:.1f}M | {100 * rate:.0f} % | {gpus} | {kind}"
                print(f"| {cells} | {1e3 * compute:.1f} | {1e3 * sent:.1f} | {low:.1f} | {high:.1f} |")


if __name__ == "__main__":
    main()
