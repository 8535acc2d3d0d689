"""Raising of thresholds after training."""

import pytest
import torch

import egru
from egru.compress import raise_thresholds
from egru.layers import event_layers
from egru.models import LanguageModel
from tests.helpers import lively


def theta(model):
    return [theta for _, layer in event_layers(model) for theta in layer.thresholds().values()]


@pytest.mark.parametrize("kind", ["sigmoid", "abs", "clamp", "identity"])
@pytest.mark.parametrize("per_unit", [True, False])
def test_only_thresholds_below_the_floor_are_raised(kind, per_unit):
    layer = egru.EGRU(
        2, 40, threshold=egru.Threshold(kind, mean=0.3, std=None if kind == "clamp" else 1.0, per_unit=per_unit)
    )
    before = theta(layer)[0].clone()
    raise_thresholds(layer, 0.45)
    torch.testing.assert_close(theta(layer)[0], before.clamp(min=0.45))
    raise_thresholds(layer, 0.2)
    torch.testing.assert_close(theta(layer)[0], before.clamp(min=0.45))


@pytest.mark.parametrize("kind", ["sigmoid", "abs", "clamp"])
def test_floor_zero_changes_nothing(kind):
    layer = egru.EGRU(2, 40, threshold=egru.Threshold(kind), reset="threshold")
    before = theta(layer)[0].clone()
    raise_thresholds(layer, 0.0)
    assert torch.equal(theta(layer)[0], before)
    assert layer.reset_scale.shape == ()


def test_an_invalid_floor_changes_nothing():
    layer = egru.EGRU(2, 4, 2, reset="threshold")
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError, match="floor must be"):
        raise_thresholds(layer, (0.9, 1.5))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_raising_a_negative_threshold_sets_the_scale_to_zero():
    """With a negative threshold an event adds to its state; afterwards it must not change the state."""
    layer = egru.EGRU(2, 3, reset="threshold", threshold=egru.Threshold.constant(-0.2))
    raise_thresholds(layer, 0.1)
    assert layer.reset_scale.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("floor", "scale"), [(-0.2, 2.0), (0.0, 0.0)])
def test_negative_thresholds_are_raised_to_floors_up_to_zero(floor, scale):
    layer = egru.EGRU(2, 3, reset="threshold", threshold=egru.Threshold.constant(-0.4))
    raise_thresholds(layer, -0.5)
    assert layer.reset_scale == 1.0
    raise_thresholds(layer, floor)
    torch.testing.assert_close(theta(layer)[0], torch.full((3,), floor))
    torch.testing.assert_close(layer.reset_scale, torch.full((3,), scale))


def test_raising_the_thresholds_of_a_converted_gru_makes_it_sparse():
    gru = torch.nn.GRU(3, 20)
    layer = egru.EGRU.from_gru(gru)
    x, activity = torch.randn(30, 4, 3), []
    for floor in (-1.0, -0.2, -0.1, 0.0):
        raise_thresholds(layer, floor)
        y, _ = layer(x)
        assert y[y != 0].min() > floor
        activity.append((y != 0).double().mean().item())
    assert activity[0] == 1.0
    assert activity == sorted(activity, reverse=True)
    assert 0.1 < activity[-1] < 0.9


def test_one_floor_per_layer():
    model = LanguageModel(11, 6, 7, num_layers=3, threshold=egru.Threshold("clamp", mean=0.01))
    raise_thresholds(model, (0.0, 0.2, 0.9))
    lowest = [t.min().item() for t in theta(model)]
    assert lowest[0] < 0.1
    assert lowest[1:] == pytest.approx([0.2, 0.9])


def test_without_reset_only_small_events_disappear():
    """Without recurrent weights the states do not depend on the events."""
    layer = lively(egru.EGRU(3, 30, reset="none", threshold=egru.Threshold.constant(0.05)), 3.0)
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0").zero_()
    x = torch.randn(20, 4, 3)
    y, state = layer(x)
    raise_thresholds(layer, 0.3)
    higher, kept = layer(x)
    assert 0 < (higher != 0).sum() < (y != 0).sum()
    assert torch.equal(higher, torch.where(y > 0.3, y, 0.0))
    assert torch.equal(kept.c, state.c)


@pytest.mark.parametrize("directions", [1, 2])
def test_events_clear_the_same_amount_as_before(directions):
    threshold = egru.Threshold("clamp", mean=0.2)
    layer = lively(
        egru.EGRU(3, 30, 2, bidirectional=directions == 2, reset="threshold", threshold=threshold, reset_scale=0.8), 3.0
    )
    cleared = [0.8 * values.clone() for values in theta(layer)]
    raise_thresholds(layer, [0.3, 0.1] * directions)
    raise_thresholds(layer, 0.35)
    for before, after, scale in zip(cleared, theta(layer), layer.reset_scales().values(), strict=True):
        assert after.min().item() == pytest.approx(0.35)
        torch.testing.assert_close(after * scale, before)
    y, _ = layer(torch.randn(20, 4, 3))
    assert 0 < (y != 0).double().mean() < 1
    assert y[y != 0].min() > 0.349


@pytest.mark.parametrize("reset", ["output", "hard", "none"])
def test_other_resets_keep_their_scale(reset):
    layer = egru.EGRU(3, 5, reset=reset)
    raise_thresholds(layer, 0.9)
    assert layer.reset_scale == 1.0


def test_select_keeps_the_scale_of_each_unit():
    layer = egru.EGRU(3, 5, reset="threshold", threshold=egru.Threshold.constant(0.2))
    raise_thresholds(layer, 0.4)
    layer.reset_scale[3] = 0.1
    assert layer.select(torch.tensor([1, 3])).reset_scale.tolist() == pytest.approx([0.5, 0.1])


@pytest.mark.parametrize(
    ("kind", "floor", "message"),
    [
        ("sigmoid", 1.0, "at least 0 and below 1 with kind='sigmoid', got 1.0"),
        ("clamp", 1.5, "at least 0 and at most 1 with kind='clamp', got 1.5"),
        ("abs", -0.1, "at least 0 with kind='abs', got -0.1"),
        ("identity", float("nan"), "finite with kind='identity', got nan"),
        ("identity", -float("inf"), "finite with kind='identity', got -inf"),
    ],
)
def test_floor_outside_the_range_of_the_kind_raises(kind, floor, message):
    with pytest.raises(ValueError, match=message):
        raise_thresholds(egru.EGRU(2, 3, threshold=egru.Threshold(kind)), floor)


def test_wrong_number_of_floors_or_dense_model_raises():
    with pytest.raises(
        ValueError, match=r"one number or a sequence of length 2, one per layer and direction; got \(0.1, 0.2, 0.3\)"
    ):
        raise_thresholds(egru.EGRU(2, 3, num_layers=2), (0.1, 0.2, 0.3))
    with pytest.raises(ValueError, match="the model must have an event layer, got GRU"):
        raise_thresholds(torch.nn.GRU(2, 3), 0.1)
