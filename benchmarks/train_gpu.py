"""Training speed and memory of one recurrent layer on a GPU: ours against cuDNN's GRU and LSTM, and EvNN if installed.

    python benchmarks/train_gpu.py --rows smnist ptb dvs --out result.json

Each contestant runs forward and backward on random input of the same shape, all of them taking turns in one process;
medians over ``--repeats`` turns of ``--rounds`` rounds each. Before anything is timed, our layer is compared with the
float64 reference on the first steps of every row, outputs and gradients (gpu_check.py): a wrong kernel gets no time,
and the exit status is 1. Memory is what a forward pass leaves for its backward pass, and its peak.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gpu_check
import torch
from evnn_rival import evnn
from gpu_contestants import CUDNN, Contestant, cudnn, make_egru


@dataclasses.dataclass(frozen=True)
class Row:
    """One shape. ``train`` is False where only the forward pass is timed."""

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
GATES = ("after", "before")


def contestants(row: Row, options: argparse.Namespace) -> tuple[dict[str, Contestant], dict[str, Any], dict[str, str]]:
    """Who competes, by name; the errors of those that were checked; and who does not, with the reason."""
    found: dict[str, Contestant] = {}
    errors: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    input_gradient = row.inputs > 1 and not options.no_input_gradient
    shape, run = (row.T, row.B, row.inputs), (row.train, input_gradient)
    for kind in options.rivals:
        if kind == "evnn":
            make = evnn(cuda=True)
            if isinstance(make, str):
                left_out["evnn"] = make
            else:
                found["evnn float32"] = Contestant(make(row.inputs, row.H), shape, "float32", *run)
            continue
        for precision in options.precisions:
            found.update(cudnn(kind, precision, *shape, row.H, *run))
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
                found[name + suffix] = Contestant(layer, shape, precision, *run)
    return found, errors, left_out


def graphed(run: Callable[[], None]) -> Callable[[], None]:
    """The same round recorded once and replayed: what the device takes when the host is not in its way."""
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
    """Median milliseconds of one round of each, taking turns of ``rounds``.

    One round a turn is a latency: the device waits for the host to begin. Several, one behind the other as in training,
    let the host run ahead where it can.
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
    """Check, weigh and time everybody on one shape; prints as it goes."""
    print(row)
    found, errors, left_out = contestants(row, options)
    for name, reason in left_out.items():
        print(f"  left out: {name}: {reason}")
    memory = {name: one.memory() for name, one in found.items()}
    timed: dict[str, Callable[[], None]] = {
        name: one for name, one in found.items() if options.time_all or not name.endswith(("lean", "autocast"))
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
    return {
        "row": dataclasses.asdict(row),
        "milliseconds": times,
        "memory_bytes": memory,
        "errors": errors,
        "left_out": left_out,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rivals", nargs="*", default=[*CUDNN, "evnn"], choices=[*CUDNN, "evnn"])
    parser.add_argument("--precisions", nargs="+", default=list(gpu_check.PRECISIONS), choices=gpu_check.PRECISIONS)
    parser.add_argument("--gates", nargs="+", default=list(GATES), choices=GATES)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in a turn, without waiting in between")
    parser.add_argument("--graph", action="store_true", help="replay every round from a CUDA graph")
    parser.add_argument(
        "--time-all", action="store_true", help="time lean layers and rivals under autocast too, not only weigh them"
    )
    parser.add_argument("--no-input-gradient", action="store_true", help="the input is data, as in a first layer")
    parser.add_argument("--out", type=pathlib.Path, help="write the numbers here as JSON")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    record = {
        "command": "python benchmarks/train_gpu.py " + re.sub(r" ?--out \S+", "", " ".join(given)),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rows": [],
    }
    for name in options.rows:
        record["rows"].append(run_row(ROWS[name], options))
        torch.cuda.empty_cache()
        if options.out:  # after every row: a run that is cut short keeps what it has
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(reason.startswith("wrong") for row in record["rows"] for reason in row["left_out"].values()))


if __name__ == "__main__" and main():
    sys.exit(1)
