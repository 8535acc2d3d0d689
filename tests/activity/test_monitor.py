from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import egru
from egru.activity import ActivitySummary, EnergyModel, LayerCost
from tests.helpers import lively


class Model(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.inner = nn.ModuleDict({"rnn": rnn})
        self.readout = nn.Linear(rnn.hidden_size, 4)

    def forward(self, x):
        y, _ = self.inner["rnn"](x)
        return self.readout(y)


def test_counts_match_their_definitions():
    surrogate = egru.Surrogate(width=0.3)
    layer = lively(egru.EGRU(3, 6, 2, surrogate=surrogate, threshold=egru.Threshold(mean=-2.0)))
    model = Model(layer)
    records = []
    layer.observe(records.append)
    x = torch.randn(9, 4, 3).relu()
    with egru.ActivityMonitor(model) as activity:
        y = model.inner["rnn"](x)[0]
        model.readout(y)
    first, second = activity.summary().layers
    assert [first.name, second.name] == ["inner.rnn.l0", "inner.rnn.l1"]
    for row, record in zip((first, second), records, strict=True):
        e = (record.c > record.theta).double()
        assert row.steps == 36
        assert row.cost.activity == pytest.approx(e.mean().item())
        assert 0 < row.cost.activity < 1
        assert row.unit_activity == pytest.approx(e.mean((0, 1)).tolist())
        distance = (record.c - record.theta).abs()
        assert row.backward_sparsity == pytest.approx((distance >= 0.3).double().mean().item())
        k = e + record.c * (1 - distance / 0.3).clamp_min(0)
        assert row.backward_skippable == pytest.approx((k == 0).double().mean().item())
        assert row.cost.input_density == pytest.approx((record.input != 0).double().mean().item())
    assert first.cost.input_gradient_density == 0, "the input requires no gradient"
    assert second.cost.input_gradient_density == first.cost.gradient_density
    (readout,) = activity.summary().linears
    assert readout.macs == pytest.approx((y != 0).sum().item() * 4)


def test_layer_cost_matches_a_manual_count():
    cost = LayerCost(10, 20, input_density=0.5, activity=0.25, gradient_density=0.75, input_gradient_density=0.1)
    assert cost.forward == 60 * (5 + 5) + 60
    assert cost.backward == 60 * (0.75 * 20 + 0.25 * 20 + 0.5 * 10 + 0.1 * 10) + 60
    assert cost.dense.forward == 60 * 30 + 60
    assert cost.dense.backward == 60 * (40 + 20) + 60


def test_overall_sparsity_is_weighted_by_units():
    big, small = lively(egru.EGRU(3, 30)), egru.EGRU(30, 2, threshold=egru.Threshold.constant(2.0))
    model = nn.ModuleList([big, small])
    with egru.ActivityMonitor(model) as activity:
        small(big(torch.randn(5, 2, 3))[0])
    summary = activity.summary()
    assert summary.layers[1].activity_sparsity == 1
    expected = (30 * summary.layers[0].activity_sparsity + 2) / 32
    assert summary.activity_sparsity == pytest.approx(expected)


def slow_second_layer() -> ActivitySummary:
    """Return the summary of a model whose second layer and readout run only at every tenth step."""
    model = nn.ModuleList([lively(egru.EGRU(4, 16)), lively(egru.EGRU(16, 64)), nn.Linear(64, 5)])
    fast, slow, readout = model
    with egru.ActivityMonitor(model) as activity:
        readout(slow(fast(torch.randn(100, 2, 4))[0][::10])[0])
    return activity.summary()


def test_macs_are_weighted_by_the_steps_of_each_layer():
    summary = slow_second_layer()
    fast, slow = (layer.cost for layer in summary.layers)
    (readout,) = summary.linears
    assert summary.steps == 200
    assert summary.dense_forward_macs == pytest.approx(48 * 21 + (192 * 81 + 64 * 5) / 10)
    assert summary.forward_macs == pytest.approx(fast.forward + (slow.forward + readout.macs / 20) / 10)
    assert summary.backward_macs == pytest.approx(fast.backward + (slow.backward + 2 * readout.macs / 20) / 10)
    dense = fast.dense.backward + (slow.dense.backward + 2 * 64 * 5) / 10
    assert summary.dense_backward_macs == pytest.approx(dense)
    assert summary.estimated_joules == pytest.approx(summary.forward_macs * 54.6e-12)


def test_padding_is_not_counted():
    # With a negative threshold, padded states, which are zero, would count as events.
    layer = lively(egru.EGRU(3, 6, bidirectional=True, threshold=egru.Threshold.constant(-0.2)))
    x, lengths = torch.randn(9, 3, 3), torch.tensor([9, 2, 5])
    with egru.ActivityMonitor(layer) as packed:
        layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    with egru.ActivityMonitor(layer) as single:
        for i, n in enumerate(lengths):
            layer(x[:n, i : i + 1])
    assert packed.summary().steps == 16
    assert packed.summary().to_dict() == single.summary().to_dict()


@pytest.mark.parametrize(
    "module",
    [nn.GRU(3, 8, 2), nn.LSTM(3, 8, bidirectional=True), egru.models.CoRNN(3, 8), egru.models.IndRNN(3, 8, 2)],
    ids=lambda m: type(m).__name__,
)
def test_dense_baselines_count_near_zero_outputs(module):
    module = module.double()
    x = torch.randn(7, 2, 3)
    wide, narrow = [], []
    for tolerance, into in ((1e-8, narrow), (1e9, wide)):
        with egru.ActivityMonitor(module, tolerance=tolerance) as activity:
            module(x)
        into.append(activity.summary())
    near_zero = (module(x)[0].abs() <= 1e-8).double().mean().item()
    assert narrow[0].activity_sparsity == pytest.approx(near_zero)
    assert wide[0].activity_sparsity == 1
    assert narrow[0].backward_sparsity is None
    assert narrow[0].forward_macs <= narrow[0].dense_forward_macs


def test_dense_gru_has_no_sparsity():
    gru = nn.GRU(3, 8)
    with egru.ActivityMonitor(gru) as activity:
        gru(torch.randn(7, 2, 3))
    summary = activity.summary()
    assert summary.forward_macs == summary.dense_forward_macs == 24 * 11 + 24
    assert "-" in str(summary)


def test_dense_layers_and_directions_have_separate_inputs():
    """Both directions of the first layer read data that is half zero; the second layer reads a dense output."""
    gru = nn.GRU(4, 8, 2, bidirectional=True)
    x = torch.randn(7, 3, 4)
    x[..., :2] = 0
    with egru.ActivityMonitor(gru) as activity:
        gru(input=x)
    rows = activity.summary().layers
    assert [row.name for row in rows] == ["gru.l0", "gru.l0_reverse", "gru.l1", "gru.l1_reverse"]
    assert [row.cost.input_density for row in rows] == [0.5, 0.5, 1, 1]
    assert [row.cost.input_gradient_density for row in rows] == [0, 0, 1, 1]
    assert all(len(row.unit_activity) == 8 for row in rows)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_projected_lstm_is_counted(bidirectional):
    directions = 1 + bidirectional
    lstm = nn.LSTM(3, 8, 2, proj_size=4, bidirectional=bidirectional)
    with egru.ActivityMonitor(lstm) as activity:
        lstm(torch.randn(7, 2, 3))
    summary = activity.summary()
    assert [len(row.unit_activity) for row in summary.layers] == [4] * 2 * directions
    assert summary.dense_forward_macs == directions * (32 * (3 + 4 + 1) + 32 * (4 * directions + 4 + 1))
    assert [row.cost.gates for row in summary.layers] == [4] * 2 * directions


def test_packed_input_of_a_dense_layer():
    gru = nn.GRU(3, 8)
    with egru.ActivityMonitor(gru) as activity:
        gru(pack_padded_sequence(torch.randn(7, 2, 3), torch.tensor([7, 3])))
    assert activity.summary().steps == 10


def test_summary_prints_a_table():
    model = Model(lively(egru.EGRU(3, 6)))
    with egru.ActivityMonitor(model) as activity:
        model(torch.randn(5, 2, 3))
    summary = activity.summary()
    assert summary.estimated_joules == pytest.approx(summary.forward_macs * 54.6e-12)
    text = str(summary)
    assert f"{100 * summary.activity_sparsity:.1f} %" in text
    assert "inner.rnn (EGRU)" in text
    assert "\nreadout  " in text
    assert "assuming" in text
    assert EnergyModel().assumption in text


def test_only_the_context_counts_and_reset_clears():
    layer = lively(egru.EGRU(3, 6))
    activity = egru.ActivityMonitor(layer)
    x = torch.randn(5, 2, 3)
    layer(x)
    with pytest.raises(RuntimeError, match="nothing was counted; run the model inside the context"):
        activity.summary()
    with activity:
        layer(x)
        activity.reset()
        layer(x)
        with pytest.raises(RuntimeError, match="already active"):
            activity.__enter__()
    layer(x)
    assert activity.summary().steps == 10
    with activity:
        layer(x)
    assert activity.summary().steps == 20
    assert not layer._observers


def test_hooks_are_removed_after_an_error():
    model = Model(egru.EGRU(3, 6))
    with pytest.raises(ValueError, match="features"), egru.ActivityMonitor(model):
        model(torch.zeros(1, 1, 1))
    assert not model.inner["rnn"]._observers  # pyright: ignore[reportAttributeAccessIssue]
    assert not model.readout._forward_hooks


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="the model must have a recurrent layer, got Linear"):
        egru.ActivityMonitor(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        egru.ActivityMonitor(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="tolerance must not be negative, got -1"):
        egru.ActivityMonitor(nn.GRU(1, 1), tolerance=-1)


@pytest.mark.parametrize("events", ["positive", "signed"])
@pytest.mark.parametrize("compare", ["cell", "output"])
def test_event_lstm_is_counted(compare, events):
    layer = egru.ELSTM(3, 6, compare=compare, events=events, threshold=egru.Threshold("abs", mean=0.05, std=0.0))
    x = torch.randn(9, 4, 3).relu()
    with egru.ActivityMonitor(layer) as activity:
        y, _ = layer(x)
    (row,) = activity.summary().layers
    assert list(row.active) == (y != 0).sum((0, 1)).tolist()
    assert 0 < row.cost.activity < 1
    density = (x != 0).double().mean().item()
    assert row.cost.forward == pytest.approx(24 * (3 * density + 6 * row.cost.activity) + 24)


@pytest.mark.parametrize("packed", [False, True])
def test_counts_do_not_depend_on_the_chunk_size(packed, monkeypatch):
    model = nn.ModuleList([lively(egru.EGRU(3, 6, 2)), egru.ELSTM(6, 4)])
    x: Any = torch.randn(9, 4, 3).relu()
    x = pack_padded_sequence(x, torch.tensor([9, 7, 7, 2])) if packed else x

    def counted() -> dict[str, Any]:
        with egru.ActivityMonitor(model) as activity:
            model[1](model[0](x)[0])
        return activity.summary().to_dict()

    whole = counted()
    monkeypatch.setattr("egru.activity.chunks._CPU_STATES", 50)
    assert counted() == whole


@pytest.mark.parametrize("bounded", [False, True])
def test_gradient_counts_equal_the_slopes_of_the_output(bounded, monkeypatch):
    surrogate = egru.Surrogate(width=0.1, bounded=bounded)
    layer = lively(egru.EGRU(3, 40, surrogate=surrogate, threshold=egru.Threshold.constant(0.05)))
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            layer.get_parameter(name).view(3, 40, -1)[:, :3] = 0  # three units whose state is exactly zero
    slopes = []
    original = egru.Surrogate.slope
    monkeypatch.setattr(egru.Surrogate, "slope", lambda *args: slopes.append(args) or original(*args))
    records = []
    with torch.no_grad(), egru.ActivityMonitor(layer) as activity:
        layer.observe(records.append)
        layer(torch.randn(9, 4, 3))
    assert not slopes, "the slope need not be computed"
    (record,) = records
    events = (record.c > record.theta).to(record.c.dtype)
    expected = surrogate.output_slope(record.c, events, original(surrogate, record.c, record.theta)) != 0
    assert activity.summary().layers[0].nonzero_gradients == expected.sum()
    assert 0 < expected.sum() < expected.numel()
