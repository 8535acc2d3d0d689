"""Lazy updates of pruned networks: the same events as ordinary steps, with inputs between gaps."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from egru import EGRU, ELSTM, EventEngine, Threshold
from egru.runtime.network import Network, extract_network
from egru.types import COMPARES, RESET_GATES, RESETS, WEIGHT_FORMATS

from .test_engine_gaps import MARGIN, assert_close, build

pytest.importorskip("egru._core", reason="the compiled core is not built")
pytestmark = pytest.mark.usefixtures("float32")
INPUTS, HIDDEN, BLOCK = 12, 80, 16


def prune(layer: Any, density: float) -> None:
    """Keep a fraction of the blocks of 16 outputs of each input and unit, the same in all gates."""
    with torch.no_grad():
        for weights in (layer.weight_ih_l0, layer.weight_hh_l0):
            groups = -(-layer.hidden_size // BLOCK)
            kept = (torch.rand(groups, weights.shape[1]) < density).repeat_interleave(BLOCK, 0)[: layer.hidden_size]
            weights.mul_(kept.repeat(len(weights) // layer.hidden_size, 1))


@st.composite
def pruned(draw: st.DrawFn) -> Network:
    """One or two layers of any cell and reset, in which an event reaches few units."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    layers, inputs = nn.Sequential(), INPUTS
    for _ in range(draw(st.integers(1, 2))):
        hidden = draw(st.sampled_from([HIDDEN, 33]))
        options: dict[str, Any] = {
            "events": draw(st.sampled_from(["positive", "signed"])),
            "zoneout": draw(st.sampled_from([0.0, 0.3])),
            "reset": draw(st.sampled_from(RESETS)),
            "reset_scale": 0.8,
            "threshold": Threshold("abs", mean=draw(st.sampled_from([0.2, 0.5])), std=0.1),
        }
        layer: Any = (
            ELSTM(inputs, hidden, compare=draw(st.sampled_from(COMPARES)), **options)
            if draw(st.booleans())
            else EGRU(inputs, hidden, reset_gate=draw(st.sampled_from(RESET_GATES)), **options)
        )
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name.startswith("bias"):
                    parameter.normal_(0, 0.5)
        prune(layer, draw(st.sampled_from([0.0, 0.1, 0.3])))
        layers.append(layer.eval())
        inputs = hidden
    readout = nn.Linear(inputs, 3) if draw(st.booleans()) else None
    return extract_network(layers, readout=readout, trace=draw(st.sampled_from([None, 0.9, "mean"])))


def draw_inputs(gaps: list[int]) -> Tensor:
    """Return a sequence with one or two non-zero inputs after each gap."""
    rows = []
    for gap in gaps:
        row = torch.zeros(gap + 1, INPUTS)
        row[gap, torch.randperm(INPUTS)[:2]] = torch.randn(2)
        rows.append(row)
    return torch.cat(rows)


def run_dense(engine: EventEngine, x: Tensor) -> tuple[Tensor, list[tuple[int, ...]]]:
    outputs, events = [], [engine.activity.events]
    for row in x:
        outputs.append(torch.as_tensor(engine.step(row)).clone())
        events.append(engine.activity.events)
    return torch.stack(outputs), events


def nonzero(row: Tensor) -> tuple[Tensor, Tensor]:
    index = row.nonzero()[:, 0].to(torch.int32)
    return index, row[index.long()]


checked: list[int] = []


@given(pruned(), st.sampled_from(WEIGHT_FORMATS), st.lists(st.integers(0, 40), min_size=2, max_size=5), st.data())
def test_sparse_steps_between_gaps_match_ordinary_steps(
    network: Network, weights: Any, gaps: list[int], data: st.DataObject
) -> None:
    x = draw_inputs(gaps)
    patterns = [run_dense(build(network, weights=weights, shift=shift), x)[1] for shift in (-MARGIN, MARGIN)]
    stepped = build(network, weights=weights)
    outputs, events = run_dense(stepped, x)
    assume(patterns[0] == patterns[1] == events)
    engine, at = build(network, weights=weights), 0
    for gap in gaps:
        if gap:
            skipped = engine.skip(gap)
            assert_close(skipped.output, outputs[at + gap - 1])
            assert_close(skipped.outputs, outputs[skipped.steps])
        at += gap
        index, values = nonzero(x[at])
        how = data.draw(st.sampled_from(["sparse", "sparse", "sparse", "dense", "state"]))
        if how == "state":  # reading and writing the state ends lazy updates
            engine.state = engine.state
        value = engine.step(x[at]) if how == "dense" else engine.step((index, values))
        assert_close(torch.as_tensor(value), outputs[at])
        assert engine.activity.events == events[at + 1]
        at += 1
    assert engine.time == stepped.time
    assert engine.activity.steps == stepped.activity.steps
    assert engine.activity.macs <= stepped.activity.macs
    for name, value in engine.state.items():
        assert_close(value, stepped.state[name])
    checked.append(events[-1][-1])


def test_most_examples_have_events() -> None:
    if not checked:
        pytest.skip("requires test_sparse_steps_between_gaps_match_ordinary_steps")
    assert sum(events > 0 for events in checked) > len(checked) / 4


def wide(density: float = 0.1, threshold: float = 0.3) -> EGRU:
    """Return a layer of 640 units in which an input or an event reaches a fraction of them."""
    torch.manual_seed(0)
    layer = EGRU(INPUTS, 640, threshold=Threshold.constant(threshold)).eval()
    prune(layer, density)
    return layer


def test_only_reached_units_are_updated() -> None:
    layer = wide()
    engine, ordinary = EventEngine(layer), EventEngine(layer)
    engine.skip(3)
    ordinary.run(torch.zeros(3, INPUTS))
    x = torch.zeros(INPUTS)
    x[4] = 1.0
    before = engine.activity.macs, ordinary.activity.macs
    assert_close(torch.as_tensor(engine.step(nonzero(x))), torch.as_tensor(ordinary.step(x)))
    macs, all_macs = engine.activity.macs - before[0], ordinary.activity.macs - before[1]
    reached = int((layer.get_parameter("weight_ih_l0")[:640, 4] != 0).sum())
    assert 0 < reached < 200
    assert macs == 6 * reached  # three gates: one product with the input, and one update
    assert all_macs == 3 * reached + 3 * 640


def test_streams_and_resets_are_independent() -> None:
    layer = wide()
    engine = EventEngine(layer, streams=3)
    singles = [EventEngine(layer) for _ in range(3)]
    x = torch.randn(4, 3, INPUTS)
    for t in range(4):
        out = torch.as_tensor(engine.step(x[t]))
        gap = engine.skip(7 + t)
        for s, single in enumerate(singles):
            assert_close(out[s], torch.as_tensor(single.step(x[t, s])))
            assert_close(gap.output[s], single.skip(7 + t).output)
        if t == 1:
            engine.reset(torch.tensor([False, True, False]))
            singles[1].reset()
    for s, single in enumerate(singles):
        assert_close(engine.state["c"][..., s, :].flatten(), single.state["c"].flatten())


def test_streams_that_reach_most_units_are_advanced_as_usual_until_they_are_quiet() -> None:
    layer = wide(0.25)
    engine, ordinary = EventEngine(layer), EventEngine(layer, packing="dense")
    busy, quiet = torch.ones(INPUTS), torch.zeros(INPUTS)
    quiet[4] = 0.5

    def macs_per_input(x: Tensor, inputs: int) -> float:
        """Return the fraction of multiply-accumulates of the last ten inputs, compared with ordinary updates."""
        before = 0.0, 0.0
        for i in range(inputs):
            if i == inputs - 10:
                before = engine.activity.macs, ordinary.activity.macs
            engine.skip(2)
            ordinary.skip(2)
            assert_close(torch.as_tensor(engine.step(nonzero(x))), torch.as_tensor(ordinary.step(nonzero(x))))
        return (engine.activity.macs - before[0]) / (ordinary.activity.macs - before[1])

    assert macs_per_input(quiet, 20) < 0.3
    assert macs_per_input(busy, 40) > 0.95
    assert macs_per_input(quiet, 20) > 0.95
    assert macs_per_input(quiet, 600) < 0.3


def test_output_after_a_sequence_is_that_of_its_last_step() -> None:
    engine = EventEngine(wide())
    x = torch.zeros(3, INPUTS)
    x[0, 4] = 40.0
    y = engine.run(x)
    assert y[0].any()
    assert not y[-1].any()
    assert not engine.skip(1).output.any()


def test_several_words_of_groups_and_a_dense_layer() -> None:
    """Groups of over 1024 units need several words. An event of the pruned layer reaches all units of the dense one."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"threshold": Threshold.constant(0.3), "reset": "output"}
    layers = nn.Sequential(EGRU(INPUTS, 3100, **options), EGRU(3100, 48, **options)).eval()
    prune(layers[0], 0.01)
    with torch.no_grad():
        layers[1].get_parameter("weight_ih_l0").mul_(20)
    engine, ordinary = EventEngine(layers), EventEngine(layers, packing="dense")
    x = torch.zeros(INPUTS)
    for i in range(INPUTS):
        x.zero_()[i] = 60.0
        engine.skip(3)
        ordinary.skip(3)
        assert_close(torch.as_tensor(engine.step(nonzero(x))), torch.as_tensor(ordinary.step(x)))
    assert engine.activity.events == ordinary.activity.events
    assert min(engine.activity.events) > 0
    assert engine.activity.macs < ordinary.activity.macs / 2
    for name, value in engine.state.items():
        assert_close(value, ordinary.state[name])


def slow(threshold: float, density: float = 0.1) -> EGRU:
    """Return a layer with slow states and random biases."""
    layer = wide(density, threshold)
    with torch.no_grad():
        layer.get_parameter("bias_ih_l0").normal_(0, 0.3)[:1280] += 4
    return layer


def test_streams_are_computed_at_different_steps() -> None:
    layer = slow(0.3)
    engine, ordinary = EventEngine(layer, streams=3), EventEngine(layer, streams=3, packing="dense")
    x = 4 * torch.randn(3, INPUTS)
    for e in (engine, ordinary):
        e.step(x)
        e.skip(50)
    assert 0 < engine.activity.events[0] == ordinary.activity.events[0]
    assert engine.activity.macs < ordinary.activity.macs
    for name, value in engine.state.items():
        assert_close(value, ordinary.state[name])


def test_overflowing_states_raise() -> None:
    engine = EventEngine(wide())
    state = engine.state
    engine.state = {"c": torch.full_like(state["c"], 3e38), "y": torch.full_like(state["y"], -3e38)}
    with pytest.raises(ValueError, match="became NaN or infinite"):
        engine.skip(1)
    engine.reset()
    assert torch.isfinite(engine.skip(1).output).all()


def test_states_above_the_threshold_send_events_at_the_first_step() -> None:
    """Targets are below the threshold, and the assigned state had no events."""
    layer = slow(0.9)
    engine, ordinary = EventEngine(layer), EventEngine(layer, packing="dense")
    for e in (engine, ordinary):
        state = e.state
        e.state = {"c": torch.full_like(state["c"], 1.0), "y": torch.zeros_like(state["y"])}
    skipped, expected = engine.skip(5), ordinary.skip(5)
    assert torch.equal(skipped.steps, expected.steps)
    assert skipped.steps[0] == 0
    assert_close(skipped.outputs, expected.outputs)


def test_states_without_decay_send_events_when_they_reach_the_threshold() -> None:
    """The forget gate of the units is 1, so their states grow by a constant per step and have no target."""
    torch.manual_seed(0)
    layer = ELSTM(INPUTS, 640, threshold=Threshold.constant(3.0), compare="cell").eval()
    prune(layer, 0.1)
    with torch.no_grad():
        layer.get_parameter("bias_ih_l0").view(4, -1)[1] = 40.0
        layer.get_parameter("bias_ih_l0").view(4, -1)[2].normal_(0, 0.03)
    engine, ordinary = EventEngine(layer), EventEngine(layer, packing="dense")
    skipped, expected = engine.skip(80), ordinary.skip(80)
    assert 0 < len(expected.steps) < 40
    assert torch.equal(skipped.steps, expected.steps)
    assert_close(skipped.outputs, expected.outputs)


def test_copies_continue_with_the_same_bits() -> None:
    engine = EventEngine(slow(0.9, 0.25))
    every = torch.arange(INPUTS, dtype=torch.int32), torch.ones(INPUTS)
    one = torch.tensor([4], dtype=torch.int32), torch.tensor([0.5])
    for _ in range(40):  # most units are reached
        engine.skip(2)
        engine.step(every)
    copied = copy.deepcopy(engine)
    for e in (engine, copied):
        e.reset_activity()
        for _ in range(8):
            e.skip(3)
            e.step(one)
    assert engine.activity == copied.activity
    assert torch.equal(engine.state["c"], copied.state["c"])


@pytest.mark.parametrize("how", ["step", "run", "state", "reset", "time"])
def test_lazy_updates_end(how: str) -> None:
    """States are slow: one that is not up to date, or relaxed twice, differs after the next gap."""
    layer = slow(0.9)
    engine, ordinary, other = EventEngine(layer), EventEngine(layer, packing="dense"), EventEngine(layer)
    other.run(torch.randn(9, INPUTS))
    x = torch.randn(2, INPUTS)
    one = torch.tensor([4], dtype=torch.int32), torch.tensor([0.5])
    for e in (engine, ordinary):
        e.skip(20)
        e.step(one)
        e.skip(20)
        match how:
            case "step":
                e.step(x[0])
            case "run":
                e.run(x)
            case "state":
                e.state = other.state
            case "reset":
                e.reset()
            case _:
                e.time = 3
        e.skip(5)
        e.step(one)
    assert engine.activity.macs < ordinary.activity.macs
    assert_close(engine.state["c"], ordinary.state["c"])
