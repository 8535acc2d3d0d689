"""Training speed of one recurrent layer on a GPU: ours against cuDNN's GRU, interleaved in one process.

    python benchmarks/train_gpu.py --rows smnist ptb dvs --out result.json

Each contestant runs forward and backward on random input of the same shape; medians over ``--repeats`` turns of
``--rounds`` rounds each. Before anything is timed, our layer is compared with the float64 reference on the first steps
of every row, outputs and gradients: a wrong kernel gets no time.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable

import torch
from torch import nn

import egru
from egru.events import Surrogate


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
SURROGATE = Surrogate(width=0.5, height=0.3, bounded=True)


def aligned(size: int) -> int:
    """The next size at which cuDNN is at its best: the multiple of 64 above, but for the single-feature input."""
    return size if size == 1 else -(-size // 64) * 64


def make_egru(row: Row, reset_gate: str) -> egru.EGRU:
    torch.manual_seed(0)
    return egru.EGRU(row.inputs, row.H, reset_gate=reset_gate, surrogate=SURROGATE, device="cuda")


def check(row: Row, reset_gate: str, precision: str) -> dict[str, float]:
    """Our layer against the reference on the first steps of a row: raises where they differ by more than rounding."""
    layer, steps = make_egru(row, reset_gate), min(row.T, 6)
    x = torch.randn(steps, row.B, row.inputs, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        y, _ = layer(x)
    exact = egru.EGRU(
        row.inputs, row.H, reset_gate=reset_gate, surrogate=SURROGATE, backend="reference", device="cuda",
        dtype=torch.float64,
    )  # fmt: skip
    exact.load_state_dict(layer.state_dict())
    y_exact, _ = exact(x.double())
    # A state that rounding moved over its threshold is not an error of the kernel, but it must be rare.
    same = (y != 0) == (y_exact != 0)
    flipped = 1 - same.double().mean().item()
    off = (((y.double() - y_exact) * same).norm() / y_exact.norm()).item()
    if not (flipped < (0.01 if precision else 1e-4) and off < (0.02 if precision else 1e-3)):
        raise SystemExit(f"{row.name} {reset_gate} {precision}: wrong output, flipped {flipped:.2g}, off {off:.2g}")
    if not row.train:
        return {"flipped": flipped, "output": off}
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (y_exact * weight.double()).sum().backward()
    errors = {"flipped": flipped, "output": off}
    for name, parameter in layer.named_parameters():
        other = exact.get_parameter(name).grad
        if parameter.grad is None or other is None:
            continue
        error = ((parameter.grad.double() - other).norm() / other.norm().clamp_min(1e-30)).item()
        errors[name] = error
        if not error < (0.15 if precision else 2e-2):  # flipped events move gradients too
            raise SystemExit(f"{row.name} {reset_gate} {precision}: gradient of {name} is off by {error:.2g}")
    return errors


def contestant(
    layer: nn.Module, row: Row, inputs: int, precision: str, tf32: bool, input_gradient: bool
) -> Callable[[], None]:
    """One round: forward, and backward from a random gradient."""
    native = precision == "bfloat16" and isinstance(layer, nn.GRU)
    dtype = torch.bfloat16 if native else torch.float32
    layer = layer.to(dtype)
    if isinstance(layer, nn.GRU):
        layer.flatten_parameters()
    x = torch.randn(row.T, row.B, inputs, device="cuda", dtype=dtype, requires_grad=input_gradient and row.train)
    grad: list[torch.Tensor] = []
    # Made once, as around a whole model: making one takes longer than entering it.
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16" and not native)

    def run() -> None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        with torch.set_grad_enabled(row.train), autocast:
            y = layer(x)[0]
        if not row.train:
            return
        if not grad:
            grad.append(torch.randn_like(y) * 1e-3)
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        y.backward(grad[0])

    return run


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


def contestants(
    row: Row, precisions: list[str], gates: list[str], input_gradient: bool
) -> dict[str, Callable[[], None]]:
    """cuDNN's GRU in float32, TF32 and bf16, at the exact and at the aligned size; then ours."""
    found: dict[str, Callable[[], None]] = {}
    for size in ("exact", "aligned"):
        inputs, H = (row.inputs, row.H) if size == "exact" else (aligned(row.inputs), aligned(row.H))
        if size == "aligned" and (inputs, H) == (row.inputs, row.H):
            continue
        for kind in ("float32", "tf32", "bfloat16"):
            gru = nn.GRU(inputs, H, device="cuda")
            precision = "bfloat16" if kind == "bfloat16" else ""
            run = contestant(gru, row, inputs, precision, kind == "tf32", input_gradient)
            found[f"cudnn {kind} {size}"] = run
    for reset_gate in gates:
        for precision in precisions:
            name = f"egru {precision or 'float32'} {reset_gate}"
            found[name] = contestant(make_egru(row, reset_gate), row, row.inputs, precision, False, input_gradient)
    return found


def measure(runs: dict[str, Callable[[], None]], repeats: int, rounds: int) -> dict[str, float]:
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--precisions", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--gates", nargs="+", default=["after", "before"], choices=["after", "before"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in a turn, without waiting in between")
    parser.add_argument("--graph", action="store_true", help="replay every round from a CUDA graph")
    parser.add_argument("--no-input-gradient", action="store_true", help="the input is data, as in a first layer")
    parser.add_argument("--out", type=pathlib.Path, help="write the numbers here as JSON")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    precisions = ["" if p == "float32" else p for p in options.precisions]
    results = []
    for name in options.rows:
        row = ROWS[name]
        errors = {f"{g} {p or 'float32'}": check(row, g, p) for g in options.gates for p in precisions}
        runs = contestants(row, precisions, options.gates, not options.no_input_gradient and row.inputs > 1)
        if options.graph:
            runs = {key: graphed(run) for key, run in runs.items()}
        times = measure(runs, options.repeats, options.rounds)
        rival = min(value for key, value in times.items() if key.startswith("cudnn"))
        print(f"{row}")
        for key, value in times.items():
            per_step = f"{value * 1000 / row.T:8.2f} us/step"
            print(f"  {key:28s} {value:9.3f} ms {per_step}  {rival / value:5.2f} x best cuDNN", flush=True)
        results.append({"row": dataclasses.asdict(row), "milliseconds": times, "errors": errors})
        torch.cuda.empty_cache()
    record = {
        "command": "python benchmarks/train_gpu.py " + re.sub(r" ?--out \S+", "", " ".join(given)),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rows": results,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
