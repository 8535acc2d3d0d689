"""Event LSTMs on the CPU: ELSTM against nn.LSTM in training and inference, and the streaming engine step by step.

    egru bench cpu lstm                      # H 512 and 1024 at several activities, about two minutes
    egru bench cpu lstm --units 512 --activity 0.2 --threads 1

Training is the forward and backward pass over a batch, with the gradients of all parameters but not of the input.
Inference is the forward pass over the same batch. "stream" is one step of one sequence: `EventEngine.step` against
`nn.LSTM` with a carried state, both on one thread.

Layers are made from an nn.LSTM (`ELSTM.from_lstm`): there is no reset, and the threshold is compared with the output.
One threshold for all units is chosen such that the given fraction of them emits an event. Inputs are random events of
the same density. Before timing, the layer is compared with the reference in float64, and the engine with the layer.

The contestants take turns in one process. A ratio is the median time of nn.LSTM divided by that of the event layer.
"""

import copy
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import egru
from egru.bench import make_parser, results_file
from egru.bench.train_cpu import interleave, machine, training_step
from egru.cli.arguments import fraction, positive_float, positive_int

SIZES = {512: (64, 100, 32), 1024: (1024, 35, 16)}
"""Inputs, steps and batch size by number of units."""
ACTIVITIES = (0.2, 0.05, 1.0)
STREAM_STEPS = 64


def make_layer(lstm: nn.LSTM, x: Tensor, activity: float) -> tuple[egru.ELSTM, float]:
    """Return an event layer with the weights of ``lstm`` and about this activity on ``x``, and the value reached."""
    layer = egru.ELSTM.from_lstm(lstm)
    outputs: list[Tensor] = []
    layer.observe(lambda record: outputs.append(record.c))
    if activity >= 1:
        return layer, 1.0
    low, high, reached = -1.0, 1.0, 1.0
    with torch.no_grad():
        for _ in range(14):
            theta = (low + high) / 2
            layer.get_parameter("threshold_l0").fill_(theta)
            outputs.clear()
            layer(x)
            reached = (outputs[0] > theta).float().mean().item()
            low, high = (theta, high) if reached > activity else (low, theta)
    return copy.deepcopy(layer), reached  # without the observer


def check(layer: egru.ELSTM, x: Tensor) -> float:
    """Return the largest relative difference of an output or gradient to the reference in float64, on a few steps."""
    results: list[list[Tensor]] = []
    for backend in ("reference", "cpu"):
        double = copy.deepcopy(layer).double()
        double.backend = backend
        y, state = double(x[:4, :5].double())
        loss = y.square().sum() + state.c.sum()
        results.append([y, state.c, *torch.autograd.grad(loss, [p for p in double.parameters() if p.requires_grad])])
    return max(((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in zip(*results, strict=True))


def check_engine(layer: egru.ELSTM, engine: egru.EventEngine, x: Tensor) -> float:
    """Return the share of outputs whose events differ between engine and layer."""
    with torch.no_grad():
        expected = layer(x)[0]
    engine.reset()
    return ((engine.run(x) != 0) != (expected != 0)).float().mean().item()


def measure(units: int, activity: float, repeats: int, seconds: float) -> dict[str, Any]:
    """Measure one shape and return times and ratios."""
    torch.manual_seed(0)
    features, steps, batch = SIZES[units]
    x = torch.randn(steps, batch, features) * (torch.rand(steps, batch, features) < activity)
    lstm = nn.LSTM(features, units)
    layer, reached = make_layer(lstm, x, activity)
    difference = check(layer, x)
    if not difference < 1e-12:
        raise SystemExit(f"the kernel differs from the reference by {difference:.2g}: nothing was timed")
    engine = egru.EventEngine(layer)
    stream = x[:, 0].repeat(STREAM_STEPS // steps + 1, 1)[:STREAM_STEPS].contiguous()
    wrong = check_engine(layer, engine, stream)
    if not wrong < 1e-3:
        raise SystemExit(f"events of the engine and the layer differ at {wrong:.2%} of the outputs: nothing was timed")
    grad = torch.randn(steps, batch, units)
    pairs: dict[str, dict[str, Callable[[], None]]] = {
        "training": {"lstm": training_step(lstm, x, grad), "elstm": training_step(layer, x, grad)},
        "inference": {"lstm": _inference(lstm, x), "elstm": _inference(layer, x)},
        "stream": {"lstm": _stream_lstm(lstm, stream), "elstm": _stream_engine(engine, stream)},
    }
    row: dict[str, Any] = {"units": units, "inputs": features, "steps": steps, "batch": batch, "activity": reached}
    threads = torch.get_num_threads()
    for name, pair in pairs.items():
        torch.set_num_threads(1 if name == "stream" else threads)
        times = interleave(pair, repeats, seconds)
        scale = 1e6 / STREAM_STEPS if name == "stream" else 1e3
        median = {contestant: statistics.median(values) * scale for contestant, values in times.items()}
        unit = "microseconds_per_step" if name == "stream" else "milliseconds"
        row[name] = {unit: median, "ratio": median["lstm"] / median["elstm"], "repeats": len(times["lstm"])}
    torch.set_num_threads(threads)
    return row


def _inference(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            layer(x)

    return run


def _stream_lstm(lstm: nn.LSTM, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        state = None
        with torch.inference_mode():
            for row in x:
                _, state = lstm(row[None], state)

    return run


def _stream_engine(engine: egru.EventEngine, x: Tensor) -> Callable[[], None]:
    out = torch.empty(engine.output_size)

    def run() -> None:
        for row in x:
            engine.step(row, out)

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("cpu lstm", __doc__)
    parser.add_argument(
        "--units", type=int, nargs="+", default=list(SIZES), choices=list(SIZES), help="numbers of units (default: all)"
    )
    parser.add_argument(
        "--activity", type=fraction, nargs="+", default=list(ACTIVITIES), metavar="A", help="fractions of active units"
    )
    parser.add_argument("--threads", type=positive_int, default=2, metavar="N", help="threads of torch (default: 2)")
    parser.add_argument("--repeats", type=positive_int, default=15, metavar="N", help="timed rounds (default: 15)")
    parser.add_argument(
        "--seconds", type=positive_float, default=5.0, metavar="S", help="time limit per comparison (default: 5)"
    )
    args = parser.parse_all(arguments)
    torch.set_num_threads(args.threads)
    out = results_file(parser, args.out, "lstm_cpu")
    rows: list[dict[str, Any]] = []
    for units in args.units:
        for activity in args.activity:
            row = measure(units, activity, args.repeats, args.seconds)
            rows.append(row)
            ratios = "  ".join(f"{name} {row[name]['ratio']:.2f}x" for name in ("training", "inference", "stream"))
            print(f"H {units:4} activity {row['activity']:.2f}  {ratios}", flush=True)
    out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
