"""Monitors, regularisers and records of layers with signed and delta events."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import egru
from egru.activity import rate_loss
from egru.data import Classification, Split
from egru.events import emit
from egru.layers import Record, record
from egru.runs.raster import draw_rasters
from egru.types import EVENTS
from tests.helpers import lively


def layer(events, *sizes, **options):
    options = {"reset": "none", "reset_gate": "after", "threshold": egru.Threshold.constant(0.2), **options}
    return lively(egru.EGRU(*sizes, events=events, surrogate=egru.Surrogate(width=0.15), **options))


def compared_values(call: Record, start=None):
    """Return what was compared with the threshold, from the definition; for one forward direction."""
    held = torch.zeros_like(call.y[:1]) if start is None else start[None]
    return call.c - torch.cat([held, call.y[:-1]]) if call.layer.events == "delta" else call.c


@pytest.mark.parametrize("events", ["signed", "delta"])
def test_counts_match_their_definitions(events):
    model = nn.ModuleList([layer(events, 3, 6, 2), nn.Linear(6, 4)])
    rnn, readout = model
    with egru.ActivityMonitor(model) as monitor, record(model) as records:
        readout(rnn(torch.randn(9, 4, 3))[0])
    summary = monitor.summary()
    fired_below = None
    for row, call in zip(summary.layers, records, strict=True):
        seen = compared_values(call)
        fired = seen.abs() > 0.2
        assert (fired & (seen < 0)).any()
        assert row.active == tuple(fired.sum((0, 1)).tolist())
        assert 0.1 < row.cost.activity < 0.9
        distance = (seen.abs() - 0.2).abs()
        assert row.inside_window == (distance < 0.15).sum()
        assert row.nonzero_gradients == (fired | ((distance < 0.15) & (seen != 0))).sum()
        expected = call.input != 0 if events == "signed" or fired_below is None else fired_below
        assert row.input_active == expected.sum()
        fired_below = fired
    assert fired_below is not None
    assert summary.linears[0].macs == 4 * fired_below.sum()
    if events == "delta":
        assert fired_below.sum() < (records[-1].y != 0).sum()


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_records_of_delta_layers_follow_each_direction(bidirectional, packed):
    rnn = layer("delta", 3, 5, bidirectional=bidirectional)
    x, lengths = torch.randn(8, 3, 3), torch.tensor([8, 5, 2]) if packed else torch.tensor([8, 8, 8])
    state: Any = egru.EventState(*torch.rand(2, rnn.num_directions, 3, 5))
    with egru.ActivityMonitor(rnn) as monitor, record(rnn) as records:
        rnn(pack_padded_sequence(x, lengths) if packed else x, state)
    for row, call in zip(monitor.summary().layers, records, strict=True):
        events = torch.zeros_like(call.y, dtype=torch.bool)
        for b, length in enumerate(lengths.tolist()):
            order = list(range(length))
            held = state.y[call.direction.index, b]
            for t in reversed(order) if call.direction.reverse else order:
                events[t, b] = call.y[t, b] != held
                torch.testing.assert_close(call.sent()[t, b], call.y[t, b] - held)
                held = call.y[t, b]
        assert torch.equal(call.events(), events)
        assert row.active == tuple(events.sum((0, 1)).tolist())
        assert not call.sent()[~events].any()


def test_separate_delta_layers_receive_changes():
    model = nn.Sequential(layer("delta", 3, 6), layer("positive", 6, 5, threshold=egru.Threshold.constant(0.1)))
    first, second = model
    with egru.ActivityMonitor(model) as monitor:
        second(first(torch.randn(7, 2, 3))[0])
    below, above = monitor.summary().layers
    assert above.input_active == sum(below.active)
    with egru.ActivityMonitor(model) as monitor:
        y, _ = first(torch.randn(7, 2, 3))
        second(y * 2)  # new values: their changes are not known
    assert monitor.summary().layers[1].input_active == (y != 0).sum()


@pytest.mark.parametrize("events", EVENTS)
def test_rate_loss_gradient_equals_that_of_the_events(events):
    c, y_prev, theta = (torch.randn(6, 3, 4, requires_grad=True) for _ in range(3))
    theta = theta.detach()[0, 0].abs().requires_grad_()
    surrogate = egru.Surrogate(width=0.5, height=0.7)
    seen = c - y_prev if events == "delta" else c
    _, e = emit(seen, seen, theta, surrogate, signed=events != "positive")
    loss = rate_loss(seen if events == "positive" else seen.abs(), theta, surrogate, target=0)
    torch.testing.assert_close(loss, e.mean())
    wanted = (c, y_prev, theta) if events == "delta" else (c, theta)
    torch.testing.assert_close(torch.autograd.grad(loss, wanted), torch.autograd.grad(e.mean(), wanted))


@pytest.mark.parametrize("events", ["signed", "delta"])
def test_training_on_the_activity_loss_lowers_the_activity(events):
    rnn = layer(events, 3, 16, threshold=egru.Threshold("abs", mean=0.1, std=0.05))
    x, optimiser = torch.randn(30, 8, 3), torch.optim.Adam(rnn.parameters(), 0.01)
    rates = []
    for _ in range(30):
        with egru.ActivityLoss(rnn, rate=1.0, state=0.1) as loss, record(rnn) as records:
            rnn(x)
        rates.append(records[0].events().double().mean().item())
        assert isinstance(loss.value, torch.Tensor)
        optimiser.zero_grad()
        loss.value.backward()
        optimiser.step()
    assert rates[0] > 0.3
    assert rates[-1] < 0.5 * rates[0]


def test_stability_of_all_events_is_measured():
    for events in EVENTS:
        rnn = layer(events, 3, 8)
        (measured,) = egru.activity.measure_stability(rnn, lambda rnn=rnn: rnn(torch.randn(20, 2, 3)))
        assert measured.steps == 20
        assert 0 <= measured.diagonal_above_one <= 1


def test_raster_shows_events_of_delta_layers():
    options: dict[str, Any] = {"events": "delta", "reset": "none", "reset_gate": "after"}
    model = egru.models.SequenceClassifier(2, 6, 3, **options, threshold=egru.Threshold.constant(0.1)).float()
    split = Split(torch.randn(2, 8, 2), torch.tensor([0, 1]))
    config: Any = None  # read only for images
    raster = draw_rasters(model, config, Classification("test", 3, split, split, split))[0]
    with egru.ActivityMonitor(model) as monitor:
        model(split.x[:1].float())
    assert 0 < raster.activity_sparsity < 1
    assert raster.activity_sparsity == pytest.approx(monitor.summary().activity_sparsity)


def changed(held):
    """Return the fraction of entries of held values that change, per step."""
    return (torch.cat([torch.zeros_like(held[:1]), held[:-1]]) != held).double().mean().item()


def test_events_of_both_directions_are_counted_above_a_bidirectional_layer():
    model = nn.ModuleList([layer("delta", 3, 6, bidirectional=True), layer("delta", 12, 5), nn.Linear(5, 4)])
    first, second, readout = model
    with egru.ActivityMonitor(model) as monitor:
        y, _ = first(torch.randn(30, 4, 3))
        z, _ = second(y)
        readout(z)
    summary = monitor.summary()
    below = (changed(y[..., :6]) + changed(y[..., 6:].flip(0))) / 2
    assert 0 < below < 0.9
    assert summary.layers[2].cost.input_density == pytest.approx(below)
    assert summary.linears[0].input_density == pytest.approx(changed(z))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_delta_events_are_counted_like_padded_ones(bidirectional):
    first = layer("delta", 3, 6, bidirectional=bidirectional)
    model = nn.ModuleList([first, layer("delta", 12 if bidirectional else 6, 5)])
    x, counts = torch.randn(30, 4, 3), []
    for given in (x, pack_padded_sequence(x, torch.tensor([30] * 4))):
        with egru.ActivityMonitor(model) as monitor:
            output = given
            for module in model:
                output, _ = module(output)
        counts.append(monitor.summary().forward_macs)
    assert counts[0] == counts[1]
    short = pack_padded_sequence(x, torch.tensor([30, 12, 7, 1]))
    with egru.ActivityMonitor(model) as monitor:
        model[1](model[0](short)[0])
    assert 0 < monitor.summary().layers[-1].cost.input_density < 0.9
