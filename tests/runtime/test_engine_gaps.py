"""Steps without input in closed form: the same events at the same steps as ordinary steps."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from egru import EGRU, ELSTM, EventEngine, Threshold
from egru.runtime import Gap
from egru.runtime.network import Network, extract_network
from egru.runtime.options import Options
from egru.types import COMPARES, RESET_GATES, RESETS, WEIGHT_FORMATS

pytestmark = pytest.mark.usefixtures("float32")
MARGIN = 1e-5
"""Events must be the same with thresholds that differ by this much: closed form and steps differ by about 1e-7."""
INPUTS, OUTPUTS = 20, 3


def build(network: Network, streams: int = 1, weights: Any = "float32", shift: float = 0.0) -> EventEngine:
    layers = [dataclasses.replace(layer, theta=(layer.theta + shift).clamp_min(0)) for layer in network.layers]
    options = Options(weights, 1, streams, 0)
    return EventEngine._from_network(dataclasses.replace(network, layers=tuple(layers)), options)


def run_silent(engine: EventEngine, steps: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return outputs, whether the last layer sent events, and the number of events, for ordinary steps."""
    outputs, counts = [], [engine.activity.events]
    zeros = torch.zeros(engine.streams, INPUTS).squeeze(0)
    for _ in range(steps):
        outputs.append(engine.step(zeros))
        counts.append(engine.activity.events)
    events = torch.tensor(counts).diff(dim=0)
    return torch.stack(outputs), events[:, -1] > 0, events.tolist()


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """One to three layers of any cell, kind of events and reset, with slow gates and thresholds close to the states."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    layers, inputs = nn.Sequential(), INPUTS
    for _ in range(draw(st.integers(1, 3))):
        hidden = draw(st.sampled_from([1, 7, 33]))
        events = draw(st.sampled_from(["positive", "signed", "delta"]))
        options: dict[str, Any] = {"events": events, "zoneout": draw(st.sampled_from([0.0, 0.3])), "reset_scale": 0.8}
        options["reset"] = "none" if events == "delta" else draw(st.sampled_from(RESETS))
        options["threshold"] = Threshold("abs", mean=draw(st.sampled_from([0.05, 0.2, 0.5])), std=0.1)
        if draw(st.booleans()):
            compare = "output" if events == "delta" else draw(st.sampled_from(COMPARES))
            layer: Any = ELSTM(inputs, hidden, compare=compare, **options)
        else:
            gate = "after" if events == "delta" else draw(st.sampled_from(RESET_GATES))
            layer = EGRU(inputs, hidden, reset_gate=gate, **options)
        scale = draw(st.sampled_from([0.5, 2.0]))
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name.startswith("bias"):
                    parameter.normal_(0, scale)
        layers.append(layer.eval())
        inputs = hidden
    readout = nn.Linear(inputs, OUTPUTS) if draw(st.booleans()) else None
    trace: Any = draw(st.sampled_from([None, None, 0.9, 1.0, "mean"]))
    return extract_network(layers, readout=readout, trace=trace)


def assert_close(value: Tensor, expected: Tensor) -> None:
    """Check that values agree to 2e-6, relative to the largest one if that exceeds 1."""
    size = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(value, expected, rtol=0, atol=2e-6 * max(1.0, size))


def check(network: Network, weights: Any, lead: Tensor, parts: list[int]) -> int:
    """Compare skipped steps with ordinary ones after the input `lead`; return the number of events, or -1 at a tie."""
    patterns = []
    for shift in (-MARGIN, MARGIN, 0.0):
        stepped = build(network, weights=weights, shift=shift)
        stepped.run(lead)
        outputs, sends, events = run_silent(stepped, sum(parts))
        patterns.append(events)
    if patterns[0] != patterns[2] or patterns[1] != patterns[2]:
        return -1
    engine = build(network, weights=weights)
    engine.run(lead)
    gaps = [engine.skip(part) for part in parts]
    assert torch.equal(torch.cat([gap.steps for gap in gaps]), sends.nonzero()[:, 0] + len(lead))
    assert_close(torch.cat([gap.outputs for gap in gaps]), outputs[sends])
    assert_close(gaps[-1].output, outputs[-1])
    assert engine.time == stepped.time == len(lead) + sum(parts)
    assert engine.activity.steps == stepped.activity.steps
    assert engine.activity.events == stepped.activity.events
    assert engine.activity.macs <= stepped.activity.macs
    for name, value in engine.state.items():
        assert_close(value, stepped.state[name])
    return sum(map(sum, events))


checked: list[int] = []


@given(
    networks(), st.sampled_from(WEIGHT_FORMATS), st.integers(0, 3), st.lists(st.integers(1, 90), min_size=1, max_size=3)
)
def test_skip_matches_ordinary_steps(network: Network, weights: Any, lead: int, parts: list[int]) -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    events = check(network, weights, torch.randn(lead + 1, INPUTS), parts)
    assume(events >= 0)
    checked.append(events)


def test_most_examples_have_events_in_the_gap() -> None:
    if not checked:
        pytest.skip("requires test_skip_matches_ordinary_steps")
    assert sum(events > 0 for events in checked) > len(checked) / 4
    assert any(events == 0 for events in checked)


@pytest.mark.parametrize("trace", [0.9, 1.0, "mean"])
@pytest.mark.parametrize("has_readout", [False, True])
def test_trace_adds_outputs_that_delta_events_hold(trace: Any, has_readout: bool) -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    torch.manual_seed(0)
    options: dict[str, Any] = {"events": "delta", "reset": "none", "reset_gate": "after"}
    layer = EGRU(INPUTS, 7, threshold=Threshold.constant(0.2), **options).eval()
    readout = nn.Linear(7, OUTPUTS) if has_readout else None
    parts = extract_network(layer, readout=readout, trace=trace)
    assert check(parts, "float32", torch.randn(3, INPUTS), [40, 3]) >= 0
    engine = build(parts)
    engine.run(torch.randn(3, INPUTS))
    assert engine.state["y"].any()  # outputs are held during the gap


def unit(rate: float, target: float, theta: float = 2.0, events: Any = "positive") -> EventEngine:
    """Return an engine with one unit, whose state approaches ``target`` by about ``rate`` per step."""
    layer = EGRU(1, 1, events=events, reset_gate="after", threshold=Threshold.constant(theta), reset="none")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(("weight", "bias")):
                parameter.zero_()
        assert isinstance(layer.bias_ih_l0, Tensor)
        layer.bias_ih_l0[1] = -float(np.log(rate / (1 - rate)))
        layer.bias_ih_l0[2] = float(np.arctanh(target))
    return EventEngine(layer)


@pytest.mark.parametrize("events", ["positive", "signed", "delta"])
def test_first_event_is_exact_when_states_equal_thresholds(events: Any) -> None:
    """A state that equals its threshold sends no event; the next float32 value does."""
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    sign = 1 if events == "positive" else -1
    silent = unit(1e-2, sign * 0.5, events=events)
    states = np.empty(2000, np.float32)
    for k in range(len(states)):
        silent.reset()
        silent.skip(k + 1)
        states[k] = abs(float(silent.state["c"]))
    slow = np.flatnonzero(np.diff(states) == 0)
    assert len(slow) > 10  # close to the fixed point, a state has the same value for several steps
    for k in (0, 1, 2, 63, 500, 1000, int(slow[0]), int(slow[5])):
        for theta in (states[k], np.nextafter(states[k], np.float32(0))):
            gap = unit(1e-2, sign * 0.5, float(theta), events).skip(2000)
            assert int(gap.steps[0]) == np.flatnonzero(states > theta)[0]
            assert abs(float(gap.outputs[0])) == states[states > theta][0]


@pytest.mark.parametrize("rate", [0.3, 1e-2, 1e-3, 1e-5])
def test_states_differ_from_ordinary_steps_by_accumulated_rounding_only(rate: float) -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    skipped, stepped = unit(rate, 0.7), unit(rate, 0.7)
    for n in (1, 10, 1000, 20_000):
        skipped.reset()
        stepped.reset()
        skipped.skip(n)
        stepped.run(torch.zeros(n, 1), last=True)
        c = stepped.state["c"].item()
        half = float(np.spacing(np.float32(c))) / 2
        assert abs(skipped.state["c"].item() - c) <= min(n, 1 / rate) * half + half


def test_assigned_state_above_the_threshold_relaxes_without_event() -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    skipped, stepped = unit(0.5, 0.0, theta=0.3), unit(0.5, 0.0, theta=0.3)
    for engine in (skipped, stepped):
        engine.state = {**engine.state, "c": torch.full_like(engine.state["c"], 0.4)}
    assert not len(skipped.skip(10).steps)
    stepped.run(torch.zeros(10, 1))
    torch.testing.assert_close(skipped.state["c"], stepped.state["c"], rtol=1e-6, atol=0)


def network(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {"threshold": Threshold("identity", mean=0.3, std=0.05), **options}
    layers = nn.Sequential(EGRU(INPUTS, 33, 2, **options), nn.Linear(33, OUTPUTS)).eval()
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if "bias_ih" in name:
                parameter.mul_(3)
    return layers


def test_every_level_skips() -> None:
    core = pytest.importorskip("egru._core", reason="the compiled core is not built")
    try:
        for level in core.levels():
            core.force_level(level)
            assert check(extract_network(network()), "float32", torch.randn(3, INPUTS), [40, 1, 59]) > 0
    finally:
        core.force_level("auto")


def test_a_long_gap_without_events_costs_one_update() -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    engine = EventEngine(network(threshold=Threshold.constant(2.0)))
    gap = engine.skip(2**53)
    assert engine.activity.macs == 2 * 3 * 33
    assert (engine.activity.steps, engine.time, len(gap.steps)) == (2**53, 2**53, 0)
    c = engine.state["0.c"]
    engine.step(torch.zeros(INPUTS))
    torch.testing.assert_close(engine.state["0.c"], c, rtol=0, atol=1e-7)  # the fixed point


def test_order_of_units_does_not_change_the_number_of_jumps() -> None:
    """Units that cross their thresholds at different steps: the first crossing ends the jump for all of them."""
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    rate, target = torch.full((32,), 0.1), torch.zeros(32)
    rate[[4, 8, 16]] = 0.05  # in other vectors than unit 0, however wide these are
    target[[0, 4, 8, 16]] = 0.5
    macs, steps = [], []
    for order in (torch.arange(32), torch.arange(31, -1, -1)):
        layer = EGRU(1, 32, reset_gate="after", reset="hard", threshold=Threshold.constant(0.3)).eval()
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name.startswith(("weight", "bias")):
                    parameter.zero_()
            layer.get_parameter("bias_ih_l0")[32:64] = -torch.logit(rate[order])
            layer.get_parameter("bias_ih_l0")[64:] = torch.atanh(target[order])
        engine = EventEngine(layer)
        steps.append(engine.skip(40).steps.tolist())
        macs.append(engine.activity.macs)
    assert steps[0] == steps[1]
    assert len(steps[0]) > 2
    assert macs[0] == macs[1]


def test_streams_do_not_change_results() -> None:
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    model, x = network(), torch.randn(5, 3, INPUTS)
    together = EventEngine(model, streams=3, trace=0.9)
    together.run(x)
    gap = together.skip(50)
    assert gap.output.shape == (3, OUTPUTS)
    assert (gap.steps.diff() >= 0).all()
    for stream in range(3):
        engine = EventEngine(model, trace=0.9)
        engine.run(x[:, stream])
        alone, rows = engine.skip(50), gap.streams == stream
        assert len(alone.steps)
        assert torch.equal(gap.output[stream], alone.output)
        assert torch.equal(gap.steps[rows], alone.steps)
        assert torch.equal(gap.outputs[rows], alone.outputs)


def test_step_at_matches_a_dense_sequence(runner: str) -> None:
    torch.manual_seed(1)
    model, dense = network(), torch.zeros(60, INPUTS)
    engine, stepped = EventEngine(model, trace=0.9), EventEngine(model, trace=0.9)
    gaps: list[Gap] = []
    for t in (0, 1, 17, 18, 59):
        dense[t, [2, 5]] = torch.randn(2)
        gaps.append(engine.step_at(t, [5, 2], dense[t, [5, 2]]))
        assert engine.time == t + 1
    y = stepped.run(dense)
    for t, gap in zip((0, 1, 17, 18, 59), gaps, strict=True):
        assert_close(gap.output, y[t])
        assert_close(gap.outputs, y[gap.steps])
    assert len(gaps[-1].steps)
    assert engine.activity.events == stepped.activity.events
    assert engine.activity.steps == 60


def test_step_at_writes_to_the_given_tensor(runner: str) -> None:
    first, second, out = EventEngine(network()), EventEngine(network()), torch.empty(OUTPUTS)
    for t in (0, 9, 300):
        gap, expected = first.step_at(t, [3], [2.0], out), second.step_at(t, [3], [2.0])
        assert type(gap) is type(expected) is Gap
        assert gap.output is out
        assert expected.output is not out
        assert all(torch.equal(a, b) for a, b in zip(gap, expected, strict=True))
    assert len(gap.steps)


def test_step_at_returns_the_rows_of_a_long_gap_with_events_at_every_step(runner: str) -> None:
    layer = EGRU(INPUTS, 8, reset="none", threshold=Threshold.constant(0.0)).eval()
    with torch.no_grad():
        layer.get_parameter("bias_ih_l0").fill_(1.0)
    engine, stepped = EventEngine(layer), EventEngine(layer)
    gap = engine.step_at(200, [1], [0.5])  # several calls of the core
    y = stepped.run(torch.zeros(200, INPUTS))
    assert torch.equal(gap.steps, torch.arange(200))
    assert_close(gap.outputs, torch.as_tensor(y))
    assert_close(gap.output, stepped.step((torch.tensor([1]), torch.tensor([0.5]))))


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.empty(OUTPUTS + 1), ValueError, "out must be float32 of shape"),
        (torch.empty(OUTPUTS, dtype=torch.float64), TypeError, "out must be float32 on the CPU"),
        (torch.empty(OUTPUTS, requires_grad=True), ValueError, "out must not require grad"),
        (torch.empty(2 * OUTPUTS)[::2], ValueError, "out must be contiguous"),
        (np.empty(OUTPUTS, np.float32), TypeError, "out must be a tensor, got ndarray"),
        (4096, TypeError, "out must be a tensor, got int"),
    ],
)
def test_step_at_refuses_unsuitable_outputs(runner: str, out: Any, error: Any, message: str) -> None:
    engine = EventEngine(network())
    with pytest.raises(error, match=message):
        engine.step_at(3, [0], [1.0], out)
    assert engine.time == 0


def test_time_follows_steps_copies_and_resets(runner: str) -> None:
    engine = EventEngine(network(), streams=2)
    engine.run(torch.randn(4, 2, INPUTS))
    engine.step(torch.randn(2, INPUTS), mask=[True, False])
    engine.skip(10)
    assert engine.time == 15
    assert copy.deepcopy(engine).time == pickle.loads(pickle.dumps(engine)).time == 15
    engine.reset([True, False])
    assert engine.time == 15
    engine.time = 100
    assert engine.skip(5).output.shape == (2, OUTPUTS)
    assert engine.time == 105
    engine.reset()
    assert engine.time == 0


def test_restored_state_continues_with_the_same_bits() -> None:
    for events in ("positive", "delta"):
        delta = {"events": "delta", "reset": "none", "reset_gate": "after", "threshold": Threshold.constant(0.01)}
        options = delta if events == "delta" else {}
        first, second = (EventEngine(network(**options), trace="mean") for _ in range(2))
        first.run(torch.randn(4, INPUTS))
        first.skip(3)
        second.state, second.time = first.state, first.time
        a, b = first.skip(40), second.skip(40)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert len(a.steps)


def test_wrong_arguments_are_refused() -> None:
    engine = EventEngine(network())
    with pytest.raises(ValueError, match=r"n must be an int, 1 to 2\*\*53, got 0"):
        engine.skip(0)
    with pytest.raises(TypeError, match=r"n must be an int, got 1\.5"):
        engine.skip(1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="time must be an int, 0 to"):
        engine.time = -1
    engine.skip(7)
    with pytest.raises(ValueError, match="t must not be less than the next step, 7, got 6"):
        engine.step_at(6, [0], [1.0])
    with pytest.raises(ValueError, match="index 20 is outside the input"):
        engine.step_at(9, [INPUTS], [1.0])
    assert engine.time == 7  # nothing was skipped
    with pytest.raises(ValueError, match="requires an engine with one stream, got 2"):
        EventEngine(network(), streams=2).step_at(3, [0], [1.0])
    tokens = EventEngine(nn.Sequential(nn.Embedding(5, INPUTS), EGRU(INPUTS, 8)))
    for use in (lambda: tokens.skip(3), lambda: tokens.step_at(3, [0], [1.0])):
        with pytest.raises(TypeError, match="an engine with an embedding has no step without input"):
            use()
