import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import egru
from egru.activity import ActivitySummary, EnergyModel, LayerActivity, LinearActivity
from egru.models.baselines import CoRNN, IndRNN
from egru.records import FORMAT, FormatError

SIZES = st.integers(1, 40)
FRACTIONS = st.floats(0, 1)
NAMES = st.text(max_size=12)
GATES = {"EGRU": 3, "ELSTM": 4, "GRU": 3, "LSTM": 4, "CoRNN": 1, "IndRNN": 1}


class Oscillators(CoRNN):
    """A subclass, whose class name does not say how many gates it has."""


@st.composite
def layers(draw: st.DrawFn) -> LayerActivity:
    """Event layers, GRU, LSTM with and without projection, CoRNN and IndRNN."""
    kind = draw(st.sampled_from(sorted(GATES)))
    inputs, hidden, steps = draw(SIZES), draw(SIZES), draw(st.integers(1, 10**9))
    outputs = draw(st.integers(1, hidden)) if kind == "LSTM" else hidden
    projection = outputs if outputs < hidden else None
    has_events = kind in ("EGRU", "ELSTM")
    return LayerActivity(
        draw(NAMES),
        kind if draw(st.booleans()) else f"My{kind}",
        inputs,
        hidden,
        GATES[kind],
        {"CoRNN": 2 * hidden, "IndRNN": 1}.get(kind, projection),
        steps,
        tuple(draw(st.lists(st.integers(0, steps), min_size=outputs, max_size=outputs))),
        draw(st.integers(0, steps * inputs)),
        draw(st.integers(0, steps * hidden)) if has_events else None,
        draw(st.integers(0, steps * hidden)) if has_events else None,
        draw(FRACTIONS),
    )


@st.composite
def linears(draw: st.DrawFn) -> LinearActivity:
    inputs, calls = draw(SIZES), draw(st.integers(1, 10**9))
    return LinearActivity(draw(NAMES), inputs, draw(SIZES), calls, draw(st.integers(0, calls * inputs)))


JOULES = st.floats(0, 1, allow_nan=False)
SUMMARIES = st.builds(
    ActivitySummary,
    st.lists(layers(), min_size=1, max_size=4).map(tuple),
    st.lists(linears(), max_size=3).map(tuple),
    st.integers(0, 10**12),
    st.just(EnergyModel()) | st.builds(EnergyModel, JOULES, JOULES),
)
DERIVED = (
    "activity_sparsity",
    "backward_sparsity",
    "forward_macs",
    "dense_backward_macs",
    "estimated_joules",
    "estimated_dense_joules",
)


@given(SUMMARIES)
def test_round_trip_is_exact(summary):
    through_json = ActivitySummary.from_dict(json.loads(summary.to_json()))
    assert through_json == ActivitySummary.from_dict(summary.to_dict()) == summary
    assert json.loads(summary.to_json()) == summary.to_dict()
    for name in DERIVED:
        assert getattr(through_json, name) == getattr(summary, name)


@given(SUMMARIES)
def test_derived_numbers_are_not_stored(summary):
    stored = set(summary.to_dict()) | {name for layer in summary.to_dict()["layers"] for name in layer}
    assert not stored & {*DERIVED, "unit_activity", "backward_skippable", "macs", "input_density", "activity"}


@pytest.mark.parametrize(
    "module",
    [
        egru.EGRU(3, 5, 2, bidirectional=True),
        egru.ELSTM(3, 5),
        egru.ERNN(3, 5, 2),
        nn.GRU(3, 5, 2),
        nn.LSTM(3, 5, bidirectional=True),
        nn.LSTM(3, 5, 2, proj_size=2),
        nn.RNN(3, 5),
        CoRNN(3, 5),
        Oscillators(3, 5),
        IndRNN(3, 5, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_round_trip_of_a_measured_module_is_exact(module):
    module = copy.deepcopy(module).double()
    with egru.ActivityMonitor(module, energy=EnergyModel(1e-12, 3.5e-12)) as monitor:
        module(torch.randn(7, 2, 3, dtype=torch.float64).requires_grad_())[0].sum().backward()
    summary = monitor.summary()
    stored = ActivitySummary.from_dict(json.loads(summary.to_json()))
    assert stored == summary
    assert stored.energy == EnergyModel(1e-12, 3.5e-12)
    assert [layer.cost for layer in stored.layers] == [layer.cost for layer in summary.layers]


def test_subclass_of_cornn_keeps_its_gate():
    module = Oscillators(3, 5)
    with egru.ActivityMonitor(module) as monitor:
        module(torch.randn(7, 2, 3))
    (layer,) = ActivitySummary.from_dict(monitor.summary().to_dict()).layers
    assert (layer.kind, layer.cost.gates, layer.cost.recurrent_size) == ("Oscillators", 1, 10)


@pytest.mark.parametrize("number", [1, FORMAT + 1, str(FORMAT)])
def test_another_format_is_refused(number):
    summary = ActivitySummary((), (), 1, EnergyModel())
    message = f"result.json: the record has format {number!r}; this version of egru reads format {FORMAT}"
    with pytest.raises(FormatError, match=message):
        ActivitySummary.from_dict(summary.to_dict() | {"format": number}, "result.json")


def test_missing_format_and_missing_or_unknown_fields_are_refused():
    plain = ActivitySummary((), (), 1, EnergyModel()).to_dict()
    with pytest.raises(FormatError, match="ActivitySummary: the record has no format number"):
        ActivitySummary.from_dict({name: value for name, value in plain.items() if name != "format"})
    with pytest.raises(ValueError, match="field 'parameters' is missing"):
        ActivitySummary.from_dict({name: value for name, value in plain.items() if name != "parameters"})
    with pytest.raises(ValueError, match="unknown field 'overall'"):
        ActivitySummary.from_dict(plain | {"overall": {}})
    with pytest.raises(ValueError, match="EnergyModel: field 'mac' is missing"):
        ActivitySummary.from_dict(plain | {"energy": {"weight_read": 1.0}})


def test_layer_without_steps_is_refused():
    with pytest.raises(ValueError, match="LayerActivity 'a': requires at least one step and one unit, got 0 and 1"):
        LayerActivity("a", "GRU", 1, 1, 3, None, 0, (0,), 0, None, None, 0.0)
