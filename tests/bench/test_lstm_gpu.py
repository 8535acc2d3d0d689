"""The correctness check of the GPU benchmark of LSTMs, tested on the CPU."""

import pytest
import torch
from torch import nn

import egru
from egru.bench import gpu_check, lstm_gpu


def make_layers() -> tuple[egru.ELSTM, nn.LSTM]:
    lstm = nn.LSTM(5, 30).float()
    return egru.ELSTM.from_lstm(lstm), lstm


@pytest.mark.parametrize("precision", gpu_check.PRECISIONS)
def test_correct_layers_pass(precision: str) -> None:
    errors = lstm_gpu.check_layer(*make_layers(), torch.randn(6, 9, 5).float(), precision)
    assert set(errors) == {"output", "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}


def test_wrong_layers_are_rejected() -> None:
    layer, lstm = make_layers()
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0").mul_(1.05)
    with pytest.raises(gpu_check.Wrong, match="output off by"):
        lstm_gpu.check_layer(layer, lstm, torch.randn(6, 9, 5).float(), "float32")
