"""Run reports and rasters with made-up numbers."""

import math

import numpy as np

from egru.activity import ActivitySummary, EnergyModel, LayerActivity, LinearActivity
from egru.report import Epoch, Raster, RunReport, ThresholdSearch
from egru.training import Scores
from egru.training.records import ThresholdTrial

STEPS = 640


def dense_activity(hidden: int = 32) -> ActivitySummary:
    layer = LayerActivity("gru", "GRU", 1, hidden, 3, None, STEPS, (STEPS,) * hidden, STEPS, None, None, 0.0)
    return ActivitySummary((layer,), (LinearActivity("readout", hidden, 10, 10, 10 * hidden),), 3_500, EnergyModel())


def event_activity(
    units: tuple[float, ...] = (0.0, 0.0, 1.0, *np.linspace(0.05, 0.25, 29).tolist()),
) -> ActivitySummary:
    hidden, active = len(units), tuple(round(STEPS * unit) for unit in units)
    states = STEPS * hidden
    layer = LayerActivity(
        "egru", "EGRU", 1, hidden, 3, None, STEPS, active, STEPS // 2, round(0.3 * states), round(0.4 * states), 0.0
    )
    readout = LinearActivity("readout", hidden, 10, 10, round(10 * sum(units)))
    return ActivitySummary((layer,), (readout,), 3_532, EnergyModel())


def run(
    name: str = "EGRU", epochs: int = 4, accuracy: float = 0.978, activity: ActivitySummary | None = None, **changes
):
    activity = activity or (event_activity() if name.startswith("EGRU") else dense_activity())
    events = activity.backward_sparsity is not None
    history = tuple(
        Epoch(i, 2 * math.exp(-i), 1 - 0.9 * math.exp(-i), 1 - math.exp(-i) if events else None, 0.5)
        for i in range(1, epochs + 1)
    )
    values = {"history": history, "accuracy": accuracy, "activity": activity, "seconds": 2.5, "seed": 3} | changes
    return RunReport(name, **values)


def searched(name: str = "EGRU", **changes) -> RunReport:
    """Return a run that was derived from another one by raising thresholds."""
    trials = tuple(
        ThresholdTrial((floor,), Scores(0.1 + floor / 100, 0.98 - floor / 100), 0.8 + floor / 10, 3000.0 - 500 * floor)
        for floor in (0.0, 0.5, 1.0)
    )
    return run(name, epochs=0, search=ThresholdSearch("first", trials, 1), seconds=75.0, **changes)


def pair() -> list[RunReport]:
    return [run("GRU", accuracy=0.982), run("EGRU")]


def raster(T: int = 20, inputs: int = 1, hidden: int = 16, image: bool = True, sign: float = 1.0) -> Raster:
    rng = np.random.default_rng(0)
    events = np.where(rng.random((T, hidden)) < 0.2, sign * rng.random((T, hidden)) + 0.01, 0.0)
    picture = rng.random((8, 8)) if image else None
    return Raster("A seven", rng.random((T, inputs)), events, picture, "predicted 7")
