"""Code that was written for ``torch.nn.GRU`` runs with ``egru.EGRU``."""

import inspect
import io

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import egru
from tests.helpers import lively, worst

ATTRIBUTES = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_members_of_a_gru_exist(bias, bidirectional):
    gru = nn.GRU(3, 5, 2, bias=bias, batch_first=True, dropout=0.1, bidirectional=bidirectional)
    layer = egru.EGRU(3, 5, 2, bias=bias, batch_first=True, dropout=0.1, bidirectional=bidirectional)
    for name in ATTRIBUTES:
        assert getattr(layer, name) == getattr(gru, name)
    layer.flatten_parameters()
    shapes = [[tuple(weight.shape) for weight in weights] for weights in gru.all_weights]
    assert [[tuple(weight.shape) for weight in weights] for weights in layer.all_weights] == shapes
    assert layer.all_weights[0][1] is layer.get_parameter("weight_hh_l0")
    for dense, event in ((nn.GRU, egru.EGRU), (nn.GRUCell, egru.EGRUCell)):
        names = [list(inspect.signature(layer_class.forward).parameters) for layer_class in (dense, event)]
        assert names[0] == names[1]


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ERNN])
@pytest.mark.parametrize("layout", ["batched", "unbatched", "packed"])
def test_tensor_as_initial_state_stands_for_both_halves(layer_class, layout):
    layer = layer_class(3, 5, 2, threshold=egru.Threshold(mean=-2.0))
    x, h = torch.randn(6, 4, 3), torch.rand(2, 4, 5)
    if layout == "unbatched":
        x, h = x[:, 0], h[:, 0]
    if layout == "packed":
        x = pack_padded_sequence(x, torch.tensor([6, 5, 2, 2]))
    y, state = layer(x, hx=h)
    expected, expected_state = layer(x, egru.EventState(h, h))
    assert isinstance(state, egru.EventState)
    assert all(torch.equal(a, b) for a, b in zip(state, expected_state, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(y, expected, strict=True) if isinstance(a, torch.Tensor))
    zeros, _ = layer(x, torch.zeros_like(h))
    plain, _ = layer(x)
    assert all(torch.equal(a, b) for a, b in zip(zeros, plain, strict=True) if isinstance(a, torch.Tensor))


def test_cell_takes_a_tensor_as_initial_state():
    cell, x, h = egru.EGRUCell(3, 5), torch.randn(2, 3), torch.rand(2, 5)
    assert torch.equal(cell(x, hx=h).c, cell(x, egru.EventState(h, h)).c)


def test_training_loop_of_a_gru_runs_and_agrees():
    """Truncated back-propagation through time, as in torch's word-level language model."""
    gru = nn.GRU(3, 5, 2)
    layer = egru.EGRU.from_gru(gru)
    chunks, gradients = torch.randn(4, 6, 2, 3), []
    for rnn in (gru, layer):
        rnn.flatten_parameters()
        hidden = torch.zeros(2, 2, 5)
        for chunk in chunks:
            y, hidden = rnn(chunk, hidden.detach())
            y.square().sum().backward()
        gradients.append([weight.grad for weights in rnn.all_weights for weight in weights])
    assert worst(*gradients) <= 1e-12


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM, egru.ERNN])
@pytest.mark.parametrize("with_state", [False, True])
def test_exported_layer_is_saved_and_loaded(layer_class, with_state, caplog):
    layer = layer_class(3, 8, 2, threshold=egru.Threshold(mean=-2.0)).eval()
    inputs = (torch.randn(6, 2, 3), layer.zero_state(2))[: 1 + with_state]
    sizes = {0: torch.export.Dim("T", min=2, max=64)}
    fixed = egru.EventState(None, None)  # pyright: ignore[reportArgumentType]
    dynamic = (sizes, *[fixed] * with_state) if layer_class is egru.EGRU else None
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, inputs, dynamic_shapes=dynamic), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert "weights_only=False" not in caplog.text, "torch.load(weights_only=True) must accept the state"
    if layer_class is egru.EGRU:
        inputs = (torch.randn(9, 2, 3), *inputs[1:])
    y, state = layer(*inputs)
    loaded_y, loaded_state = loaded(*inputs)
    assert y.any()
    assert isinstance(loaded_state, egru.EventState)
    assert all(torch.equal(a, b) for a, b in zip((y, *state), (loaded_y, *loaded_state), strict=True))


def test_state_is_loaded_as_weights_only():
    _, state = lively(egru.EGRU(3, 5))(torch.randn(6, 2, 3))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, egru.EventState)
    assert torch.equal(loaded.c, state.c)
