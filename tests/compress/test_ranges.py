"""Ranges of units: from which batches they are taken, and fine-tuning with data in which some units do not move."""

from typing import Any

import pytest
import torch
from torch import nn

import egru
from egru.compress import ThresholdSchedule
from egru.compress.ranges import FEWEST_STATES, LOWEST_RANGE, Ranges
from egru.layers import record
from egru.types import EVENTS


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)[0].square().mean()


def sparsify(model: nn.Module, data: Any, target: Any = 0.2, **options: Any) -> egru.compress.Sparsification:
    options = {"loss": loss, "epochs": 3, "log": lambda line: None} | options
    return egru.sparsify(model, data, options.pop("loss"), target, **options)


@pytest.mark.parametrize("events", EVENTS)
def test_ranges_of_several_batches_are_those_of_their_states(events):
    layer, batches = egru.convert(nn.GRU(4, 8, 2), events), [torch.randn(5, n, 4) for n in (1, 3, 60)]
    ranges = Ranges(layer)
    states = []
    for x in batches:
        with record(layer) as records:
            layer(x)
        ranges.add(records)
        states.append(records[1].c.flatten(0, 1))
        assert ranges.complete == (len(torch.cat(states)) >= FEWEST_STATES)
    values = torch.cat(states)
    expected = values.std(0, correction=0) if events == "delta" else values.square().mean(0).sqrt()
    torch.testing.assert_close(ranges.measured("convertedgru.l1"), expected)
    torch.testing.assert_close(ranges.scales("convertedgru.l1"), expected)


def test_units_that_never_move_are_scaled_like_small_ones():
    layer = egru.convert(nn.GRU(4, 8))
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            layer.get_parameter(name)[16] = 0  # the candidate of the first unit
    with record(layer) as records:
        layer(torch.randn(20, 16, 4))
    ranges = Ranges(layer)
    ranges.add(records)
    measured, scales = ranges.measured("convertedgru"), ranges.scales("convertedgru")
    assert measured is not None
    assert scales is not None
    assert not ranges.complete
    assert measured[0] == 0
    torch.testing.assert_close(scales[0], LOWEST_RANGE * records[0].c.square().mean((0, 1)).sqrt().mean())
    torch.testing.assert_close(scales[1:], measured[1:])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("first", ["single step", "silence"])
def test_first_batch_in_which_no_unit_moves(first, events):
    gru = nn.GRU(4, 16, bias=first == "single step")
    silent = torch.randn(1, 1, 4) if first == "single step" else torch.zeros(20, 16, 4)
    result = sparsify(egru.convert(gru, events), [silent, torch.randn(20, 16, 4)])
    assert 0 < result.after.events <= 0.2


@pytest.mark.timeout(60)
def test_cells_in_a_loop():
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, outputs = None, []
            for step in x:
                h = self.cell(step, h)
                outputs.append(h)
            return torch.stack(outputs)

    data = [torch.randn(1, 1, 4), torch.randn(20, 16, 4)]
    assert 0 < sparsify(egru.convert(Loop()), data).after.events <= 0.2


@pytest.mark.timeout(60)
def test_units_with_the_same_state_in_all_data():
    gru = nn.GRU(4, 16)
    with torch.no_grad():
        gru.get_parameter("weight_ih_l0").zero_()
    data = [torch.randn(1, 8, 4)] * 3  # single steps: every unit has one event per sequence
    assert sparsify(egru.convert(gru), data, lr=1e-9).after.events <= 0.2


@pytest.mark.timeout(60)
def test_a_target_that_bounded_thresholds_cannot_meet_is_an_error():
    options: Any = {"events": "delta", "reset": "none", "reset_gate": "after", "threshold": egru.Threshold("sigmoid")}
    layer = egru.EGRU(4, 8, **options)
    with torch.no_grad():
        layer.get_parameter("weight_ih_l0").mul_(1e3)  # states change by up to 2 at every step
    with pytest.raises(ValueError, match=r"activity is still 0\.\d+ after thresholds were raised .* budget is 0.01;"):
        sparsify(layer, [torch.randn(20, 16, 4)], 0.01, lr=1e-9)


class Branches(nn.Module):
    """Two layers. The batch chooses the one that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.GRU(4, 8), nn.GRU(4, 8)

    def forward(self, batch: tuple[str, torch.Tensor]) -> Any:
        return self.get_submodule(batch[0])(batch[1])


def test_batches_may_use_different_layers():
    model: Any = egru.convert(Branches())
    data = [("a", torch.randn(20, 16, 4)), ("b", torch.randn(20, 16, 4))]
    result = sparsify(model, data)
    assert result.after.events <= 0.2
    assert all(layer.thresholds()["l0"].min() > 0 for layer in (model.a, model.b))


def test_a_layer_that_never_runs_keeps_its_thresholds():
    model: Any = egru.convert(Branches())
    assert sparsify(model, [("a", torch.randn(20, 16, 4))]).after.events <= 0.2
    assert not model.b.thresholds()["l0"].any()


def test_a_schedule_adds_batches_until_all_units_have_moved():
    layer = egru.convert(nn.GRU(4, 16, bias=False))
    batches = [torch.zeros(20, 16, 4), *torch.randn(60, 20, 16, 4)]
    with ThresholdSchedule(layer, 0.2, steps=len(batches), ramp=0.5) as schedule:
        for x in batches:
            layer(x)
            schedule.step()
    assert schedule.measured == pytest.approx(0.2, rel=0.2)
