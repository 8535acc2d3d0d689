"""Finding and recording event layers, and the description of their directions."""

import inspect

import pytest
import torch
from torch import nn

import egru
from egru.layers import event_directions, event_layers, labelled_modules, record
from tests.helpers import lively


def test_directions_are_listed_in_order_of_execution():
    layer = egru.EGRU(3, 5, 2, bidirectional=True)
    rows = [(d.name, d.index, d.layer, d.reverse, d.input_size, d.suffix) for d in layer.directions()]
    assert rows == [
        ("l0", 0, 0, False, 3, "_l0"),
        ("l0_reverse", 1, 0, True, 3, "_l0_reverse"),
        ("l1", 2, 1, False, 10, "_l1"),
        ("l1_reverse", 3, 1, True, 10, "_l1_reverse"),
    ]
    (cell,) = egru.EGRUCell(3, 5).directions()
    assert (cell.name, cell.input_size, cell.suffix) == ("cell", 3, "")


@pytest.mark.parametrize("make", [egru.EGRU, egru.ELSTM, egru.ERNN, egru.EGRUCell])
def test_weights_are_the_parameters_of_the_direction(make):
    options = {} if make is egru.EGRUCell else {"num_layers": 2, "bidirectional": True}
    layer = make(3, 5, threshold=egru.Threshold("abs"), reset_scale=0.5, **options)
    for direction in layer.directions():
        weights = layer.weights(direction)
        assert weights.ih is layer.get_parameter("weight_ih" + direction.suffix)
        assert weights.hh is layer.get_parameter("weight_hh" + direction.suffix)
        assert weights.bias_ih is layer.get_parameter("bias_ih" + direction.suffix)
        assert weights.bias_hh is layer.get_parameter("bias_hh" + direction.suffix)
        tau = layer.threshold_parameters()[direction.name]
        assert tau is layer.get_parameter("threshold" + direction.suffix)
        assert torch.equal(weights.theta, tau.abs())
        assert torch.equal(weights.theta, layer.thresholds()[direction.name])
        assert weights.reset_scale == 0.5


def test_weights_do_not_apply_dropconnect():
    layer = egru.EGRU(3, 5, dropconnect=0.5).train()
    (direction,) = layer.directions()
    before = torch.get_rng_state()
    assert torch.equal(layer.weights(direction).hh, layer.get_parameter("weight_hh_l0"))
    assert torch.equal(torch.get_rng_state(), before)


def test_selected_layer_describes_its_smaller_input():
    layer = egru.EGRU(6, 5).select(torch.tensor([0, 2]), torch.tensor([1, 3, 4]))
    (direction,) = layer.directions()
    assert direction.input_size == 3
    assert layer.weights(direction).ih.shape == (6, 3)


def test_labels_are_module_names_or_the_class_of_the_model():
    shared = egru.EGRU(4, 4)
    model = nn.ModuleDict({"first": egru.EGRU(3, 4, 2), "twice": shared, "again": shared, "out": nn.Linear(4, 2)})
    assert [label for label, _ in event_layers(model)] == ["first", "twice"]
    assert [label for label, _, _ in event_directions(model)] == ["first.l0", "first.l1", "twice"]
    assert [label for label, _ in labelled_modules(model)] == ["moduledict", "first", "twice", "out"]
    assert [label for label, _ in event_layers(egru.ELSTM(3, 4))] == ["elstm"]
    assert not list(event_layers(nn.GRU(3, 4)))


def test_labels_do_not_contain_the_name_that_compile_inserts():
    compiled = torch.compile(nn.Sequential(egru.EGRU(3, 4)), backend="eager")
    assert [label for label, _ in event_layers(compiled)] == ["0"]  # pyright: ignore[reportArgumentType]
    inner = nn.ModuleList([torch.compile(egru.EGRU(3, 4), backend="eager")])  # pyright: ignore[reportArgumentType]
    assert [label for label, _ in event_layers(inner)] == ["0"]


def test_record_collects_every_direction_and_stops_afterwards():
    model = nn.ModuleList([lively(egru.EGRU(3, 4, bidirectional=True)), egru.ERNN(8, 5)])
    x = torch.randn(6, 2, 3)
    with record(model) as records:
        y, _ = model[0](x)
        z, _ = model[1](y)
    model[0](x)
    assert [r.label for r in records] == ["0.l0", "0.l0_reverse", "1"]
    assert [r.layer for r in records] == [model[0], model[0], model[1]]
    assert torch.equal(torch.cat([records[0].y, records[1].y], -1), y)
    assert torch.equal(records[2].y, z)
    assert torch.equal(records[2].input, y)
    for r in records:
        assert torch.equal(r.y, torch.where(r.c > r.theta, r.c, 0))


def test_record_stops_after_an_error():
    layer = egru.EGRU(3, 4)
    with pytest.raises(ValueError, match="features"), record(layer):
        layer(torch.zeros(1, 1, 1))
    assert not layer._observers


def test_record_of_a_compiled_model():
    layer = lively(egru.EGRU(3, 4, 2))
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(6, 2, 3)
    with record(layer) as expected:
        layer(x)
    with record(layer) as records:
        compiled(x)
    assert [r.label for r in records] == ["egru.l0", "egru.l1"]
    for compiled_record, eager_record in zip(records, expected, strict=True):
        torch.testing.assert_close(compiled_record.c, eager_record.c)


OPTIONS = {
    "num_layers": 2,
    "bias": False,
    "batch_first": True,
    "dropout": 0.1,
    "bidirectional": True,
    "events": "signed",
    "reset": "none",
    "reset_gate": "after",
    "compare": "output",
    "threshold": egru.Threshold("abs"),
    "surrogate": egru.Surrogate(0.5),
    "reset_scale": 0.5,
    "dropconnect": 0.2,
    "zoneout": 0.3,
    "dropout_mode": "plain",
    "backend": "reference",
    "lean": True,
    "recurrent_clip": 2.0,
    "device": "cpu",
    "dtype": torch.float16,
}


@pytest.mark.parametrize("make", [egru.EGRU, egru.EGRUCell, egru.ELSTM, egru.ERNN])
def test_every_argument_of_the_signature_reaches_the_layer(make):
    parameters = inspect.signature(make).parameters
    assert set(parameters) <= {"input_size", "hidden_size", *OPTIONS}
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values())
    options = {name: value for name, value in OPTIONS.items() if name in parameters}
    layer = make(3, 4, **options)
    attributes = {"threshold": "threshold_config"}
    for name, value in options.items():
        if name in ("device", "dtype"):
            assert getattr(layer.reset_scale, name) == (torch.device(value) if name == "device" else value)
        else:
            assert getattr(layer, attributes.get(name, name)) == value, name
