import pytest
import torch

import egru
from egru.layers.dropout import sequence_dropout, zoneout_keep
from tests.helpers import lively


def test_variational_masks_are_shared_over_time_but_not_over_sequences():
    x = torch.ones(50, 40, 30)
    dropped = sequence_dropout(x, 0.4, "variational", True)
    assert torch.equal(dropped, dropped[:1].expand_as(x))
    assert (dropped[0, 0] != dropped[0, 1]).any()
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.6}
    assert abs((dropped[0] == 0).double().mean() - 0.4) < 0.05


def test_plain_masks_differ_at_every_step():
    dropped = sequence_dropout(torch.ones(50, 4, 30), 0.4, "plain", True)
    assert (dropped[0] != dropped[1]).any()


@pytest.mark.parametrize("mode", ["variational", "plain"])
def test_dropout_acts_between_layers_and_only_in_training(mode):
    layer = lively(egru.EGRU(3, 20, 2, dropout=0.5, dropout_mode=mode))
    x = torch.randn(6, 2, 3)
    inputs = []
    layer.observe(lambda record: inputs.append(record.input))
    assert (layer(x)[0] != layer(x)[0]).any()
    assert torch.equal(inputs[0], x), "the input of the first layer must not be dropped"
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_dropconnect_draws_one_mask_per_call():
    layer = lively(egru.EGRU(3, 20, dropconnect=0.5))
    x = torch.randn(1, 2, 3).expand(8, 2, 3)
    zeros = []
    for _ in range(10):
        layer.zero_grad()
        layer(x)[0].sum().backward()
        grad = layer.get_parameter("weight_hh_l0").grad
        assert grad is not None
        zeros.append((grad == 0).double().mean())
    # Rows of inactive units are zero as well, so about half of the entries or more are zero.
    assert min(zeros) > 0.4
    first, second = layer(x)[0], layer(x)[0]
    assert (first != second).any()
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_zoneout_keeps_the_expected_share_of_states():
    layer = lively(egru.EGRU(3, 30, zoneout=0.4, reset="none"))
    x = torch.randn(20, 10, 3)
    states = []
    layer.observe(lambda record: states.append(record.c))
    layer(x)
    kept = (states[0][1:] == states[0][:-1]).double().mean()
    assert abs(kept - 0.4) < 0.03


def test_zoneout_uses_the_expected_value_in_evaluation():
    layer = lively(egru.EGRU(3, 5, zoneout=0.3)).eval()
    plain = egru.EGRU(3, 5).eval()
    plain.load_state_dict(layer.state_dict())
    x, state = torch.randn(1, 2, 3), egru.EventState(torch.rand(1, 2, 5), torch.rand(1, 2, 5))
    mixed, new = layer(x, state)[1].c, plain(x, state)[1].c
    torch.testing.assert_close(mixed, 0.3 * state.c + 0.7 * new)


def test_zero_zoneout_needs_no_mask():
    assert zoneout_keep(torch.zeros(2, 3), 5, 0.0, True) is None
