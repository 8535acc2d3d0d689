"""Event networks for the streaming benchmark: engines with a given activity sparsity, checked against float64."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egru import EGRU, EventEngine, EventState, Threshold
from egru.runtime.network import extract_network
from egru.runtime.reference import ReferenceRunner
from egru.types import WeightFormat


@dataclasses.dataclass
class Contestant:
    """A network to measure.

    Attributes:
        name: Label in the table.
        step: Advances by one row of the input. None if not supported.
        sequence: Runs the whole input. None if not supported.
        wrong: What is wrong with the output, or an empty string.
        facts: Returns further results. Called after the measurement.
    """

    name: str
    step: Callable[[int], Any] | None
    sequence: Callable[[], Any] | None
    wrong: str = ""
    facts: Callable[[], dict[str, Any]] = dict


def calibrate(layer: EGRU, x: Tensor, sparsity: float, iterations: int = 10) -> None:
    """Set the thresholds to quantiles of the layer's states on ``x``, so that it reaches the activity sparsity."""
    threshold = layer.get_parameter("threshold_l0")
    with torch.no_grad():
        if sparsity == 0:
            threshold.fill_(-10)
            return
        threshold.fill_(0.1)
        states: list[Tensor] = []
        undo = layer.observe(lambda record: states.append(record.c[len(x) // 5 :, 0]))
        for _ in range(iterations):
            layer(x[:, None])
            threshold.copy_((threshold + states.pop().quantile(sparsity, 0)) / 2)
        undo()


def event_layer(units: int, inputs: int, seed: int, **options: Any) -> EGRU:
    torch.manual_seed(seed)
    return EGRU(inputs, units, threshold=Threshold("identity"), **options).eval()


def input_events(inputs: int, steps: int, sparsity: float) -> Tensor:
    """Return the events of a layer of ``inputs`` units with this activity sparsity, driven by 32 random signals."""
    below = event_layer(inputs, 32, seed=1)
    x = torch.randn(steps, 32)
    calibrate(below, x, sparsity)
    with torch.no_grad():
        return below(x)[0]


def check_engine(engine: EventEngine, layer: EGRU, x: Tensor) -> str:
    """Compare every step with the same step in float64, from the same state. Return the first error, or "".

    States within ``margin`` of their threshold are ties. With int8 the operands are rounded to 255 levels. Where that
    rounding is a tie, float32 and float64 may differ by one level, which moves a state by about 1e-4.
    """
    margin = 2e-3 if engine.weights == "int8" else 1e-5
    reference = ReferenceRunner(extract_network(layer, None, None, None), engine.weights, 1, dtype=torch.float64)
    theta = layer.thresholds()["l0"].detach()
    output = np.empty((1, 1, layer.hidden_size))
    engine.reset()
    for t, row in enumerate(x):
        engine.step(row)
        reference.run(row.numpy()[None, None], None, False, output)
        state, target = EventState(**engine.state), reference.get_state(0)
        c = target.c[0]  # before the reset
        if layer.reset == "threshold":
            c = c + layer.reset_scale * theta * (target.y[0] != 0)
        clear = (c - theta).abs() > margin
        if not torch.equal((state.y[0] != 0)[clear], (target.y[0] != 0)[clear]):
            return f"events differ at step {t}"
        error = float((state.c[0] - target.c[0]).abs()[clear].max())
        if error > margin:
            return f"state off by {error:.1e} at step {t}"
        reference.set_state(0, state.c, state.y)
    return ""


def event_contestants(
    units: int,
    inputs: int,
    sparsities: Sequence[float],
    weights: Sequence[WeightFormat],
    length: int,
    dense_input: bool,
    **options: Any,
) -> list[Contestant]:
    """Make one engine per activity sparsity and weight format, and check its output."""
    result: list[Contestant] = []
    for sparsity in sparsities:
        layer = event_layer(units, inputs, seed=0, **options)
        torch.manual_seed(2)
        steps = length + 384  # more than are timed, to choose thresholds
        x = torch.randn(steps, inputs) if dense_input or inputs == 1 else input_events(inputs, steps, sparsity)
        calibrate(layer, x, sparsity)
        x = x[-length:].contiguous()
        for weight in weights:
            engine = EventEngine(layer, weight)
            wrong = check_engine(engine, layer, x[:12])
            engine.reset_activity()
            rows, out, step_out = list(x), torch.empty(length, units), torch.empty(units)

            def facts(engine: EventEngine = engine, density: float = float((x != 0).float().mean())) -> dict[str, Any]:
                activity = engine.activity
                return {
                    "sparsity": 1 - activity.rates[0],
                    "input_density": density,
                    "macs_per_step": activity.macs / activity.steps,
                    "level": engine.level,
                }

            result.append(
                Contestant(
                    f"ours {weight} {sparsity:.0%}" + (" dense input" if dense_input and inputs > 1 else ""),
                    lambda i, engine=engine, rows=rows, out=step_out: engine.step(rows[i], out),
                    lambda engine=engine, x=x, out=out: engine.run(x, out=out),
                    wrong,
                    facts,
                )
            )
    return result
