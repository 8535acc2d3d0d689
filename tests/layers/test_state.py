"""One call, several chunks and single steps are the same computation."""

import functools
import itertools

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import egru
from egru.types import RESET_GATES, RESETS, Reset, ResetGate
from tests.helpers import lively, worst


def make_egru(reset: Reset, reset_gate: ResetGate) -> egru.EGRU:
    return lively(egru.EGRU(3, 6, 2, reset=reset, reset_gate=reset_gate))


LAYERS = [
    *[
        pytest.param(functools.partial(make_egru, reset, reset_gate), id=f"EGRU {reset} {reset_gate}")
        for reset, reset_gate in itertools.product(RESETS, RESET_GATES)
    ],
    pytest.param(lambda: egru.ELSTM(3, 6, 2, threshold=egru.Threshold(mean=-2.0)), id="ELSTM"),
    pytest.param(lambda: egru.ERNN(3, 6, 2, threshold=egru.Threshold(mean=-2.0)), id="ERNN"),
]


@pytest.mark.parametrize("make", LAYERS)
def test_chunks_have_the_same_events_and_gradients(make):
    layer = make()
    x = torch.randn(12, 4, 3)
    whole, end = layer(x)
    assert 0 < (whole != 0).double().mean() < 1
    outputs, state = [], None
    for chunk in x.split([1, 4, 5, 2]):
        y, state = layer(chunk, state)
        outputs.append(y)
    assert state is not None
    chunked = torch.cat(outputs)
    assert torch.equal(whole != 0, chunked != 0)
    assert worst([whole, *end], [chunked, *state]) <= 1e-13
    # Between calls "hard" treats the last events as data, so their surrogate gradient is missing by definition.
    if layer.reset != "hard":
        weight = torch.randn_like(whole)
        parameters = list(layer.parameters())
        expected = torch.autograd.grad((weight * whole).sum(), parameters)
        assert worst(expected, torch.autograd.grad((weight * chunked).sum(), parameters)) <= 1e-12


@pytest.mark.parametrize(("reset", "reset_gate"), [*itertools.product(RESETS, ("before", "after"))])
@pytest.mark.parametrize("per_unit", [True, False])
def test_cell_steps_equal_the_sequence(reset, reset_gate, per_unit):
    options = {"reset": reset, "reset_gate": reset_gate, "threshold": egru.Threshold(mean=-2.0, per_unit=per_unit)}
    layer = lively(egru.EGRU(3, 6, **options))
    cell = egru.EGRUCell(3, 6, **options)
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in layer.state_dict().items()})
    x = torch.randn(10, 4, 3)
    whole, end = layer(x)
    state = None
    for t, step in enumerate(x):
        state = cell(step, state)
        assert torch.equal(state.y != 0, whole[t] != 0)
        torch.testing.assert_close(state.y, whole[t], rtol=0, atol=1e-13)
    assert state is not None
    assert worst([s[0] for s in end], state) <= 1e-13
    single = cell(x[0, 0])
    torch.testing.assert_close(single.y, whole[0, 0])
    torch.testing.assert_close(cell(x[1, 0], single).y, whole[1, 0])


def test_unbatched_input_equals_a_batch_of_one():
    layer = lively(egru.EGRU(3, 6, 2, bidirectional=True))
    x = torch.randn(9, 3)
    y, state = layer(x)
    batched, batched_state = layer(x[:, None])
    assert torch.equal(y, batched[:, 0])
    assert torch.equal(state.c, batched_state.c[:, 0])
    continued, _ = layer(x, state)
    assert torch.equal(continued, layer(x[:, None], batched_state)[0][:, 0])
    assert layer.zero_state().c.shape == state.c.shape


@pytest.mark.parametrize(
    "layer",
    [lively(egru.EGRU(3, 6, 2, bidirectional=True, dtype=torch.float64)), egru.ELSTM(3, 6, dtype=torch.float64)],
    ids=["EGRU", "ELSTM"],
)
def test_padding_does_not_change_valid_steps(layer):
    lengths = torch.tensor([5, 9, 1])
    x = torch.randn(9, 3, 3)
    outputs = []
    for padding in (0.0, 1e3):
        padded = torch.where((torch.arange(9)[:, None] < lengths)[..., None], x, padding)
        y, state = layer(pack_padded_sequence(padded, lengths, enforce_sorted=False))
        outputs.append((pad_packed_sequence(y)[0], *state))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    for i, n in enumerate(lengths):
        alone, alone_state = layer(x[:n, i : i + 1])
        torch.testing.assert_close(outputs[0][0][:n, i], alone[:, 0])
        assert not outputs[0][0][n:, i].any()
        torch.testing.assert_close(outputs[0][1][:, i], alone_state.c[:, 0])
        torch.testing.assert_close(outputs[0][2][:, i], alone_state.y[:, 0])


def test_detach_removes_the_state_from_the_graph():
    layer = egru.EGRU(3, 6)
    _, state = layer(torch.randn(4, 2, 3))
    detached = state.detach()
    assert isinstance(detached, egru.EventState)
    assert state.c.requires_grad
    assert not detached.c.requires_grad
    assert not detached.y.requires_grad


@pytest.mark.parametrize("make", [egru.EGRU, egru.ELSTM, egru.ERNN])
def test_autocast_keeps_the_dtype_of_the_state(make):
    layer = make(3, 6, reset="none", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(torch.randn(4, 2, 3, dtype=torch.float32))
    assert y.dtype == state.c.dtype == state.y.dtype == torch.float32


def test_no_hidden_state_between_calls():
    layer = lively(egru.EGRU(3, 6))
    x = torch.randn(5, 2, 3)
    assert torch.equal(layer(x)[0], layer(x)[0])
