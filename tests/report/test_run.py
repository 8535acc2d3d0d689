import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import egru
from egru.records import FORMAT, FormatError
from egru.report import Epoch, Raster, RunReport, StepTime, ThresholdSearch
from tests.report import examples


def test_round_trip_through_json_is_exact():
    measured = examples.run(step_time=StepTime(3e-6, "EventEngine", "a CPU"), changed=("hidden",), split="validation")
    for original in (*examples.pair(), examples.searched(), measured):
        again = RunReport.from_dict(json.loads(json.dumps(original.to_dict(), allow_nan=False)))
        assert again == original


def test_round_trip_of_a_measured_model_is_exact():
    layer = egru.EGRU(2, 5, 2, bidirectional=True)
    with egru.ActivityMonitor(layer) as monitor:
        layer(torch.randn(7, 3, 2))
    original = examples.run("EGRU", activity=monitor.summary())
    again = RunReport.from_dict(json.loads(json.dumps(original.to_dict(), allow_nan=False)))
    assert again == original
    assert len(again.event_layers) == 4


def test_derived_numbers_are_not_part_of_the_record():
    run = examples.run()
    derived = run.derived()
    assert derived["forward_macs"] == run.activity.forward_macs
    assert derived["dense_backward_macs"] == run.activity.dense_backward_macs
    assert not set(derived) & set(run.to_dict()["activity"])


def test_another_format_is_refused():
    plain = examples.run().to_dict()
    expected = rf"report\.json: the record has format 1; this version of egru reads format {FORMAT}"
    with pytest.raises(FormatError, match=expected):
        RunReport.from_dict(plain | {"format": 1}, "report.json")


def test_saving_is_dense_divided_by_effective_macs():
    run = examples.run()
    assert run.forward_saving == run.activity.dense_forward_macs / run.activity.forward_macs > 1
    assert run.backward_saving == run.activity.dense_backward_macs / run.activity.backward_macs > 1
    dense = examples.run("GRU")
    assert (dense.forward_saving, dense.backward_saving) == (1, 1)


def test_event_layers_are_those_with_backward_sparsity():
    assert [layer.name for layer in examples.run("EGRU").event_layers] == ["egru"]
    assert examples.run("GRU").event_layers == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accuracy": math.nan}, "accuracy must be a fraction between 0 and 1, got nan"),
        ({"accuracy": 97.8}, r"accuracy must be a fraction between 0 and 1, got 97\.8"),
        ({"accuracy": None}, "accuracy or loss is required, got None for both"),
        ({"loss": math.nan}, "loss must be finite, got nan"),
        ({"seconds": -1.0}, r"seconds must be finite and not negative, got -1\.0"),
        ({"seconds": math.inf}, "seconds must be finite and not negative, got inf"),
        ({"name": " "}, "name must not be empty"),
    ],
)
def test_invalid_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        examples.run(**changes)


def test_derived_run_has_no_history():
    assert examples.searched().history == ()
    with pytest.raises(ValueError, match="history must be empty with a search, got 4 epochs"):
        dataclasses.replace(examples.searched(), history=examples.run().history)
    trials = examples.searched().search.trials  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(ValueError, match="chosen must be the index of one of the 3 trials, got 3"):
        ThresholdSearch("first", trials, 3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_time_per_step_must_be_positive(seconds):
    with pytest.raises(ValueError, match="StepTime: seconds must be positive and finite"):
        StepTime(seconds, "EventEngine", "a CPU")


def test_epochs_must_increase():
    history = examples.run().history
    with pytest.raises(ValueError, match=r"the epochs of history must increase, got \[2, 1\]"):
        examples.run(history=(history[1], history[0]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train_loss", math.nan, "train_loss must be finite, got nan; did the run diverge?"),
        ("validation_accuracy", math.nan, "validation_accuracy must be a fraction"),
        ("activity_sparsity", -0.1, "activity_sparsity must be a fraction"),
        ("seconds", math.nan, "seconds must be finite"),
        ("layer_sparsity", {"a": 2.0}, "layer_sparsity of a must be a fraction"),
    ],
)
def test_invalid_epoch_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Epoch(5, 1.0, 0.5, 0.5, 1.0), **{field: value})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input": np.zeros((4, 1))}, ValueError, "must have the same number of steps, got 4 and 20"),
        ({"input": np.zeros(20)}, ValueError, r"input must have shape \(T, I\) without empty dimensions, got \(20,\)"),
        ({"events": np.zeros((20, 0))}, ValueError, r"events must have shape \(T, H\)"),
        ({"events": np.full((20, 2), np.nan)}, ValueError, "events must be finite"),
        ({"image": np.zeros(64)}, ValueError, "image must have shape"),
        ({"image": np.zeros((4, 2, 2))}, ValueError, "image must have one frame per step"),
        ({"layers": (("a", 3),)}, ValueError, r"layers must add up to 16 units, got \(\('a', 3\),\)"),
        ({"words": ("a",)}, ValueError, "words must have one entry per step, got 1 for 20 steps"),
        ({"events": torch.zeros(20, 2)}, TypeError, "events must be a numpy array .* got Tensor"),
    ],
)
def test_invalid_raster_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(examples.raster(), **changes)


def test_raster_sparsity_is_the_fraction_of_zeros():
    raster = Raster("r", np.zeros((2, 1)), np.array([[0.0, 0.5], [0.0, 0.0]]), None, "")
    assert raster.activity_sparsity == 0.75
