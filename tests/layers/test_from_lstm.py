"""ELSTM.from_lstm computes the function of nn.LSTM, at any depth of memory, and says when options change it."""

from typing import Any

import pytest
import torch
from torch import nn

import egru
from tests.helpers import worst


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_computes_the_function_of_the_lstm(mode, bidirectional, batch_first):
    lstm = nn.LSTM(4, 5, 3, dropout=0.4, bidirectional=bidirectional, batch_first=batch_first)
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.mul_(10)  # saturated gates, outputs near -1 and 1
    lstm.train(mode == "training")
    layer = egru.ELSTM.from_lstm(lstm)
    assert layer.training == lstm.training
    x = torch.randn(7, 6, 4)
    h, c = torch.randn(2, 3 * (1 + bidirectional), 7 if batch_first else 6, 5)
    outputs = []
    for module, state in ((lstm, (h, c)), (layer, egru.EventState(c, h))):
        torch.manual_seed(1)  # the same dropout masks
        y, last = module(x, state)
        outputs.append((y, *(last if module is lstm else (last.y, last.c))))
    assert outputs[0][0].min() < -0.5
    assert worst(*outputs) <= 1e-12


def test_memory_cells_below_the_threshold_still_emit():
    """Memory cells fall by up to one per step, without a bound; outputs, which are compared, stay in [-1, 1]."""
    lstm: Any = nn.LSTM(1, 2)
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.zero_()
        lstm.bias_ih_l0.copy_(torch.tensor([1.0, 1.0, -1.0, 1.0]).repeat_interleave(2) * 50)
    x, zero = torch.zeros(3, 1, 1), torch.zeros(1, 1, 2)
    y, (h, c) = lstm(x, (zero, zero - 2e4))
    events, state = egru.ELSTM.from_lstm(lstm)(x, egru.EventState(zero - 2e4, zero))
    assert state.c.max() <= -2e4
    assert events.max() < -0.99
    assert worst((y, h, c), (events, state.y, state.c)) <= 1e-12


def test_to_lstm_is_the_way_back():
    lstm = nn.LSTM(3, 6, 2, bidirectional=True, batch_first=True)
    back = egru.ELSTM.from_lstm(lstm).to_lstm()
    assert back.batch_first
    assert all(torch.equal(a, b) for a, b in zip(lstm.parameters(), back.parameters(), strict=True))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(lstm.parameters(), back.parameters(), strict=True))


def test_other_layers_and_projections_are_refused():
    with pytest.raises(TypeError, match=r"ELSTM.from_lstm: expected a torch.nn.LSTM, got GRU"):
        egru.ELSTM.from_lstm(nn.GRU(1, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"ELSTM.from_lstm: projections are not supported, got proj_size=2"):
        egru.ELSTM.from_lstm(nn.LSTM(3, 6, proj_size=2))
    with pytest.raises(ValueError, match=r"ELSTM: compare must be one of cell, output; got 'state'"):
        egru.ELSTM.from_lstm(nn.LSTM(3, 6), compare="state")


@pytest.mark.parametrize(
    "options",
    [
        {"reset": "output"},
        {"reset": "hard", "reset_scale": 0.5},
        {"threshold": egru.Threshold()},
        {"threshold": egru.Threshold.constant(-1.0)},
        {"threshold": egru.Threshold.constant(-2.0), "compare": "cell"},
        {"zoneout": 0.1},
    ],
)
def test_options_that_change_the_function_warn(options):
    name, value = next(iter(options.items()))
    with pytest.warns(UserWarning, match="does not compute the function of the LSTM; train it again") as record:
        layer = egru.ELSTM.from_lstm(nn.LSTM(3, 6), **options)
    assert f"ELSTM.from_lstm: with {name}={value!r} the layer" in str(record[0].message)
    assert record[0].filename == __file__
    assert getattr(layer, "threshold_config" if name == "threshold" else name) == value


@pytest.mark.parametrize(
    "options",
    [
        {"reset": "output", "reset_scale": 0.0},
        {"threshold": egru.Threshold.constant(-2.0)},
        {"compare": "cell"},
        {"dropconnect": 0.1},
    ],
)
def test_options_that_keep_the_function_do_not_warn(options, recwarn):
    lstm, x = nn.LSTM(3, 6).eval(), torch.randn(5, 2, 3)
    layer = egru.ELSTM.from_lstm(lstm, **options)
    assert not [w for w in recwarn if w.category is UserWarning]
    assert worst([lstm(x)[0]], [layer(x)[0]]) <= 1e-12


@pytest.mark.parametrize("compare", ["cell", "output"])
def test_compare_selects_what_crosses_the_threshold(compare):
    layer = egru.ELSTM(3, 6, reset="none", compare=compare, threshold=egru.Threshold.constant(0.2))
    dense = layer.to_lstm()
    x = torch.randn(1, 50, 3)
    h, (_, c) = dense(x)
    y, state = layer(x)
    expected = torch.where((c if compare == "cell" else h) > 0.2, h, 0)
    assert 0 < (expected != 0).double().mean() < 1
    assert worst([expected, c], [y, state.c]) <= 1e-12
    assert f"compare={compare!r}" in repr(layer)
