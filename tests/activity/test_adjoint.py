"""The probe against autograd and against cases that can be worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import egru
from egru.activity import stability as probe
from egru.activity.adjoint import Stability, adjoint_growth, jacobian_diagonal
from egru.events import EventState, emit
from egru.functional import event_step, gru_update
from egru.types import RESETS

H = 7


def seen(layer, x):
    records = []
    undo = layer.observe(records.append)
    with torch.no_grad():
        layer(x)
    undo()
    return records


def made(reset, **options) -> Any:
    torch.manual_seed(3)
    surrogate = egru.Surrogate(width=0.8, height=1.5, bounded=options.pop("bounded", False))
    return egru.EGRU(2, H, reset=reset, surrogate=surrogate, threshold=egru.Threshold(mean=-2.0), **options)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("zoneout", [0.0, 0.2])
@pytest.mark.parametrize("reset", RESETS)
def test_the_diagonal_is_autograds(reset, zoneout, bounded):
    layer = made(reset, zoneout=zoneout, bounded=bounded, reset_scale=0.7).eval()
    x = torch.randn(6, 3, 2)
    (record,) = seen(layer, x)
    found = jacobian_diagonal(layer, record)
    theta, rho = record.theta.detach(), layer.reset_scale
    p = nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
    for t in range(1, 6):

        def step(c, t=t):
            y, e = emit(c, c, theta, layer.surrogate)
            carried = c - rho * theta * e if reset == "threshold" else c
            given = record.y[t - 1]  # V sees the events as data: the unit's own path only
            update = lambda p, _, memory: gru_update(p, given, memory, layer.weight_hh_l0, layer.bias_hh_l0)  # noqa: E731
            out = event_step(
                update, p[t], EventState(carried, y), e, theta,
                reset=reset, surrogate=layer.surrogate, reset_scale=rho,
            )  # fmt: skip
            return zoneout * carried + (1 - zoneout) * out.c_seen

        full: Any = torch.autograd.functional.jacobian(step, record.c[t - 1])
        index = torch.arange(3)[:, None], torch.arange(H)[None, :]
        assert torch.allclose(found[t - 1], full[*index, *index].detach(), atol=1e-12)


def test_a_leak_fades_at_its_own_rate():
    layer: Any = egru.EGRU(1, H, reset="none")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.bias_ih_l0[H : 2 * H] = math.log(9)  # nine tenths are kept
    (found,) = probe(layer, lambda: layer(torch.randn(150, 4, 1)))
    assert found.adjoint_growth == pytest.approx(math.log(0.9), rel=1e-6)
    assert found.diagonal_above_one == 0
    assert found.steps == 150
    assert not found.explodes


@pytest.mark.parametrize("reset", RESETS)
def test_pieces_are_the_whole(reset, monkeypatch):
    layer = made(reset, recurrent_clip=0.1)
    (record,) = seen(layer, torch.randn(23, 3, 2))
    monkeypatch.setattr("egru.activity.adjoint.PIECE", 100)
    whole, _ = adjoint_growth(layer, record)
    monkeypatch.setattr("egru.activity.adjoint.PIECE", 5)
    assert adjoint_growth(layer, record)[0] == pytest.approx(whole, rel=1e-9)


def test_the_papers_clearing_explodes_and_none_does_not():
    """Units that fire all the time inside a high window: each clearing turns the gradient round and amplifies it."""
    found = {}
    for reset in ("output", "none"):
        layer: Any = egru.EGRU(
            1, H, reset=reset, threshold=egru.Threshold.constant(0.2), surrogate=egru.Surrogate(height=3.0)
        )
        with torch.no_grad():
            layer.weight_hh_l0.zero_()
            layer.bias_ih_l0[2 * H :] = 2.0
            layer.bias_ih_l0[H : 2 * H] = -1.0
        (found[reset],) = probe(layer, lambda layer=layer: layer(torch.zeros(100, 2, 1)))
    assert found["output"].diagonal_above_one > 0.3
    assert found["output"].explodes
    assert found["none"].diagonal_above_one == 0
    assert found["none"].adjoint_growth < 0


def test_layers_directions_and_what_is_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(egru.EGRU(2, H, num_layers=2, bidirectional=True, dropout=0.5))
    model.train()
    before = torch.get_rng_state()
    found = probe(model, lambda: model(torch.ones(9, 2, 2)))
    assert [layer.name for layer in found] == ["0.l0", "0.l0_reverse", "0.l1", "0.l1_reverse"]
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model[0]._observers
    assert all(parameter.grad is None for parameter in model.parameters())
    bare = egru.EGRU(2, H, bias=False)
    assert len(probe(bare, lambda: bare(torch.ones(9, 2, 2)))) == 1
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(9, 2, 2), torch.tensor([9, 4]))
    assert probe(model, lambda: model(packed)) == []
    dense = nn.GRU(2, H)
    assert probe(dense, lambda: dense(torch.ones(9, 2, 2))) == []


def test_every_module_keeps_its_mode():
    frozen = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    model = nn.ModuleList([frozen, egru.EGRU(2, H)])
    frozen.eval()
    probe(model, lambda: model[1](torch.ones(9, 2, 2)))
    assert not any(module.training for module in frozen.modules())
    assert model.training
    assert model[1].training


def test_what_counts_as_an_explosion():
    assert Stability("a", 784, 0.0, -0.05, 9.3).explodes
    assert not Stability("a", 784, 0.0, 0.01, 9.2).explodes
    assert Stability("a", 10, 0.0, math.inf, math.inf).explodes


def test_a_peak_in_the_middle_is_seen():
    """The gradient grows where the input keeps units firing and fades where it keeps them silent."""
    layer: Any = egru.EGRU(1, H, threshold=egru.Threshold.constant(0.2), surrogate=egru.Surrogate(height=3.0))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.threshold_l0.fill_(0.2)
        layer.weight_ih_l0[2 * H :] = 2.0
        layer.bias_ih_l0[H : 2 * H] = -0.75
    x = torch.zeros(192, 2, 1)
    x[64:128] = 1.0
    (found,) = probe(layer, lambda: layer(x))
    (loud,) = probe(layer, lambda: layer(x[64:128]))
    assert loud.explodes
    assert found.explodes
    assert found.adjoint_growth < 0
    assert found.adjoint_peak == pytest.approx(loud.adjoint_peak, rel=0.2)
