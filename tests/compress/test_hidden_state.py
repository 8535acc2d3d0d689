"""The state of a converted GRU: a tensor with two parts."""

import copy
import io
import operator
from typing import Any

import pytest
import torch
from torch import nn

import egru
from egru.compress.drop_in import HiddenState
from tests.helpers import worst

pytestmark = pytest.mark.filterwarnings("ignore:.*Converted.* runs in plain torch")

TOLERANCE = 1e-12


def test_hidden_state_is_a_tensor_with_two_parts():
    h = HiddenState(torch.zeros(2, 3), torch.ones(2, 3))
    for selected in (h[0], h.detach(), h.to(torch.float32), h.data, h.unsqueeze(0), *h.unbind(), torch.stack([h, h])):
        assert isinstance(selected, HiddenState)
        assert selected.c.shape == selected.shape
        assert (selected.c == 1).all()
        assert (selected == 0).all()
    assert type(h + 1) is torch.Tensor
    assert type(h.sum()) is torch.Tensor
    h[1] = 5.0
    assert h[1].tolist() == h.c[1].tolist() == [5.0] * 3
    h.zero_()
    assert not h.c.any()
    for other in (copy.deepcopy(h), copy.copy(h)):
        assert isinstance(other, HiddenState)
        assert torch.equal(other.c, h.c)


FIRST = torch.tensor([0])
OVERWRITE = {
    "fill_": lambda h: h.fill_(7.0),
    "copy_": lambda h: h.copy_(torch.full((2, 3), 7.0)),
    "data": lambda h: setattr(h, "data", torch.full((2, 3), 7.0)),
    "index_fill_": lambda h: h.index_fill_(0, FIRST, 7.0),
    "index_copy_": lambda h: h.index_copy_(0, FIRST, torch.full((1, 3), 7.0)),
    "index_put_": lambda h: h.index_put_((FIRST,), torch.tensor(7.0)),
    "scatter_": lambda h: h.scatter_(0, torch.zeros(1, 3, dtype=torch.long), 7.0),
    "masked_fill_": lambda h: h.masked_fill_(torch.tensor([[True], [False]]), 7.0),
    "setitem": lambda h: h.__setitem__(0, 7.0),
}
RESTART = {
    "add_": lambda h: h.add_(2.0),
    "clamp_": lambda h: h.clamp_(max=0.5),
    "+=": lambda h: operator.iadd(h, 2.0),
    "out": lambda h: torch.add(h, 2.0, out=h),
}


@pytest.mark.parametrize("name", OVERWRITE)
def test_overwritten_entries_of_a_state_are_overwritten_in_both_parts(name):
    h = HiddenState(torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + 10)
    before = h.c.clone()
    OVERWRITE[name](h)
    assert (h[0] == 7).all()
    assert (h.c[0] == 7).all()
    assert torch.equal(h.c[1], before[1]) or (h.c[1] == 7).all()
    assert bool((h.c[1] == 7).all()) == bool((h[1] == 7).all())


@pytest.mark.parametrize("name", RESTART)
def test_internal_state_restarts_from_outputs_that_are_changed_in_place(name):
    h = HiddenState(torch.ones(2, 3), torch.full((2, 3), 5.0))
    RESTART[name](h)
    assert isinstance(h, HiddenState)
    assert not (h == 1).any()
    assert torch.equal(h.c, h.as_subclass(torch.Tensor))
    h.zero_()
    assert not h.c.any()


def test_plain_tensors_receive_the_outputs_of_a_state():
    h = HiddenState(torch.ones(2, 3), torch.full((2, 3), 5.0))
    plain = torch.ones(2, 3)
    plain[0] = h[0]
    plain.mul_(h)
    assert (plain == 1).all()
    plain.copy_(h)
    torch.where(torch.tensor(True), h, h, out=plain)
    assert (plain == 1).all()


def test_sums_of_two_states_act_on_both_parts():
    old, new = (HiddenState(torch.full((2, 3), y), torch.full((2, 3), c)) for y, c in ((1.0, 2.0), (3.0, 4.0)))
    keep = torch.tensor([[1.0], [0.0]])
    mixed: Any
    for mixed in (keep * new + (1 - keep) * old, torch.lerp(old, new, keep), old - (old - new) * keep):
        assert mixed[:, 0].tolist() == [3.0, 1.0]
        assert mixed.c[:, 0].tolist() == [4.0, 2.0]
    assert type(old + torch.ones(3)) is torch.Tensor


ROWS = torch.tensor([1, 0])[:, None].expand(2, 3)
ARRANGED = {
    "concatenate": lambda h: torch.concatenate([h, h], 1),
    "vstack": lambda h: torch.vstack([h, h]),
    "hstack": lambda h: torch.hstack([h, h]),
    "dstack": lambda h: torch.dstack([h, h]),
    "column_stack": lambda h: torch.column_stack([h, h]),
    "tile": lambda h: h.tile(2, 1),
    "movedim": lambda h: h.movedim(0, 1),
    "moveaxis": lambda h: torch.moveaxis(h, 0, 1),
    "swapdims": lambda h: h.swapdims(0, 1),
    "t": lambda h: h.t(),
    "broadcast_to": lambda h: h.broadcast_to(4, 2, 3),
    "expand_as": lambda h: h.expand_as(torch.zeros(4, 2, 3)),
    "reshape_as": lambda h: h.reshape_as(torch.zeros(3, 2)),
    "take_along_dim": lambda h: torch.take_along_dim(h, ROWS, 0),
    "tensor_split": lambda h: h.tensor_split(2)[1],
    "vsplit": lambda h: h.vsplit(2)[0],
    "ravel": lambda h: h.ravel(),
    "flipud": lambda h: h.flipud(),
    "scatter": lambda h: h.scatter(0, ROWS[:1], 7.0),
    "index_put": lambda h: h.index_put((FIRST,), torch.tensor(7.0)),
    "index_copy": lambda h: h.index_copy(0, FIRST, torch.full((1, 3), 7.0)),
    "index_fill": lambda h: h.index_fill(0, FIRST, 7.0),
    "masked_scatter": lambda h: h.masked_scatter(h > 2, torch.full((6,), 7.0)),
    "dropout": lambda h: nn.Dropout(0.5).eval()(h),
    "torch.dropout": lambda h: torch.dropout(h, 0.5, False),
    "no dropout": lambda h: nn.functional.dropout(h, 0.0),
}


@pytest.mark.parametrize("name", ARRANGED)
def test_functions_that_arrange_a_state_keep_both_parts(name):
    y = torch.arange(6.0).reshape(2, 3)
    arranged = ARRANGED[name](HiddenState(y, y + 10))
    assert isinstance(arranged, HiddenState)
    assert torch.equal(arranged, ARRANGED[name](y))
    assert torch.equal(arranged.c, torch.where(arranged == 7, 7, arranged.as_subclass(torch.Tensor) + 10))


def test_dropout_drops_the_internal_state():
    assert type(nn.functional.dropout(HiddenState(torch.ones(2, 3), torch.ones(2, 3)))) is torch.Tensor


def test_internal_state_is_assigned():
    h = HiddenState(torch.ones(2, 3).requires_grad_(), torch.zeros(2, 3))
    h.c = torch.full((2, 3), 5.0)
    assert (h.c == 5).all()


def test_state_in_a_buffer_continues_the_sequence():
    layer, x = egru.convert(nn.GRU(4, 8)), torch.randn(30, 2, 4)
    egru.compress.raise_thresholds(layer, 0.1)
    buffer, outputs = None, []
    for part in x.split(5):
        output, h = layer(part, buffer)
        buffer = h.detach().clone() if buffer is None else buffer.copy_(h.detach())
        outputs.append(output)
    expected, h = layer(x)
    assert worst([torch.cat(outputs)], [expected]) <= TOLERANCE
    assert torch.equal(layer(x, h.detach().fill_(0.0))[0], layer(x)[0])


def test_states_are_loaded_with_weights_only():
    file = io.BytesIO()
    _, h = egru.convert(nn.GRU(4, 8))(torch.randn(5, 2, 4))
    torch.save(h.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, h)
    assert torch.equal(loaded.c, h.c)
