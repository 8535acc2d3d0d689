"""The streaming engine with signed and delta events: parity, accumulated sums, drift, state, masks and counters."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from egru import EGRU, ELSTM, EventEngine, Threshold
from egru.layers import EventRNN, record
from egru.runtime import reference, runners
from egru.runtime.network import Trace, extract_network
from egru.runtime.reference import ReferenceRunner
from egru.types import RESET_GATES, RESETS, WEIGHT_FORMATS, WeightFormat

core = pytest.importorskip("egru._core", reason="the compiled core is not built")

MARGIN = 1e-5
"""Minimum distance of every compared value from its threshold. float32 errors are about 1e-7, so events must agree."""


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


@pytest.fixture
def refresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the number of steps after which accumulated sums are computed again."""

    def set_steps(steps: int) -> None:
        for module in (reference, runners):
            monkeypatch.setattr(module, "REFRESH_STEPS", dict.fromkeys(WEIGHT_FORMATS, steps))

    return set_steps


def delta(cell: type[EventRNN], *sizes: int, theta: float = 0.05, **options: Any) -> Any:
    options |= {"reset_gate": "after"} if cell is EGRU else {"compare": "output"}
    options |= {"events": "delta", "reset": "none", "threshold": Threshold.constant(theta)}
    build: Any = cell
    return build(*sizes, **options).eval()


def network(cell: type[EventRNN] = EGRU, seed: int = 0, hidden: int = 33) -> Any:
    """Return two delta layers and a readout."""
    torch.manual_seed(seed)
    layers: Any = nn.Sequential(delta(cell, 20, hidden), delta(EGRU, hidden, 40, theta=0.03))
    layers.append(nn.Linear(40, 5))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(2)
    for layer in layers[:2]:
        for name in layer.threshold_parameters():
            layer.threshold_parameters()[name].data.div_(2)
    return layers


def margin(layer: EventRNN, x: Tensor) -> tuple[Tensor, float]:
    """Return the output in float64, and the distance of the compared values from the thresholds."""
    double = copy.deepcopy(layer).double()
    with record(double) as records, torch.no_grad():
        y, _ = double(x.double())
    assert isinstance(y, Tensor)
    return y, min(float((call.magnitude() - call.theta).abs().min()) for call in records)


def away_from_thresholds(build: Callable[[], EventRNN]) -> tuple[EventRNN, Tensor, Tensor]:
    """Return a layer and an input for which no value is close to its threshold, and the output in float64."""
    for seed in range(1000):
        torch.manual_seed(seed)
        layer, x = build(), 2 * torch.randn(12, 1, 9)
        y, distance = margin(layer, x)
        if distance > MARGIN:
            return layer, x, y
    raise AssertionError("every seed has a value close to its threshold")


@pytest.mark.parametrize("gate", RESET_GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_signed_events_match_the_layer_in_float64(gate, reset, level):
    threshold = Threshold("abs", mean=0.15, std=0.05)
    options = {"events": "signed", "reset": reset, "reset_gate": gate, "threshold": threshold, "reset_scale": 0.7}
    layer, x, y = away_from_thresholds(lambda: EGRU(9, 33, **options))
    assert (y < 0).any()
    assert 0.05 < (y != 0).double().mean() < 0.95
    result = torch.as_tensor(EventEngine(layer).run(x[:, 0]))
    assert torch.equal(result != 0, y[:, 0] != 0)
    torch.testing.assert_close(result.double(), y[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("cell", [EGRU, ELSTM])
@pytest.mark.parametrize("steps", [1, 5, 1024])
def test_delta_events_match_the_layer_in_float64(cell, steps, level, refresh):
    refresh(steps)
    layer, x, y = away_from_thresholds(lambda: delta(cell, 9, 33, 2))
    engine = EventEngine(layer)
    result = torch.as_tensor(engine.run(x[:, 0]))
    torch.testing.assert_close(result.double(), y[:, 0], rtol=0, atol=1e-6)
    with record(layer) as records, torch.no_grad():
        layer(x)
    assert [int(call.events().sum()) for call in records] == list(engine.activity.events)
    assert 0.05 < records[0].events().double().mean() < 0.95


@pytest.mark.parametrize("trace", [None, 0.8, "mean"])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("cell", [EGRU, ELSTM])
def test_accumulated_sums_match_the_reference_runner(
    cell: type[EventRNN], weights: WeightFormat, trace: Trace | None, refresh: Any
) -> None:
    refresh(7)
    model = network(cell)
    x = torch.randn(40, 20).cumsum(0) / 3
    engine = EventEngine(model[:2], weights, readout=model[2], trace=trace)
    runner = ReferenceRunner(extract_network(model[:2], readout=model[2], trace=trace), weights, 1)
    expected = np.empty((40, 1, 5), np.float32)
    runner.run(x[:, None].numpy(), None, False, expected)
    result = torch.as_tensor(engine.run(x))
    torch.testing.assert_close(
        result, torch.from_numpy(expected[:, 0]), rtol=0, atol=2e-4 if weights == "int8" else 2e-5
    )
    steps, macs, events = runner.counters()
    assert (engine.activity.steps, engine.activity.macs, engine.activity.events) == (steps, macs, tuple(events))


def test_multiply_adds_are_counted_per_event():
    model, x = network(), torch.randn(50, 20).cumsum(0) / 5
    engine = EventEngine(model[:2], readout=model[2])
    with record(model) as records, torch.no_grad():
        model[1](model[0](x[:, None])[0])
    engine.run(x)
    lower, upper = (call.events().sum().item() for call in records)
    at_last_step = [call.events()[-1].sum().item() for call in records]  # sent to the layer at the next step
    expected = 50 * 20 * 3 * 33 + 50 * 3 * (33 + 40)  # dense input, element-wise part
    expected += 3 * 33 * (lower - at_last_step[0]) + 3 * 40 * (lower + upper - at_last_step[1]) + 5 * upper
    assert engine.activity.macs == expected
    assert engine.activity.events == (lower, upper)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("cell", [EGRU, ELSTM])
def test_bits_do_not_depend_on_threads_streams_and_chunks(cell, weights, level, refresh):
    refresh(7)
    model, x = network(cell, hidden=70), torch.randn(30, 3, 20)
    parts = {"readout": model[2]}
    single = [EventEngine(model[:2], weights, **parts).run(x[:, s]) for s in range(3)]
    expected = torch.stack([torch.as_tensor(y) for y in single], 1)
    for threads in (1, 2, 4):
        engine: Any = EventEngine(model[:2], weights, threads, 3, **parts)
        engine._runner.core.always_divide(True)
        assert torch.equal(torch.as_tensor(engine.run(x)), expected)
        engine.reset()
        assert torch.equal(torch.stack([torch.as_tensor(engine.step(row)).clone() for row in x]), expected)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_restored_state_continues_with_the_same_bits(weights: WeightFormat) -> None:
    model, x = network(), torch.randn(60, 20)
    first, second = (EventEngine(model[:2], weights, readout=model[2]) for _ in range(2))
    first.run(x[:37])
    second.state = first.state
    assert torch.equal(torch.as_tensor(first.run(x[37:])), torch.as_tensor(second.run(x[37:])))


def test_reset_and_masked_streams_do_not_disturb_the_others():
    model, x = network(), torch.randn(40, 3, 20)
    engine = EventEngine(model[:2], streams=3, readout=model[2])
    alone = [torch.as_tensor(EventEngine(model[:2], readout=model[2]).run(x[:, s])) for s in range(3)]
    engine.run(x[:10])
    engine.reset(np.array([False, True, False]))
    out = torch.zeros(3, 5)
    mask = np.array([True, True, False])
    for t in range(10, 20):  # stream 1 starts again, stream 2 pauses
        row = x[t].clone()
        row[1] = x[t - 10, 1]
        out = torch.as_tensor(engine.step(row, mask=mask))
    torch.testing.assert_close(out[0], alone[0][19])
    torch.testing.assert_close(out[1], alone[1][9])
    row = torch.stack([x[20, 0], x[10, 1], x[10, 2]])
    out = torch.as_tensor(engine.step(row))
    torch.testing.assert_close(out, torch.stack([alone[0][20], alone[1][10], alone[2][10]]))


def test_only_the_last_output_can_be_requested_at_any_time():
    model, x = network(), torch.randn(60, 20)
    engine, plain = (EventEngine(model[:2], readout=model[2]) for _ in range(2))
    expected = torch.as_tensor(plain.run(x))
    torch.testing.assert_close(torch.as_tensor(engine.run(x[:30], last=True)), expected[29])
    torch.testing.assert_close(torch.as_tensor(engine.run(x[30:45])), expected[30:45])
    torch.testing.assert_close(torch.as_tensor(engine.run(x[45:], last=True)), expected[59])


@pytest.mark.parametrize("events", ["signed", "delta"])
def test_converted_gru_computes_the_function_of_the_gru(events):
    torch.manual_seed(0)
    gru, x = nn.GRU(9, 33, 2), torch.randn(50, 9)
    with torch.no_grad():
        expected, _ = gru(x)
    result = torch.as_tensor(EventEngine(EGRU.from_gru(gru, events=events)).run(x))
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)


def test_engine_file_keeps_the_kind_of_events(tmp_path: Path):
    model, x = network(), torch.randn(20, 20)
    engine = EventEngine(model[:2], readout=model[2])
    engine.save(tmp_path / "engine.safetensors")
    loaded = EventEngine.load(tmp_path / "engine.safetensors")
    assert torch.equal(torch.as_tensor(loaded.run(x)), torch.as_tensor(engine.run(x)))


def test_negative_thresholds_are_refused():
    layer = delta(EGRU, 3, 4)
    layer.get_parameter("threshold_l0").data[1] = -0.5
    with pytest.raises(ValueError, match=r"EventEngine: events='delta' requires thresholds of at least 0, got -0.5"):
        EventEngine(layer)


class Doubled(nn.Module):
    """A model whose forward pass is not that of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.readout = delta(EGRU, 3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(2 * self.rnn(x)[0])


def test_forward_of_a_delta_model_is_checked():
    with pytest.raises(TypeError, match=r"Doubled.forward and the engine compute different outputs"):
        EventEngine(Doubled())


# ---- drift -----------------------------------------------------------------------------------------------------------


def drift(weights: WeightFormat, steps: int, refresh_steps: int | None, refresh: Any) -> float:
    """Return how far the outputs of an engine are from those of one that computes every sum from the outputs.

    The median over the last 1000 steps of the largest difference: a state near its threshold may send one event more,
    and then differs by a threshold for a few steps.
    """
    torch.manual_seed(0)
    model = nn.Sequential(delta(EGRU, 2, 8, theta=0.02), nn.Linear(8, 3))
    angle = torch.arange(steps) * 0.37
    x = torch.stack([angle.sin(), (1.618 * angle).cos()], 1)
    outputs = []
    for every in (refresh_steps, 1):
        if every is not None:
            refresh(every)
        engine = EventEngine(model, weights)
        engine.run(x[:-1000], last=True)
        outputs.append(torch.as_tensor(engine.run(x[-1000:])))
    assert outputs[0].abs().max() > 0.1
    return float((outputs[0] - outputs[1]).abs().amax(1).median())


BOUNDS: dict[WeightFormat, float] = {"float32": 2e-6, "bfloat16": 2e-6, "int8": 5e-3}
"""About five times what is measured. Sums that are never computed again exceed all of them after a million steps."""


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_sums_do_not_drift_over_a_million_steps(weights: WeightFormat, refresh: Any) -> None:
    assert drift(weights, 1_000_000, None, refresh) < BOUNDS[weights]
    assert drift(weights, 1_000_000, 1 << 30, refresh) > BOUNDS[weights]
