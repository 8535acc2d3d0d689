"""Measure the accuracy of the demo's EGRU in the streaming engine with float32, bfloat16 and int8 weights.

    python benchmarks/quantised_digits.py [--seed 0]

The network of ``examples/digits.py`` is trained, then :class:`egru.EventEngine` reads every test digit. These numbers
are not used for any decision.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

import torch
from rich.progress import Progress

import egru
from egru.types import WEIGHT_FORMATS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from digits import Config, run  # noqa: E402


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the training; default: %(default)s")
    default = ROOT / "benchmarks" / "results" / "quantised_digits.json"
    parser.add_argument("--out", type=Path, default=default, help="write the record to this JSON file")
    args = parser.parse_args()
    data = egru.data.digits()
    with torch.enable_grad(), Progress() as progress:
        report, model = run("EGRU", data, dataclasses.replace(Config(), seed=args.seed), progress)
    layer = model.rnn
    assert isinstance(layer, egru.EGRU)
    model.eval()
    x, y = data.test
    exact, _ = layer(x)
    rows = {}
    for weights in WEIGHT_FORMATS:
        engine = egru.EventEngine(layer, weights=weights)
        events = torch.empty_like(exact)
        for i, sequence in enumerate(x):
            engine.reset()
            events[i] = torch.as_tensor(engine.run(sequence.contiguous()))
        gain = (1 - model.decay) / (1 - model.decay ** x.shape[1])
        trace = egru.exponential_trace(events, model.decay, gain=gain, last=True, batch_first=True)
        accuracy = (model.readout(model.normalise(trace)).argmax(-1) == y).double().mean().item()
        changed = ((events != 0) != (exact != 0)).double().mean().item()
        rows[weights] = {
            "test_accuracy": accuracy,
            "events_that_differ": changed,
            "events": (events != 0).double().mean().item(),
        }
        print(
            f"{weights:9} test accuracy {100 * accuracy:.2f} %, {100 * changed:.3f} % of events differ from the layer"
        )
    assert math.isclose(rows["float32"]["test_accuracy"], report.accuracy, abs_tol=1 / len(y) + 1e-9)
    args.out.write_text(json.dumps({"seed": args.seed, "layer": report.accuracy, "engine": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
