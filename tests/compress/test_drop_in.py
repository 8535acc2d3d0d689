"""Converted layers accept and refuse the calls that torch's layers accept and refuse."""

from typing import Any

import pytest
import torch
from torch import nn

import egru
from egru.layers import record
from tests.compress.test_convert import flat

pytestmark = pytest.mark.filterwarnings("ignore:.*Converted.* runs in plain torch")


WRONG: list[tuple[Any, Any, str]] = [
    (nn.GRU, lambda: torch.zeros(1, 5, 7), r"ConvertedGRU: hx has shape \(1, 5, 7\), expected \(1, 5, 8\)"),
    (nn.GRU, lambda: egru.convert(nn.GRU(4, 8))(torch.zeros(3, 2, 4))[1], r": hx has shape \(1, 2, 8\), expected"),
    (nn.GRUCell, lambda: torch.zeros(4, 8), r"ConvertedGRUCell: hx has shape \(4, 8\), expected \(5, 8\)"),
    (nn.LSTM, lambda: (torch.zeros(1, 5, 8), torch.zeros(1, 5, 7)), r"ConvertedLSTM: c of hx has shape \(1, 5, 7\)"),
    (nn.LSTM, lambda: (torch.zeros(1, 5, 7), torch.zeros(1, 5, 8)), r"ConvertedLSTM: h of hx has shape \(1, 5, 7\)"),
    (nn.LSTMCell, lambda: (torch.zeros(5, 7), torch.zeros(5, 8)), r"ConvertedLSTMCell: h of hx has shape \(5, 7\)"),
]


@pytest.mark.parametrize(("layer_class", "make_state", "message"), WRONG)
def test_wrong_states_are_called_hx(layer_class, make_state, message):
    x = torch.zeros(5, 4) if layer_class in (nn.GRUCell, nn.LSTMCell) else torch.zeros(3, 5, 4)
    with pytest.raises(ValueError, match=message):
        egru.convert(layer_class(4, 8))(x, make_state())


OPTIONS: list[dict[str, Any]] = [{}, {"batch_first": True}, {"bidirectional": True, "num_layers": 2}]
LAYERS = [
    (nn.GRUCell, {}),
    (nn.LSTMCell, {}),
    *((layer, options) for layer in (nn.GRU, nn.LSTM) for options in OPTIONS),
]


@pytest.mark.parametrize(("layer_class", "options"), LAYERS)
@pytest.mark.parametrize("given", [False, True])
def test_a_batch_without_sequences_is_accepted(layer_class, options, given):
    is_cell = layer_class in (nn.GRUCell, nn.LSTMCell)
    layer = layer_class(4, 8, **options)
    converted = egru.convert(layer)
    x = torch.zeros(0, 4) if is_cell else torch.zeros(0, 6, 4) if "batch_first" in options else torch.zeros(6, 0, 4)
    hx: Any = None
    if given:
        hx = layer(x) if is_cell else layer(x)[1]
    with record(converted) as records:
        results = [flat(module(x, hx)) for module in (layer, converted)]
    assert [part.shape for part in results[1]] == [part.shape for part in results[0]]
    assert [part.dtype for part in results[1]] == [part.dtype for part in results[0]]
    assert not records
    torch.stack([part.sum() for part in results[1]]).sum().backward()
    gradients = [p.grad for name, p in converted.named_parameters() if "threshold" not in name]
    assert all(grad is not None and not grad.any() for grad in gradients)


def test_a_batch_without_steps_is_refused():
    with pytest.raises(ValueError, match="at least one step"):
        egru.convert(nn.GRU(4, 8))(torch.zeros(0, 3, 4))
    with pytest.raises(ValueError, match="at least one step"):
        egru.convert(nn.GRU(4, 8))(torch.zeros(0, 0, 4))
