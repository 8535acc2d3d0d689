"""A sensor stream in which 99 % of the steps are empty: ordinary steps against ``EventEngine.step_at``.

    python benchmarks/sensor_stream.py
    python benchmarks/sensor_stream.py --steps 5000 --rounds 3 --out stream.json

A layer, or a stack of two, reads 16 channels. At one step in a hundred, one or two random channels have an event. The
readout is a decaying trace with four outputs.

Four ways to compute the same outputs take turns in one process, on one thread: ``step`` for every step; ``run`` for the
whole stream at once, which is not streaming; ``step_at`` for the steps with an event; ``step_at, new`` for the same
without a buffer. ``step`` and ``step_at`` write to a buffer. Times are medians over rounds. Outputs are compared first.

A second table shows layers pruned in blocks of 16 outputs, in which an input or an event reaches few units: ``step_at``
updates only these, against ``step_at`` with dense packing, which updates all of them.
"""

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import egru
from egru.environment import cpu_name

CHANNELS = 16
SIZES = ((128, 1), (512, 1), (256, 2))  # units, layers
# Units, weight sparsity, scale of the weights: the larger it is, the more events units send.
PRUNED = (
    (2048, 0.5, 1.3),
    *(
        (units, sparsity, scale)
        for units, sparsity in ((512, 0.9), (2048, 0.9), (2048, 0.95))
        for scale in (0.35, 0.5, 1.3)
    ),
)
DENSITY = 0.01


def make_engine(units: int, layers: int) -> egru.EventEngine:
    torch.manual_seed(0)
    layer = egru.EGRU(CHANNELS, units, layers, threshold=egru.Threshold.constant(0.3)).eval()
    return egru.EventEngine(layer, readout=nn.Linear(units, 4), trace=0.99)


def make_stream(steps: int) -> tuple[Tensor, list[tuple[int, list[int], list[float]]]]:
    """Return a stream as rows and as events: step, channels, values. The last step has an event."""
    generator = torch.Generator().manual_seed(1)
    active = torch.rand(steps, generator=generator) < DENSITY
    active[-1] = True
    rows, events = torch.zeros(steps, CHANNELS), []
    for t in active.nonzero()[:, 0].tolist():
        count = int(torch.randint(1, 3, (), generator=generator))
        channels = sorted(torch.randperm(CHANNELS, generator=generator)[:count].tolist())
        rows[t, channels] = 4.0
        events.append((t, channels, [4.0] * count))
    return rows, events


def measure(units: int, layers: int, steps: int, rounds: int) -> dict[str, Any]:
    engine = make_engine(units, layers)
    rows, events = make_stream(steps)
    row_list, out = list(rows), torch.empty(engine.output_size)

    def step() -> Tensor:
        engine.reset()
        for row in row_list:
            engine.step(row, out)
        return out

    def run() -> Tensor:
        engine.reset()
        return torch.as_tensor(engine.run(rows, last=True))

    def step_at() -> Tensor:
        engine.reset()
        for t, channels, values in events:
            engine.step_at(t, channels, values, out)
        return out

    def step_at_new() -> Tensor:
        engine.reset()
        gap = None
        for t, channels, values in events:
            gap = engine.step_at(t, channels, values)
        assert gap is not None
        return gap.output

    ways: dict[str, Callable[[], Tensor]] = {
        "step": step,
        "run": run,
        "step_at": step_at,
        "step_at, new": step_at_new,
    }
    counts: dict[str, Any] = {}
    expected = step().clone()
    for name, way in ways.items():
        engine.reset_activity()
        difference = float((way() - expected).abs().max())
        if not difference < 1e-4:
            raise RuntimeError(f"sensor_stream: the output of {name} differs by {difference:g} from ordinary steps")
        counts[name] = {"macs": engine.activity.macs, "events": sum(engine.activity.events), "difference": difference}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    per_step = {name: statistics.median(times) / steps * 1e6 for name, times in seconds.items()}

    def ratio(slow: str, fast: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))

    return {
        "units": units,
        "layers": layers,
        "inputs": len(events),
        "microseconds_per_step": per_step,
        "microseconds_per_input": per_step["step_at"] * steps / len(events),
        "step / step_at": ratio("step", "step_at"),
        "step / step_at, new": ratio("step", "step_at, new"),
        "run / step_at": ratio("run", "step_at"),
        "counts": counts,
    }


def make_pruned(units: int, sparsity: float, scale: float, packing: Any) -> egru.EventEngine:
    """Return an engine whose weights have zero blocks of 16 outputs, the same in all gates.

    The other weights are scaled so that the activity depends little on size and sparsity.
    """
    torch.manual_seed(0)
    layer = egru.EGRU(CHANNELS, units, threshold=egru.Threshold.constant(0.3)).eval()
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0"):
            weights = layer.get_parameter(name)
            kept = (torch.rand(units // 16, weights.shape[1]) >= sparsity).repeat_interleave(16, 0)
            weights.mul_(kept.repeat(3, 1) * scale * (1 - sparsity) ** -0.5)
        layer.get_parameter("weight_ih_l0").mul_((units / 512) ** 0.5)
    return egru.EventEngine(layer, readout=nn.Linear(units, 4), trace=0.99, packing=packing)


def measure_pruned(units: int, sparsity: float, scale: float, steps: int, rounds: int) -> dict[str, Any]:
    engines = {packing: make_pruned(units, sparsity, scale, packing) for packing in ("auto", "dense")}
    rows, events = make_stream(steps)
    seconds: dict[str, list[float]] = {packing: [] for packing in engines}
    outputs = {packing: torch.empty(4) for packing in engines}
    expected = torch.as_tensor(engines["dense"].run(rows, last=True))
    engines["dense"].reset_activity()
    for _ in range(rounds + 1):
        for packing, engine in engines.items():
            engine.reset()
            begin = time.perf_counter()
            for t, channels, values in events:
                engine.step_at(t, channels, values, outputs[packing])
            seconds[packing].append(time.perf_counter() - begin)
            difference = float((outputs[packing] - expected).abs().max())
            if not difference < 1e-4:
                raise RuntimeError(f"sensor_stream: {packing} packing differs by {difference:g} from ordinary steps")
    return {
        "units": units,
        "weight_sparsity": sparsity,
        "scale": scale,
        "microseconds_per_input": {
            packing: statistics.median(times[1:]) / len(events) * 1e6 for packing, times in seconds.items()
        },
        "dense / auto": statistics.median(b / a for a, b in zip(seconds["auto"], seconds["dense"], strict=True)),
        "macs_per_input": {
            packing: engine.activity.macs / (rounds + 1) / len(events) for packing, engine in engines.items()
        },
        "events_per_input": sum(engines["auto"].activity.events) / (rounds + 1) / len(events),
    }


def main(arguments: list[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="length of the stream (default: 20000)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of every way (default: 15)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "date": f"{datetime.date.today()}",
        "cpu": cpu_name(),
        "level": make_engine(1, 1).level,
        "steps": options.steps,
        "rounds": options.rounds,
        "sizes": [measure(units, layers, options.steps, options.rounds) for units, layers in SIZES],
        "pruned": [measure_pruned(*network, options.steps, options.rounds) for network in PRUNED],
    }
    print(
        "units  layers  µs per step: step    run  step_at   µs per input   step / step_at   without buffer   "
        "run / step_at"
    )
    for row in results["sizes"]:
        times = row["microseconds_per_step"]
        print(
            f"{row['units']:5d}  {row['layers']:6d}  {times['step']:17.2f} {times['run']:6.2f} {times['step_at']:8.3f}"
            f"  {row['microseconds_per_input']:13.2f}  {row['step / step_at']:14.1f}x"
            f"  {row['step / step_at, new']:14.1f}x {row['run / step_at']:14.1f}x"
        )
    print("\nunits  weight sparsity  events per input  µs per input: dense    auto   dense / auto   MACs: dense / auto")
    for row in results["pruned"]:
        times, macs = row["microseconds_per_input"], row["macs_per_input"]
        ratios = f"{row['dense / auto']:12.2f}x  {macs['dense'] / macs['auto']:18.1f}x"
        print(
            f"{row['units']:5d}  {row['weight_sparsity']:15.0%}  {row['events_per_input']:16.1f}"
            f"  {times['dense']:19.2f} {times['auto']:7.2f}  {ratios}"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
