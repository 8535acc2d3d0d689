"""Gradient growth, compared with autograd and with cases that have a closed form."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import egru
from egru.activity import measure_stability
from egru.activity.stability import Stability, adjoint_growth, jacobian_diagonal
from egru.events import EventState, emit
from egru.functional import event_step, gru_update
from egru.layers import record
from egru.types import RESETS

H = 7


def record_one(layer, x):
    with torch.no_grad(), record(layer) as records:
        layer(x)
    (call,) = records
    return call


def make_layer(reset, **options) -> Any:
    torch.manual_seed(3)
    surrogate = egru.Surrogate(width=0.8, height=1.5, bounded=options.pop("bounded", False))
    return egru.EGRU(2, H, reset=reset, surrogate=surrogate, threshold=egru.Threshold(mean=-2.0), **options)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("zoneout", [0.0, 0.2])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("events", ["positive", "signed"])
def test_diagonal_equals_autograd(events, reset, zoneout, bounded):
    layer = make_layer(reset, zoneout=zoneout, bounded=bounded, reset_scale=0.7, events=events).eval()
    signed = events == "signed"
    x = torch.randn(6, 3, 2)
    call = record_one(layer, x)
    diagonal = jacobian_diagonal(layer, call)
    theta, rho = call.theta.detach(), layer.reset_scale
    p = nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
    for t in range(1, 6):

        def step(c, t=t):
            y, e = emit(c, c, theta, layer.surrogate, signed=signed)
            carried = c - rho * theta * e * (c.sign() if signed else 1) if reset == "threshold" else c
            output = call.y[t - 1]  # constant: only the element-wise path is differentiated
            update = lambda p, _, memory: gru_update(p, output, memory, layer.weight_hh_l0, layer.bias_hh_l0)  # noqa: E731
            out = event_step(
                update, p[t], EventState(carried, y), e, theta,
                events=events, reset=reset, surrogate=layer.surrogate, reset_scale=rho,
            )  # fmt: skip
            return zoneout * carried + (1 - zoneout) * out.c_seen

        full: Any = torch.autograd.functional.jacobian(step, call.c[t - 1])
        index = torch.arange(3)[:, None], torch.arange(H)[None, :]
        assert torch.allclose(diagonal[t - 1], full[*index, *index].detach(), atol=1e-12)


def test_leaky_units_decay_at_their_leak_rate():
    layer: Any = egru.EGRU(1, H, reset="none")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.bias_ih_l0[H : 2 * H] = math.log(9)  # a unit keeps 0.9 of its state per step
    (result,) = measure_stability(layer, lambda: layer(torch.randn(150, 4, 1)))
    assert result.adjoint_growth == pytest.approx(math.log(0.9), rel=1e-6)
    assert result.diagonal_above_one == 0
    assert result.steps == 150
    assert not result.explodes


@pytest.mark.parametrize("reset", RESETS)
def test_growth_does_not_depend_on_the_chunk_size(reset, monkeypatch):
    layer = make_layer(reset, recurrent_clip=0.1)
    call = record_one(layer, torch.randn(23, 3, 2))
    monkeypatch.setattr("egru.activity.stability.CHUNK_STEPS", 100)
    whole, _ = adjoint_growth(layer, call)
    monkeypatch.setattr("egru.activity.stability.CHUNK_STEPS", 5)
    assert adjoint_growth(layer, call)[0] == pytest.approx(whole, rel=1e-9)


def test_output_reset_explodes_and_no_reset_does_not():
    """Units emit events at every step inside a high surrogate window; each reset flips and amplifies the gradient."""
    results = {}
    for reset in ("output", "none"):
        layer: Any = egru.EGRU(
            1, H, reset=reset, threshold=egru.Threshold.constant(0.2), surrogate=egru.Surrogate(height=3.0)
        )
        with torch.no_grad():
            layer.weight_hh_l0.zero_()
            layer.bias_ih_l0[2 * H :] = 2.0
            layer.bias_ih_l0[H : 2 * H] = -1.0
        (results[reset],) = measure_stability(layer, lambda layer=layer: layer(torch.zeros(100, 2, 1)))
    assert results["output"].diagonal_above_one > 0.3
    assert results["output"].explodes
    assert results["none"].diagonal_above_one == 0
    assert results["none"].adjoint_growth < 0


def test_all_directions_are_measured_without_side_effects():
    torch.manual_seed(0)
    model = nn.Sequential(egru.EGRU(2, H, num_layers=2, bidirectional=True, dropout=0.5))
    model.train()
    before = torch.get_rng_state()
    results = measure_stability(model, lambda: model(torch.ones(9, 2, 2)))
    assert [result.name for result in results] == ["0.l0", "0.l0_reverse", "0.l1", "0.l1_reverse"]
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model[0]._observers
    assert all(parameter.grad is None for parameter in model.parameters())
    unbiased = egru.EGRU(2, H, bias=False)
    assert len(measure_stability(unbiased, lambda: unbiased(torch.ones(9, 2, 2)))) == 1
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(9, 2, 2), torch.tensor([9, 4]))
    assert measure_stability(model, lambda: model(packed)) == []
    dense = nn.GRU(2, H)
    assert measure_stability(dense, lambda: dense(torch.ones(9, 2, 2))) == []


def test_modules_keep_their_training_mode():
    frozen = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    model = nn.ModuleList([frozen, egru.EGRU(2, H)])
    frozen.eval()
    measure_stability(model, lambda: model[1](torch.ones(9, 2, 2)))
    assert not any(module.training for module in frozen.modules())
    assert model.training
    assert model[1].training


def test_explodes_above_a_factor_of_10000():
    assert Stability("a", 784, 0.0, -0.05, 9.3).explodes
    assert not Stability("a", 784, 0.0, 0.01, 9.2).explodes
    assert Stability("a", 10, 0.0, math.inf, math.inf).explodes


def test_peak_within_a_sequence_is_detected():
    """The gradient grows while the input causes events and decays while it causes none."""
    layer: Any = egru.EGRU(1, H, threshold=egru.Threshold.constant(0.2), surrogate=egru.Surrogate(height=3.0))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.threshold_l0.fill_(0.2)
        layer.weight_ih_l0[2 * H :] = 2.0
        layer.bias_ih_l0[H : 2 * H] = -0.75
    x = torch.zeros(192, 2, 1)
    x[64:128] = 1.0
    (whole,) = measure_stability(layer, lambda: layer(x))
    (middle,) = measure_stability(layer, lambda: layer(x[64:128]))
    assert middle.explodes
    assert whole.explodes
    assert whole.adjoint_growth < 0
    assert whole.adjoint_peak == pytest.approx(middle.adjoint_peak, rel=0.2)
