"""Choice of thresholds without training."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import egru
from egru.compress.calibrate import LEVELS, search
from egru.compress.ranges import measure_ranges
from egru.layers import event_layers
from egru.types import EVENTS


def smooth(*shape):
    """Return slowly varying sequences, ``(T, B, features)``."""
    return torch.randn(shape).cumsum(0) / 5


def model(events: Any = "delta", layers: int = 1) -> Any:
    return egru.convert(nn.GRU(4, 24, layers), events)


@pytest.mark.parametrize("events", ["signed", "delta"])
@pytest.mark.parametrize("per", ["unit", "layer"])
def test_outputs_stay_within_the_limit_and_events_become_fewer(events, per):
    layer, batches = model(events), [smooth(30, 4, 4), smooth(30, 2, 4)]
    expected = [layer(x)[0] for x in batches]
    result = egru.calibrate(layer, batches, within=0.1, per=per)
    assert result.before.events > 0.99
    assert result.after.events < 0.75
    pairs = [(layer(x)[0], y) for x, y in zip(batches, expected, strict=True)]
    errors = [((a - b).square().mean() / b.square().mean()).sqrt().item() for a, b in pairs]
    assert sum(errors) / 2 == pytest.approx(result.after.loss)
    assert 0.05 < result.after.loss <= 0.1
    theta = layer.thresholds()["l0"]
    assert torch.equal(theta, result.floors[0])
    assert (theta.max() > 1.01 * theta.min()) == (per == "unit")
    ratio = theta / theta.mean()
    if per == "unit" and events == "delta":
        fresh = egru.convert(layer.to_gru(), "delta")
        ranges = measure_ranges(fresh, lambda: [fresh(x) for x in batches])[0]
        torch.testing.assert_close(ratio, ranges / ranges.mean(), rtol=1e-6, atol=1e-9)


def test_a_larger_limit_gives_fewer_events():
    x = [smooth(30, 4, 4)]
    gru = nn.GRU(4, 24)
    activities = [egru.calibrate(egru.convert(gru), x, within=within).after.events for within in (0.03, 0.1, 0.3)]
    assert activities == sorted(activities, reverse=True)
    assert activities[0] > activities[2]


def test_every_trial_is_reported_with_its_verdict():
    lines: list[str] = []
    result = egru.calibrate(model(), [smooth(30, 4, 4)], within=0.1, log=lines.append)
    assert len(lines) == result.trials
    assert [line.startswith(f"trial {i}: loss ") for i, line in enumerate(lines, 1)] == [True] * len(lines)
    for line in lines:
        accepted = float(line.split("loss ")[1].split(",")[0]) <= 0.1
        assert line.endswith(": accepted" if accepted else ": above the limit of 0.1000")
    assert any(line.endswith(": accepted") for line in lines)


def test_loss_of_the_user_is_the_limit():
    layer, x = model(), smooth(30, 4, 4)
    batches = [(x, layer(x)[0].detach())]
    calls = []

    def loss(model, batch):
        assert not model.training
        calls.append(batch)
        return (model(batch[0])[0] - batch[1]).square().mean()

    result = egru.calibrate(layer, batches, within=1e-3, loss=loss)
    assert layer.training
    assert result.before.loss < result.after.loss <= result.before.loss + 1e-3
    assert len(calls) == result.trials + 2


def test_thresholds_are_never_lowered_and_nothing_changes_without_room():
    layer = model("delta")
    egru.compress.raise_thresholds(layer, 5.0)
    before = layer.thresholds()["l0"].clone()
    egru.calibrate(layer, [smooth(30, 4, 4)], within=0.5)
    assert torch.equal(layer.thresholds()["l0"], before)
    layer, x = model("delta"), smooth(30, 4, 4)
    with pytest.warns(UserWarning, match="no threshold keeps the change within 1e-09, so thresholds are unchanged"):
        egru.calibrate(layer, [x], within=1e-9)
    result = egru.calibrate(layer, [x], within=0.0)  # asks for that
    assert result.levels == (0.0,)
    assert result.after == result.before
    assert not layer.thresholds()["l0"].any()


def test_layers_get_different_levels():
    layer = model(layers=2)
    result = egru.calibrate(layer, [smooth(40, 4, 4)], within=0.1)
    assert len(result.levels) == len(result.floors) == 2
    assert result.levels[0] != result.levels[1]


def test_search_finds_the_highest_accepted_levels():
    class Trial:
        def __init__(self, levels: Any) -> None:
            self.loss = 0.01 * levels[0] + 0.001 * levels[1]
            self.activity = self
            self.forward_macs = 1000 - sum(levels)

    measure: Any = Trial
    common = search(measure, 2, 0.2)
    assert common is not None
    assert common[0] <= common[1]
    assert Trial((common[0], common[1] + 1)).loss > 0.2 or common[1] + 1 == len(LEVELS)
    assert search(measure, 2, -1.0) is None


def test_packed_sequences_ignore_padding():
    layer = model()
    packed = pack_sequence([smooth(n, 4) for n in (20, 3)])
    ranges = measure_ranges(layer, lambda: [layer(packed)])
    states = torch.cat([layer(x[:, None])[0][:, 0] for x in torch.nn.utils.rnn.unpack_sequence(packed)])
    torch.testing.assert_close(ranges[0], states.std(0, correction=0))
    assert egru.calibrate(layer, [packed], within=0.2).after.events < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": []}, "sequences must contain at least one batch"),
        ({"within": -1}, "within must not be negative, got -1"),
        ({"per": "network"}, "per must be one of unit, layer"),
        ({"model": nn.Linear(4, 4)}, "the model must have an event layer, got Linear"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    arguments = {"model": model(), "sequences": [torch.randn(5, 2, 4)], **arguments}
    with pytest.raises(ValueError, match=message):
        egru.calibrate(**arguments)


class Two(nn.Module):
    """Two layers in parallel; the second one changes faster. Returns both outputs and other values."""

    def __init__(self, layer_class: Any = nn.GRU) -> None:
        super().__init__()
        self.a, self.b = layer_class(4, 16), layer_class(4, 16)

    def forward(self, x: torch.Tensor) -> Any:
        first, state = self.a(x)
        return first, {"second": self.b(5 * x)[0], "tokens": first.argmax(-1), "none": None}, state


@pytest.mark.parametrize("layer_class", [nn.GRU, nn.LSTM])
@pytest.mark.filterwarnings("ignore:.*Converted.* runs in plain torch")
def test_every_output_stays_within_the_limit(layer_class):
    network, x = egru.convert(Two(layer_class)), smooth(20, 8, 4)
    before = network(x)
    result = egru.calibrate(network, [x], within=0.1)
    after = network(x)
    pairs = [(after[0], before[0]), (after[1]["second"], before[1]["second"])]
    errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    assert max(errors) == pytest.approx(result.after.loss)
    assert 0.05 < result.after.loss <= 0.1


def test_states_are_not_compared_and_the_state_of_a_cell_is():
    layer, x = model(), smooth(30, 4, 4)
    alone = egru.calibrate(egru.convert(layer.to_gru()), [x], within=0.1)

    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = egru.convert(layer.to_gru())

        def forward(self, x: torch.Tensor) -> Any:
            return self.rnn(x)[0]

    assert egru.calibrate(Output(), [x], within=0.1).levels == alone.levels
    cell: Any = egru.convert(nn.GRUCell(4, 24))
    y = cell(x[0])
    result = egru.calibrate(cell, [x[0]], within=0.1)
    assert ((cell(x[0]) - y).norm() / y.norm()).item() == pytest.approx(result.after.loss)


def test_other_outputs_require_a_loss():
    class Result:
        scores = torch.ones(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = egru.EGRU(4, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.rnn(x)[0], Result()

    with pytest.raises(TypeError, match="the model must return tensors, got Result; pass loss"):
        egru.calibrate(Model(), [torch.randn(5, 2, 4)])


def test_limits_that_accept_a_network_without_events_are_reported():
    x = smooth(30, 4, 4)
    with pytest.warns(UserWarning, match=r"within=1 accepts outputs of zeros, whose difference is 1; pass a smaller"):
        assert egru.calibrate(model(), [x], within=1).after.events < 0.01
    with pytest.warns(UserWarning, match="within=10 allows thresholds that leave no events at all; pass a smaller"):
        result = egru.calibrate(model("signed"), [x[:2]], within=10, loss=lambda m, x: m(x)[0].square().mean())
    assert result.after.events == 0


def test_a_layer_that_does_not_run_is_named():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = model(), model()

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(x)[0]

    with pytest.raises(ValueError, match="layer b did not run on any sequence; pass sequences that run every event"):
        egru.calibrate(Unused(), [torch.randn(5, 2, 4)])


@pytest.mark.parametrize("events", EVENTS)
def test_thresholds_per_unit_are_raised(events):
    layer = model(events)
    floor = torch.rand(24)
    egru.compress.raise_thresholds(layer, [floor])
    torch.testing.assert_close(layer.thresholds()["l0"], floor)
    with pytest.raises(ValueError, match="one value per threshold, 24; got shape \\(3,\\)"):
        egru.compress.raise_thresholds(layer, [torch.rand(3)])
    assert [label for label, _ in event_layers(layer)] == ["convertedgru"]
