"""The streaming engine with event LSTMs: parity in float64, number formats, stacks, state, masks and counters."""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from egru import EGRU, ELSTM, ActivityMonitor, EventEngine, EventState, Threshold
from egru.runtime.network import extract_network
from egru.runtime.reference import ReferenceRunner
from egru.types import COMPARES, RESETS, WEIGHT_FORMATS, Compare, Reset, WeightFormat

core = pytest.importorskip("egru._core", reason="the compiled core is not built")

MARGIN = 1e-5
"""Minimum distance of every compared value from its threshold. float32 errors are about 1e-7, so events must agree."""
CLOSE = 1e-6


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=core.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    core.force_level(request.param)
    yield request.param
    core.force_level("auto")


def build(inputs: int, hidden: int, seed: int = 0, **options: Any) -> ELSTM:
    torch.manual_seed(seed)
    options = {"threshold": Threshold("identity", mean=0.05, std=0.03), **options}
    return ELSTM(inputs, hidden, **options).eval()


def in_float64(layer: ELSTM, x: Tensor) -> tuple[Tensor, EventState, float]:
    double = copy.deepcopy(layer).double()
    double.backend = "reference"
    margins: list[float] = []
    double.observe(lambda record: margins.append(float((record.c - record.theta).abs().min())))
    with torch.no_grad():
        y, last = double(x.double())
    return y, last, min(margins)


def reference_case(inputs: int, hidden: int, steps: int, rows: int, **options: Any) -> Any:
    for seed in itertools.count():
        layer = build(inputs, hidden, seed, **options)
        x = torch.randn(steps, rows, inputs)
        y, state, margin = in_float64(layer, x)
        if margin > MARGIN:
            assert 0.02 < float((y != 0).double().mean()) < 0.9  # some units are active, but not all
            return layer, x, y, state
    raise AssertionError


def assert_matches(engine: EventEngine, y: Tensor, expected: Tensor, state: EventState) -> None:
    assert torch.equal(y != 0, expected != 0)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=CLOSE)
    torch.testing.assert_close(engine.state["c"].double(), state.c, rtol=0, atol=CLOSE)
    torch.testing.assert_close(engine.state["y"].double(), state.y, rtol=0, atol=CLOSE)


def divided(*args: Any, **options: Any) -> EventEngine:
    """Return an engine that always uses all of its threads; small layers would run on one."""
    engine = EventEngine(*args, **options)
    assert engine._core is not None
    engine._core.always_divide(True)
    return engine


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("compare", COMPARES)
def test_events_and_state_match_float64(level: str, reset: Reset, compare: Compare) -> None:
    layer, x, y, state = reference_case(21, 45, 20, 3, reset=reset, compare=compare, zoneout=0.1, reset_scale=0.8)
    for threads in (1, 2):
        engine = divided(layer, threads=threads, streams=3)
        assert engine.level == level
        assert_matches(engine, engine.run(x), y, state)
        engine.reset()
        assert_matches(engine, torch.stack([engine.step(row) for row in x]), y, state)
    single = divided(layer, threads=2)
    assert_matches(single, single.run(x[:, 1]), y[:, 1], EventState(state.c[:, 1], state.y[:, 1]))


@pytest.mark.parametrize(("inputs", "hidden"), [(1, 1), (1, 17), (16, 16), (17, 31), (33, 65), (3, 130)])
def test_odd_sizes_match_float64(level: str, inputs: int, hidden: int) -> None:
    layer = build(inputs, hidden, threshold=Threshold.constant(0.02))
    x = torch.randn(15, inputs)
    y, state, margin = in_float64(layer, x)
    assert margin > MARGIN
    for threads in (1, 3):
        engine = divided(layer, threads=threads)
        assert_matches(engine, engine.run(x), y, state)


def test_equals_a_dense_lstm_stack() -> None:
    lstm = nn.LSTM(20, 50, 2)
    engine = EventEngine(ELSTM.from_lstm(lstm))
    x = torch.randn(30, 20)
    with torch.no_grad():
        y, (h, c) = lstm(x)
    torch.testing.assert_close(engine.run(x), y, rtol=0, atol=CLOSE)
    torch.testing.assert_close(engine.state["y"], h, rtol=0, atol=CLOSE)
    torch.testing.assert_close(engine.state["c"], c, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_quantised_steps_match_float64(level: str, weights: WeightFormat) -> None:
    """Compare single steps from the same state with the same rounding in float64; see test_engine.py."""
    layer = build(24, 70, compare="output", threshold=Threshold("identity", mean=0.0, std=0.1))
    reference = ReferenceRunner(extract_network(layer), weights, 1, dtype=torch.float64)
    engine = EventEngine(layer, weights)
    expected = np.empty((1, 1, 70), np.float64)
    for x in torch.randn(40, 24):
        y = engine.step(x)
        reference.run(x.numpy()[None, None], None, False, expected)
        state = EventState(**engine.state)
        np.testing.assert_allclose(state.c.numpy(), reference.get_state(0).c.numpy(), rtol=0, atol=CLOSE)
        torch.testing.assert_close(y, state.y[0])
        reference.set_state(0, state.c, state.y)


class Model(nn.Module):
    """A stack of both cells between an embedding and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.lower, self.upper = build(24, 40), EGRU(40, 33, threshold=Threshold.constant(0.05))
        self.readout = nn.Linear(33, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(self.upper(self.lower(self.embedding(ids))[0])[0])


@pytest.mark.parametrize("table", [0, 1 << 20])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_stacks_of_both_cells_with_embedding_and_readout(weights: WeightFormat, table: int) -> None:
    torch.manual_seed(3)
    model, ids = Model().eval(), torch.randint(11, (20, 3))
    plain = EventEngine(model, weights, streams=3, token_table=table).run(ids)
    others = [divided(model, weights, threads=n, streams=3, token_table=table) for n in (2, 4)]
    assert all(torch.equal(engine.run(ids), plain) for engine in others)
    if weights == "float32":
        with torch.no_grad():
            torch.testing.assert_close(plain, model(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_saved_engines_states_and_masks_continue_with_the_same_bits(weights: WeightFormat, tmp_path: Path) -> None:
    layer, x = build(20, 40, num_layers=2, compare="output"), torch.randn(12, 3, 20)
    engine = EventEngine(layer, weights, streams=3)
    expected = engine.run(x)
    engine.save(tmp_path / "engine.safetensors")
    loaded = EventEngine.load(tmp_path / "engine.safetensors")
    assert torch.equal(loaded.run(x[:5]), expected[:5])
    other = EventEngine(layer, weights, streams=3)
    other.state = loaded.state
    # Streams 0 and 2 advance first, then stream 1: each computes what it would alone.
    first = torch.stack([other.step(row, mask=[True, False, True]) for row in x[5:]])
    second = torch.stack([other.step(row, mask=[False, True, False]) for row in x[5:]])
    assert torch.equal(first[:, [0, 2]], expected[5:, [0, 2]])
    assert torch.equal(second[:, 1], expected[5:, 1])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("compare", COMPARES)
def test_counters_equal_those_of_the_monitor(threads: int, compare: Compare) -> None:
    """Four gates: 4H multiply-adds per active input, per active unit and per step."""
    layer, x = build(10, 80, num_layers=2, compare=compare), torch.randn(66, 10)
    engine = divided(layer, threads=threads)
    y = engine.run(x)
    events = engine.activity.events
    with ActivityMonitor(layer) as monitor, torch.no_grad():
        layer(x)
    summary = monitor.summary()
    assert [sum(one.active) for one in summary.layers] == list(events)
    below = EventEngine(build(10, 80, compare=compare)).run(x)  # the first layer alone: same seed, same weights
    recurrent = sum(events) - int((below[-1] != 0).sum()) - int((y[-1] != 0).sum())
    assert events == (int((below != 0).sum()), int((y != 0).sum()))
    assert engine.activity.macs == 4 * 80 * (66 * 10 + events[0] + recurrent + 2 * 66)
    # The monitor counts the events of a step as the input of the next, so it includes the last step.
    costs = sum(one.cost.forward * one.steps for one in summary.layers)
    assert costs == pytest.approx(4 * 80 * (66 * 10 + events[0] + sum(events) + 2 * 66))


def test_forward_that_computes_something_else_is_refused() -> None:
    class Doubled(ELSTM):
        def forward(self, input: Any, hx: Any = None) -> Any:
            y, state = super().forward(input, hx)
            return 2 * y, state

    with pytest.raises(TypeError, match=r"Doubled.forward and the engine compute different outputs"):
        EventEngine(Doubled(4, 8))
    EventEngine(ELSTM(4, 8, compare="output"))
