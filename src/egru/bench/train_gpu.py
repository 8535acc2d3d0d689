"""Training speed and memory of one recurrent layer on a GPU: EGRU against cuDNN's GRU and LSTM and, if installed, EvNN.

    egru bench gpu train                                     # all shapes, layers and precisions
    egru bench gpu train --rows smnist ptb --rivals gru --precisions bfloat16

Shapes (rows), similar to those of the paper's experiments:

    smnist   784 steps, batch 500, 1 input, 590 units
    ptb      68 steps, batch 64, 1350 inputs, 1350 units
    dvs      68 steps, batch 256, 2048 inputs, 1024 units
    single   256 steps, batch 1, 1350 inputs, 1350 units; forward pass only

The layers take turns in one process, on random input. A turn is ``--rounds`` forward and backward passes without
waiting for the device; the result is the median time over ``--repeats`` turns, per round. Memory is what a forward pass
keeps for the backward pass ("held"), and the peak during the forward pass. With `--energy`, the energy per round is
measured too.

Before timing, outputs and gradients of EGRU on the first steps are compared with a float64 reference. A kernel that
differs is not timed, and the exit code is 1. EvNN is the code of the paper's authors.
"""

import argparse
import dataclasses
import datetime
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from egru.bench import gpu_check, make_parser, results_file
from egru.bench.energy import add_option, measure_energy
from egru.bench.evnn import find_evnn
from egru.bench.gpu_contestants import CUDNN, Contestant, cudnn, make_egru
from egru.cli.arguments import positive_int
from egru.energy import EnergyMeter
from egru.types import ResetGate


@dataclasses.dataclass(frozen=True)
class Row:
    """The shape of a layer and its input. If ``train`` is False, only the forward pass is timed."""

    name: str
    T: int
    B: int
    inputs: int
    H: int
    train: bool = True


ROWS = {
    row.name: row
    for row in (
        Row("smnist", 784, 500, 1, 590),
        Row("ptb", 68, 64, 1350, 1350),
        Row("dvs", 68, 256, 2048, 1024),
        Row("single", 256, 1, 1350, 1350, train=False),
    )
}
GATES: tuple[ResetGate, ...] = ("after", "before")


def contestants(row: Row, options: argparse.Namespace) -> tuple[dict[str, Contestant], dict[str, Any], dict[str, str]]:
    """Return the contestants by name, the errors of those that were checked, and why others are left out."""
    entries: dict[str, Contestant] = {}
    errors: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    input_gradient = row.inputs > 1 and not options.no_input_gradient
    shape, run = (row.T, row.B, row.inputs), (row.train, input_gradient)
    for rival in options.rivals:
        if rival == "evnn":
            make = find_evnn(cuda=True)
            if isinstance(make, str):
                left_out["evnn"] = make
            else:
                entries["evnn float32"] = Contestant(make(row.inputs, row.H), shape, "float32", *run)
            continue
        for precision in options.precisions:
            entries.update(cudnn(rival, precision, *shape, row.H, *run))
    x = torch.randn(min(row.T, 6), row.B, row.inputs, device="cuda")
    for reset_gate in options.gates:
        for precision in options.precisions:
            name = f"egru {precision} {reset_gate}"
            try:
                errors[name] = gpu_check.check_layer(
                    make_egru(row.inputs, row.H, reset_gate), x, precision, gradients=row.train
                )
            except gpu_check.Wrong as error:
                left_out[name] = f"wrong: {error}"
                continue
            for suffix in ("", " lean"):
                layer = make_egru(row.inputs, row.H, reset_gate, lean=bool(suffix))
                entries[name + suffix] = Contestant(layer, shape, precision, *run)
    return entries, errors, left_out


def graphed(run: Callable[[], None]) -> Callable[[], None]:
    """Record a round as a CUDA graph and return its replay, whose time does not depend on the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(runs: Mapping[str, Callable[[], None]], repeats: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds per round of each contestant. A turn has ``rounds`` rounds.

    One round per turn measures latency: the device waits for the host. With several rounds per turn, as in training,
    the host can run ahead.
    """
    for run in runs.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(rounds):
                run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def run_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Check all contestants on one shape, measure their memory and time, and print a table."""
    print(row)
    entries, errors, left_out = contestants(row, options)
    for name, reason in left_out.items():
        print(f"  left out: {name}: {reason}")
    memory = {name: entry.memory() for name, entry in entries.items()}
    timed: dict[str, Callable[[], None]] = {
        name: entry for name, entry in entries.items() if options.time_all or not name.endswith(("lean", "autocast"))
    }
    if options.graph:
        timed = {name: graphed(run) for name, run in timed.items()}
    times = measure(timed, options.repeats, options.rounds)
    rival = min((ms for name, ms in times.items() if name.startswith("cudnn gru")), default=float("nan"))
    print(f"  {'':30s} {'ms':>9s} {'us/step':>9s} {'x best GRU':>10s} {'held MB':>9s} {'peak MB':>9s}")
    for name, bytes_ in memory.items():
        ms = times.get(name)
        speed = f"{'':30s}" if ms is None else f"{ms:9.3f} {ms * 1000 / row.T:9.2f} {rival / ms:10.2f}"
        print(f"  {name:30s} {speed:30s} {bytes_['held'] / 1e6:9.1f} {bytes_['peak'] / 1e6:9.1f}", flush=True)
    energy: dict[str, Any] = {}
    if options.energy:
        with EnergyMeter("cuda") as meter:
            energy = {"energy": measure_energy(timed, meter, torch.cuda.synchronize)}
    return {
        "row": dataclasses.asdict(row),
        "milliseconds": times,
        "memory_bytes": memory,
        "errors": errors,
        "left_out": left_out,
        **energy,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("gpu train", __doc__)
    rivals, precisions = [*CUDNN, "evnn"], gpu_check.PRECISIONS
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="shapes, see above (default: all)"
    )
    parser.add_argument(
        "--rivals", nargs="*", default=rivals, choices=rivals, help="layers to compare EGRU with (default: all)"
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=list(precisions),
        choices=precisions,
        help="precisions of the matrix products (default: all)",
    )
    parser.add_argument(
        "--gates",
        nargs="+",
        default=list(GATES),
        choices=GATES,
        help="apply the reset gate after or before the recurrent product (default: both)",
    )
    parser.add_argument("--repeats", type=positive_int, default=7, metavar="N", help="turns per layer (default: 7)")
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="rounds per turn (default: 5)")
    parser.add_argument(
        "--graph", action="store_true", help="replay rounds from a CUDA graph, to exclude the overhead of the host"
    )
    parser.add_argument(
        "--time-all",
        action="store_true",
        help="also time EGRU with lean=True and cuDNN under autocast (default: memory only)",
    )
    parser.add_argument(
        "--no-input-gradient", action="store_true", help="do not compute the gradient of the input, as in a first layer"
    )
    add_option(parser)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_all(arguments)
    if not torch.cuda.is_available():
        parser.error("this benchmark requires a CUDA device")
    out = results_file(parser, options.out, "train_gpu")
    record = {
        "command": "egru bench gpu train " + re.sub(r" ?--out \S+", "", " ".join(arguments)),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rows": [],
    }
    for name in options.rows:
        record["rows"].append(run_row(ROWS[name], options))
        torch.cuda.empty_cache()
        out.write_text(json.dumps(record, indent=1) + "\n")  # after every row, in case the run is cut short
    print(f"written: {out}")
    return int(any(reason.startswith("wrong") for row in record["rows"] for reason in row["left_out"].values()))


if __name__ == "__main__":
    sys.exit(main())
