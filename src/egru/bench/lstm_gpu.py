"""Event LSTMs on a GPU: ELSTM against cuDNN's LSTM (nn.LSTM) in training and inference.

    egru bench gpu lstm                                        # all shapes and precisions
    egru bench gpu lstm --rows ptb --precisions bfloat16 --graph

The shapes (rows) and the way of measuring are those of `egru bench gpu train`. nn.LSTM runs as a module of the given
precision, ELSTM under autocast. Time does not depend on the activity, because products on a GPU are dense.

Layers are made from an nn.LSTM (`ELSTM.from_lstm`) and emit all events. Before timing, outputs and gradients of the
first steps are compared with the nn.LSTM in float64. A layer that differs is not timed, and the exit code is 1.
"""

import copy
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import egru
from egru.bench import gpu_check, make_parser, results_file
from egru.bench.gpu_contestants import Contestant
from egru.bench.train_gpu import ROWS, Row, graphed, measure
from egru.cli.arguments import positive_int

TOLERANCE = {"float32": 2e-5, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest error of outputs and gradients, relative to their norm. The reference does not round operands."""
STEPS = 6


def check_layer(layer: egru.ELSTM, lstm: nn.LSTM, x: Tensor, precision: str) -> dict[str, float]:
    """Return the errors of a layer that was made from ``lstm``, for random gradients of the output.

    Raises:
        gpu_check.Wrong: If an output or a gradient differs from ``lstm`` in float64 by more than rounding.
    """
    exact = copy.deepcopy(lstm).to(x.device, torch.float64)
    names = [name for name, _ in exact.named_parameters()]
    expected = exact(x.double())[0]
    gpu_check.set_tf32(precision)
    with gpu_check.autocast(x.device.type, precision):
        y = layer(x)[0]
    grad = torch.randn_like(y)
    targets = [expected, *torch.autograd.grad(expected, list(exact.parameters()), grad.double())]
    values = [y, *torch.autograd.grad(y, [layer.get_parameter(name) for name in names], grad)]
    errors: dict[str, float] = {}
    for name, value, target in zip(["output", *names], values, targets, strict=True):
        errors[name] = ((value.double() - target).norm() / target.norm()).item()
        if not errors[name] < TOLERANCE[precision]:  # NaN fails too
            raise gpu_check.Wrong(f"{name} off by {errors[name]:.2g}")
    return errors


def run_row(row: Row, precisions: Sequence[str], repeats: int, rounds: int, graph: bool) -> dict[str, Any]:
    """Check the layers on one shape, measure them and print a table."""
    print(row)
    shape, input_gradient = (row.T, row.B, row.inputs), row.inputs > 1
    entries: dict[str, Contestant] = {}
    errors: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for precision in precisions:
        torch.manual_seed(0)
        lstm = nn.LSTM(row.inputs, row.H)
        layer = egru.ELSTM.from_lstm(lstm, backend="cuda").to("cuda")
        x = torch.randn(min(row.T, STEPS), row.B, row.inputs, device="cuda")
        try:
            errors[precision] = check_layer(layer, lstm, x, precision)
        except gpu_check.Wrong as error:
            left_out[precision] = f"wrong: {error}"
            print(f"  left out: {precision}: {error}")
            continue
        entries[f"lstm {precision}"] = Contestant(lstm, shape, precision, row.train, input_gradient, native=True)
        entries[f"elstm {precision}"] = Contestant(layer, shape, precision, row.train, input_gradient)
    memory = {name: entry.memory() for name, entry in entries.items()}
    runs: dict[str, Callable[[], None]] = {name: graphed(entry) if graph else entry for name, entry in entries.items()}
    times = measure(runs, repeats, rounds)
    ratios = {precision: times[f"lstm {precision}"] / times[f"elstm {precision}"] for precision in errors}
    print(f"  {'':10s} {'nn.LSTM ms':>11s} {'ELSTM ms':>11s} {'ratio':>7s} {'held MB':>17s}")
    for precision, ratio in ratios.items():
        pair = (f"lstm {precision}", f"elstm {precision}")
        held = " ".join(f"{memory[name]['held'] / 1e6:8.1f}" for name in pair)
        print(f"  {precision:10s} {times[pair[0]]:11.3f} {times[pair[1]]:11.3f} {ratio:7.2f} {held:>17s}", flush=True)
    return {
        "row": dataclasses.asdict(row),
        "milliseconds": times,
        "ratios": ratios,
        "memory_bytes": memory,
        "errors": errors,
        "left_out": left_out,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("gpu lstm", __doc__)
    precisions = gpu_check.PRECISIONS
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(ROWS),
        choices=list(ROWS),
        help="shapes of `egru bench gpu train` (default: all)",
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=list(precisions),
        choices=precisions,
        help="precisions of the matrix products (default: all)",
    )
    parser.add_argument("--repeats", type=positive_int, default=7, metavar="N", help="turns per layer (default: 7)")
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="rounds per turn (default: 5)")
    parser.add_argument(
        "--graph", action="store_true", help="replay rounds from a CUDA graph, to exclude the overhead of the host"
    )
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_all(arguments)
    if not torch.cuda.is_available():
        parser.error("this benchmark requires a CUDA device")
    out = results_file(parser, options.out, "lstm_gpu")
    record: dict[str, Any] = {
        "command": " ".join(["egru bench gpu lstm", *arguments]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rows": [],
    }
    for name in options.rows:
        row = run_row(ROWS[name], options.precisions, options.repeats, options.rounds, options.graph)
        record["rows"].append(row)
        torch.cuda.empty_cache()
        out.write_text(json.dumps(record, indent=1) + "\n")  # after every row, in case the run is cut short
    print(f"written: {out}")
    return int(any(row["left_out"] for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
