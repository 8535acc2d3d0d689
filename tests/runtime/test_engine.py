"""The streaming engine: parity with the layers in float64 at every dispatch level, and bit-identical results."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from egru import EGRU, EGRUCell, EventEngine, EventState, Threshold
from egru.runtime import compare
from egru.runtime.network import Trace, extract_network
from egru.runtime.reference import ReferenceRunner
from egru.types import RESET_GATES, RESETS, WEIGHT_FORMATS, Reset, ResetGate, WeightFormat

core = pytest.importorskip("egru._core", reason="the compiled core is not built")

MARGIN = 1e-5
"""Minimum distance of every state from its threshold. float32 errors are about 1e-7, so events must agree."""
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


def build(inputs: int, hidden: int, seed: int = 0, **options: Any) -> EGRU:
    torch.manual_seed(seed)
    options = {"threshold": Threshold("identity", mean=0.08, std=0.05), **options}
    return EGRU(inputs, hidden, **options).eval()


def in_float64(layer: EGRU, x: Tensor, state: EventState | None = None) -> tuple[Tensor, EventState, float]:
    """Return ``(y, state, margin)`` of the layer, computed in float64 by the reference kernel."""
    double = copy.deepcopy(layer).double()
    double.backend = "reference"
    margins: list[float] = []
    double.observe(lambda record: margins.append(float((record.c - record.theta).abs().min())))
    with torch.no_grad():
        y, last = double(x.double(), None if state is None else EventState(state.c.double(), state.y.double()))
    return y, last, min(margins)


def reference_case(
    inputs: int, hidden: int, steps: int, rows: int, **options: Any
) -> tuple[EGRU, Tensor, Tensor, EventState]:
    """Return a layer, an input, its events and last state in float64; states are not within MARGIN of a threshold."""
    for seed in itertools.count():
        layer = build(inputs, hidden, seed, **options)
        x = torch.randn(steps, rows, inputs)
        y, state, margin = in_float64(layer, x)
        if margin > MARGIN:
            assert 0.02 < float((y != 0).double().mean()) < 0.9  # some units are active, but not all
            return layer, x, y, state
    raise AssertionError


def assert_matches(engine: EventEngine, y: Tensor, y_ref: Tensor, state: EventState) -> None:
    assert torch.equal(y != 0, y_ref != 0)
    torch.testing.assert_close(y.double(), y_ref, rtol=0, atol=CLOSE)
    final = engine.state
    torch.testing.assert_close(final["c"].double(), state.c, rtol=0, atol=CLOSE)
    torch.testing.assert_close(final["y"].double(), state.y, rtol=0, atol=CLOSE)


def divided(*args: Any, **options: Any) -> EventEngine:
    """Return an engine that always uses all of its threads; small layers would run on one."""
    engine = EventEngine(*args, **options)
    assert engine._core is not None
    engine._core.always_divide(True)
    return engine


def run_from_rest(engine: EventEngine, x: Any) -> Tensor:
    engine.reset()
    return torch.as_tensor(engine.run(x))


# ---- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("gate", RESET_GATES)
def test_events_and_state_match_float64(level: str, reset: Reset, gate: ResetGate) -> None:
    layer, x, y, state = reference_case(21, 45, 20, 3, reset=reset, reset_gate=gate, zoneout=0.1, reset_scale=0.8)
    for threads in (1, 2):
        engine = divided(layer, threads=threads, streams=3)
        assert engine.level == level
        assert_matches(engine, engine.run(x), y, state)
        engine.reset()
        assert_matches(engine, torch.stack([engine.step(row) for row in x]), y, state)
        single = divided(layer, threads=threads)
        for row in range(3):
            single.reset()
            assert_matches(single, single.run(x[:, row]), y[:, row], EventState(state.c[:, row], state.y[:, row]))


@pytest.mark.parametrize("reset", RESETS)
def test_reset_scale_per_unit_matches_float64(level: str, reset: Reset) -> None:
    options: dict[str, Any] = {"num_layers": 2, "reset": reset, "threshold": Threshold("clamp", mean=0.1)}
    layer, x, *_ = reference_case(21, 45, 20, 1, **options)
    layer.reset_scale = torch.rand(90)
    y, state, margin = in_float64(layer, x[:, 0])
    assert margin > MARGIN
    engine = EventEngine(layer)
    assert engine.level == level
    assert_matches(engine, engine.run(x[:, 0]), y, state)


def test_negative_or_nan_reset_scale_raises(level: str) -> None:
    layer = build(3, 4)
    layer.reset_scale = torch.tensor([0.5, -0.1, 0.5, 0.5])
    with pytest.raises(ValueError, match=r"reset_scale must not be negative, got -0\.1"):
        EventEngine(layer)
    layer.reset_scale[1] = torch.nan
    with pytest.raises(ValueError, match="reset_scale contains nan; expected finite values"):
        EventEngine(layer)


@pytest.mark.parametrize(("inputs", "hidden"), [(1, 1), (1, 17), (16, 16), (17, 31), (33, 65), (3, 130)])
def test_odd_sizes_match_float64(level: str, inputs: int, hidden: int) -> None:
    layer = build(inputs, hidden, threshold=Threshold.constant(0.02))
    x = torch.randn(15, inputs)
    y, _, margin = in_float64(layer, x)
    assert margin > MARGIN
    for threads in (1, 3):
        out = divided(layer, threads=threads).run(x)
        assert torch.equal(out != 0, y != 0)
        torch.testing.assert_close(out.double(), y, rtol=0, atol=CLOSE)


def test_equals_dense_gru_if_thresholds_are_below_every_state(level: str) -> None:
    gru = nn.GRU(20, 50, 2)
    layer = EGRU.from_gru(gru, reset="none", reset_gate="after", threshold=Threshold.constant(-10.0))
    x = torch.randn(30, 20)
    with torch.no_grad():
        y, _ = gru.double()(x.double())
    torch.testing.assert_close(EventEngine(layer).run(x).double(), y, rtol=0, atol=CLOSE)


def test_no_events_if_thresholds_are_above_every_state() -> None:
    engine = EventEngine(build(5, 20, threshold=Threshold.constant(1.5)))
    assert not engine.run(torch.randn(30, 5)).any()
    assert engine.activity.events == (0,)


def test_stack_without_bias_matches_float64() -> None:
    layer, x, y, state = reference_case(12, 40, 15, 2, num_layers=3, bias=False)
    engine = EventEngine(layer, streams=2)
    assert_matches(engine, engine.run(x), y, state)


def test_cell_matches_its_module() -> None:
    x = torch.randn(15, 12)
    cell = EGRUCell(12, 40, threshold=Threshold.constant(0.05)).eval()
    carried: EventState | None = None
    stepped = EventEngine(cell)
    with torch.no_grad():
        for row in x:
            carried = cell(row, carried)
            assert carried is not None
            torch.testing.assert_close(stepped.step(row), carried.y, rtol=0, atol=CLOSE)
    assert carried is not None
    torch.testing.assert_close(stepped.state["c"], carried.c, rtol=0, atol=CLOSE)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(30, 20)
        self.first = EGRU(20, 44, 2, threshold=Threshold.constant(0.05))
        self.dropout = nn.Dropout(0.5)
        self.second = EGRU(44, 36, reset="threshold", threshold=Threshold.constant(0.05))
        self.readout = nn.Linear(36, 11)

    def events(self, ids: Tensor) -> Tensor:
        return self.second(self.first(self.embedding(ids))[0])[0]


@pytest.mark.parametrize("trace", [None, 0.9, 1.0, "mean"])
@pytest.mark.parametrize("table", [1 << 20, 0])
def test_embedding_layers_and_readout_match_float64(trace: Trace | None, table: int) -> None:
    model = Model()
    ids = torch.randint(30, (70, 2))
    double = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        y = double.events(ids)
        if trace is not None:
            for t in range(1, len(y)):
                y[t] += (1.0 if trace == "mean" else trace) * y[t - 1]
        if trace == "mean":
            y /= torch.arange(1, len(y) + 1)[:, None, None]
        logits = double.readout(y)
    for threads in (1, 3):
        engine = divided(model, threads=threads, streams=2, trace=trace, token_table=table)
        out = engine.run(ids)
        torch.testing.assert_close(out.double(), logits, rtol=0, atol=5e-6)
        assert torch.equal(run_from_rest(engine, ids), out)  # the token table is filled now
        engine.reset()
        assert torch.equal(engine.run(ids, last=True), out[-1])
        single = EventEngine(model.second, trace=trace)
        assert single.run(torch.zeros(3, 44)).shape == (3, 36)
    by_parts = EventEngine(model.first, embedding=model.embedding)
    assert torch.equal(by_parts.run(ids[:, 0]), by_parts.run(ids[:, 0].tolist())) is False  # the state continues
    by_parts.reset()
    first = torch.stack([by_parts.step(int(i)) for i in ids[:, 0]])
    assert torch.equal(first, run_from_rest(by_parts, model.embedding.weight.detach()[ids[:, 0]]))


# ---- bit-identical results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "gate"), [("float32", "before"), ("bfloat16", "after"), ("int8", "before")])
def test_threads_streams_and_chunks_are_bit_identical(level: str, weights: WeightFormat, gate: ResetGate) -> None:
    layer = build(50, 150, num_layers=2, reset_gate=gate)
    x = torch.randn(20, 4, 50) * (torch.rand(20, 4, 50) < 0.4)  # two chunks of 16 for four streams
    x[10:] = torch.randn(10, 4, 50)  # dense and sparse inputs use different kernels
    one = EventEngine(layer, weights)
    single = torch.stack([run_from_rest(one, x[:, s]) for s in range(4)], 1)
    assert float((single != 0).float().mean()) > 0.05
    for threads, streams in ((2, 1), (1, 4), (2, 4), (3, 2)):
        engine = divided(layer, weights, threads, streams)
        rows = x[:, :streams] if streams > 1 else x[:, 0]
        expected = single[:, :streams] if streams > 1 else single[:, 0]
        assert torch.equal(run_from_rest(engine, rows), expected)
        engine.reset()
        in_parts = torch.cat([engine.run(part) for part in rows.split([1, 10, 9])])
        assert torch.equal(in_parts, expected)
        engine.reset()
        assert torch.equal(torch.stack([engine.step(row) for row in rows]), expected)


def test_run_and_step_are_bit_identical() -> None:
    engine, x = EventEngine(build(50, 150)), torch.randn(150, 50)  # three chunks
    whole = engine.run(x)
    engine.reset()
    assert torch.equal(torch.stack([engine.step(row) for row in x]), whole)


def test_sparse_and_dense_input_are_bit_identical() -> None:
    layer, engine = build(40, 60), EventEngine(build(40, 60))
    x = torch.randn(25, 40) * (torch.rand(25, 40) < 0.2)
    dense = run_from_rest(engine, x)
    engine.reset()
    pairs = [(row.nonzero()[:, 0], row[row != 0]) for row in x]
    assert torch.equal(torch.stack([engine.step(pair) for pair in pairs]), dense)
    engine.reset()
    backwards = [(index.flip(0).numpy(), value.flip(0).numpy()) for index, value in pairs]
    assert np.array_equal(np.stack([engine.step(pair) for pair in backwards]), dense.numpy())
    several = EventEngine(layer, streams=2)
    assert torch.equal(torch.stack([several.step([pair, pair])[1] for pair in pairs]), dense)
    engine.step(([], []))


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_restored_state_continues_bit_identically(weights: WeightFormat) -> None:
    model = Model()
    ids = torch.randint(30, (20, 3))
    engine = EventEngine(model, weights, streams=3, trace=0.5)
    engine.run(ids)
    state = engine.state
    shapes = {"first.c": (2, 3, 44), "first.y": (2, 3, 44), "second.c": (1, 3, 36), "second.y": (1, 3, 36)}
    assert {name: tuple(value.shape) for name, value in state.items()} == {**shapes, "trace": (3, 11)}
    after = engine.run(ids)
    other = EventEngine(model, weights, streams=3, trace=0.5)
    other.state = state
    assert torch.equal(other.run(ids), after)
    # A layer continues from the state of the engine.
    layer = build(6, 30)
    x = torch.randn(20, 6)
    single = EventEngine(layer)
    single.run(x)
    carried = EventState(**single.state)
    y, _, margin = in_float64(layer, x, carried)
    assert margin > MARGIN
    torch.testing.assert_close(single.run(x).double(), y, rtol=0, atol=CLOSE)


# ---- quantised weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("gate", RESET_GATES)
def test_quantised_step_matches_float64_reference(level: str, weights: WeightFormat, gate: ResetGate) -> None:
    """Compare single steps from the same state with the same rounding in float64.

    They differ by float32 arithmetic only. An activation may be rounded differently only if it is within 1e-6 of the
    middle between two of its 256 values.
    """
    layer = build(24, 70, reset_gate=gate, threshold=Threshold("identity", mean=0.0, std=0.1))  # negative events too
    network = extract_network(layer)
    reference = ReferenceRunner(network, weights, 1, dtype=torch.float64)
    engine = EventEngine(layer, weights)
    expected = np.empty((1, 1, 70), np.float64)
    for x in torch.randn(40, 24):
        y = engine.step(x)
        reference.run(x.numpy()[None, None], None, False, expected)
        state = EventState(**engine.state)
        np.testing.assert_allclose(state.c.numpy(), reference.get_state(0).c.numpy(), rtol=0, atol=CLOSE)
        torch.testing.assert_close(y, state.y[0])
        reference.set_state(0, state.c, state.y)


def test_int8_agrees_between_levels() -> None:
    """Integer sums do not depend on their order, so levels differ only in the last bits of float32."""
    layer, x = build(30, 90, reset_gate="after"), torch.randn(20, 30)
    outs: list[Tensor] = []
    for name in core.levels():
        core.force_level(name)
        outs.append(EventEngine(layer, "int8").run(x))
    core.force_level("auto")
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=CLOSE)


def test_quantised_weights_change_few_events() -> None:
    """Bound the effect of quantisation on a random network over 50 steps.

    The error of a weight of 0.1 is about 1e-4 in bfloat16 (8 bits of its size), and 5e-4 in int8 (7 bits of the largest
    weight of its column, 8 bits of an activation). A sum of 50 to 100 products is then off by 1e-3 or a few 1e-3, a
    state by less. The density of states near a threshold is about two, so 0.1 to 0.5 % of events change. The largest
    fractions measured over seeds 0 to 9 are 0.15 % and 0.29 %; the bounds are twice that.
    """
    layer = build(50, 150)
    sequences = [torch.randn(50, 50) for _ in range(4)]
    exact = EventEngine(layer)
    bfloat16 = compare(EventEngine(layer, "bfloat16"), exact, sequences)
    int8 = compare(EventEngine(layer, "int8"), exact, sequences)
    assert bfloat16.events > 0.997
    assert int8.events > 0.994
    assert bfloat16.error < int8.error
    same = compare(EventEngine(layer), exact, sequences)
    assert same == (1.0, 1.0, 0.0, 200)
