"""Time per step of exported C code against torch, ONNX Runtime, ncnn and EventEngine, on one thread of this CPU.

    python benchmarks/c_rivals.py                       # writes benchmarks/results/c_rivals.json
    python benchmarks/c_rivals.py --rounds 3 --out x.json
    python benchmarks/c_rivals.py --table               # print the stored results as Markdown

Dense rivals are GRUs of the same size in torch, ONNX Runtime and ncnn, with float32 and int8 weights. The event
networks are those of ``egru bench cpu infer``, with a fifth of the units active: in EventEngine, and as C code compiled
with ``-O3 -march=native``, called through ctypes one step at a time and for a whole sequence.

Outputs are checked first: those of dense networks against torch in float64, those of the engine against float64 step by
step, those of the C code against the engine. Contestants take turns in one process. Times are medians over rounds.
"""

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import egru
from egru import EventEngine
from egru.bench import dense_rivals
from egru.bench.event_networks import Contestant, calibrate, event_layer
from egru.bench.infer_cpu import measure
from egru.environment import cpu_name
from egru.files import replace_file
from egru.types import C_WEIGHT_FORMATS, WeightFormat

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.runtime.c.networks import CNetwork, address, compile_library, fixed_point  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "c_rivals.json"
SIZES, SPARSITY, LENGTH = (256, 590), 0.8, 128
OPTIONS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math")


def event_contestants(units: int, folder: Path) -> list[Contestant]:
    """Return engines with float32 and int8 weights, and the three forms of C code."""
    layer = event_layer(units, 1, seed=0)
    torch.manual_seed(2)
    x = torch.randn(LENGTH + 384, 1)
    calibrate(layer, x, SPARSITY)
    x = x[-LENGTH:].contiguous()
    formats: tuple[WeightFormat, ...] = ("float32", "int8")
    engines = {weights: EventEngine(layer, weights) for weights in formats}
    outputs = {weights: np.asarray(engine.run(x)).copy() for weights, engine in engines.items()}
    result: list[Contestant] = []
    for weights, engine in engines.items():
        with torch.no_grad():
            error = float((torch.from_numpy(outputs[weights]) - layer(x[:, None])[0][:, 0]).abs().median())
        rows, out = list(x), torch.empty(units)
        result.append(
            Contestant(
                f"EventEngine {weights}",
                lambda i, engine=engine, rows=rows, out=out: engine.step(rows[i], out),
                lambda engine=engine, x=x: engine.run(x),
                "" if error < (1e-6 if weights == "float32" else 1e-3) else f"median error {error:.1e}",
                lambda engine=engine: {"activity_sparsity": 1 - engine.activity.rates[0]},
            )
        )
    for weights in C_WEIGHT_FORMATS:
        path = folder / weights
        path.mkdir()
        integer = weights == "integer"
        library = compile_library(path, {"net": EventEngine(layer)}, *OPTIONS, weights=weights)
        network = CNetwork(library, "net", units, integer)
        steps = network.run(x) / (2.0**16 if integer else 1.0)
        expected = outputs["int8" if weights == "int8" else "float32"]
        share = _share_that_differs(steps, expected)  # rounding moves single events
        # The integer form rounds weights and states. Rounding the weights alone changes a tenth of the outputs here.
        limit = 2 * _share_that_differs(outputs["int8"], outputs["float32"]) if integer else 0.01
        values = fixed_point(x) if integer else x.numpy()
        pointers = [address(values[i : i + 1]) for i in range(LENGTH)]
        buffer = np.empty(units, np.int32 if integer else np.float32)
        target, step, run = address(buffer), library.net_step, library.net_run
        result.append(
            Contestant(
                f"C code {weights}",
                lambda i, f=step, n=network, p=pointers, to=target: f(n.state, p[i], to),
                lambda f=run, n=network, p=pointers, to=target: f(n.state, p[0], LENGTH, to),
                "" if share < limit else f"{share:.1%} of the outputs differ, more than {limit:.1%}",
                lambda share=share, values=values, buffer=buffer: {"outputs_that_differ": share},
            )
        )
    return result


def _share_that_differs(y: np.ndarray, other: np.ndarray) -> float:
    return float((np.abs(y - other) > 1e-3).mean())


def run(units: int, rounds: int) -> dict[str, Any]:
    """Return microseconds per step of every contestant of one size."""
    torch.manual_seed(0)
    gru = nn.GRU(1, units).eval()
    dense = list(dense_rivals.rivals(gru, torch.randn(LENGTH, 1)))
    with tempfile.TemporaryDirectory() as folder:
        events = event_contestants(units, Path(folder))
        contestants = [Contestant(rival.name, rival.step, rival.sequence, rival.wrong) for rival in dense] + events
        return measure(contestants, LENGTH, rounds)


def table(record: dict[str, Any]) -> str:
    """Return one row per contestant, with the times of single steps of all sizes."""
    sizes = record["sizes"]
    lines = ["| microseconds per step |" + "".join(f" {units} units |" for units in sizes)]
    lines.append("|---|" + "---|" * len(sizes))
    for name in next(iter(sizes.values())):
        lines.append(f"| {name} |" + "".join(f" {rows[name]['step']:.1f} |" for rows in sizes.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns of every contestant; default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write the record to this JSON file")
    parser.add_argument("--table", action="store_true", help="print the stored record as a Markdown table")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "versions": {"egru": egru.__version__, **dense_rivals.versions()},
        "options": " ".join(OPTIONS),
        "sparsity": SPARSITY,
        "rounds": args.rounds,
        "sizes": {str(units): run(units, args.rounds) for units in SIZES},
    }
    wrong = {name: row["wrong"] for rows in record["sizes"].values() for name, row in rows.items() if row["wrong"]}
    print(table(record))
    if wrong:
        raise SystemExit(f"wrong outputs: {wrong}")
    replace_file(args.out, (json.dumps(record, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
