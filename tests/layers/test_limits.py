"""With an event at every step and no reset, each event layer equals torch's dense layer, gradients included."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import egru
from egru.layers import EventRNN
from egru.types import EVENTS
from tests.helpers import worst

ALWAYS = egru.Threshold.constant(-1e3)


def pair(kind, **shape):
    kind, _, name = kind.partition(" ")
    events = {"events": name} if name else {}
    if kind == "GRU":
        dense = nn.GRU(4, 5, **shape)
        return dense, egru.EGRU.from_gru(dense, **events)
    if kind == "LSTM":
        dense = nn.LSTM(4, 5, **shape)
        return dense, egru.ELSTM.from_lstm(dense, **events)
    dense = nn.RNN(4, 5, **shape)
    event = egru.ERNN(4, 5, **shape, reset="none", threshold=ALWAYS)
    event.load_state_dict(dense.state_dict())
    return dense, event


def run(module, x, first, second):
    """Return the output and both halves of the state."""
    if isinstance(module, EventRNN):
        y, (c, last) = module(x, egru.EventState(second, first))
        return y, last, c
    if isinstance(module, nn.LSTM):
        y, (h, c) = module(x, (first, second))
        return y, h, c
    y, h = module(x, first)
    return y, h, h


@pytest.mark.parametrize("kind", ["GRU", "GRU signed", "GRU delta", "LSTM", "LSTM signed", "LSTM delta", "RNN"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", ["padded", "packed", "packed unsorted", "batch first"])
def test_equals_the_dense_layer(kind, layers, bidirectional, bias, packed):
    shape = {"num_layers": layers, "bidirectional": bidirectional, "bias": bias, "batch_first": packed == "batch first"}
    dense, event = pair(kind, **shape)
    x = torch.randn(7, 3, 4, requires_grad=True)
    h = torch.randn(layers * (1 + bidirectional), 3, 5, requires_grad=True)
    # The state of a GRU and of an Elman network is their output; the event layer takes both halves.
    second = torch.randn_like(h).requires_grad_() if kind == "LSTM" else h
    results = []
    for module in (dense, event):
        if packed in ("padded", "batch first"):
            out = run(module, x.transpose(0, 1) if packed == "batch first" else x, h, second)
        else:
            lengths = torch.tensor([7, 4, 2] if packed == "packed" else [2, 7, 4])
            sequence = pack_padded_sequence(x, lengths, enforce_sorted=packed == "packed")
            out = run(module, sequence, h, second)
            assert out[0].batch_sizes.tolist() == sequence.batch_sizes.tolist()
            out = (out[0].data, pad_packed_sequence(out[0])[0], *out[1:])
        weights = [torch.randn(o.shape, generator=torch.Generator().manual_seed(i)) for i, o in enumerate(out)]
        loss = torch.stack([(w * o).sum() for w, o in zip(weights, out, strict=True)]).sum()
        parameters = [event.get_parameter(n) if module is event else p for n, p in dense.named_parameters()]
        inputs = [x, h, second] if kind == "LSTM" else [x, h]
        results.append((out, torch.autograd.grad(loss, [*inputs, *parameters])))
    (dense_out, dense_grads), (event_out, event_grads) = results
    assert worst(dense_out, event_out) <= 1e-12
    assert worst(dense_grads, event_grads) <= 1e-12


def test_from_gru_and_to_gru_round_trip():
    gru = nn.GRU(3, 6, 2, bidirectional=True, batch_first=True)
    back = egru.EGRU.from_gru(gru).to_gru()
    assert back.batch_first
    assert all(torch.equal(a, b) for a, b in zip(gru.parameters(), back.parameters(), strict=True))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(gru.parameters(), back.parameters(), strict=True))
    with pytest.raises(TypeError, match=r"expected a torch.nn.GRU, got LSTM"):
        egru.EGRU.from_gru(nn.LSTM(1, 1))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("events", EVENTS)
def test_from_gru_computes_the_function_of_the_gru(events, mode, bidirectional, batch_first):
    gru = nn.GRU(4, 5, 3, dropout=0.4, bidirectional=bidirectional, batch_first=batch_first)
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.mul_(10)  # saturated gates, states near -1 and 1
    gru.train(mode == "training")
    layer = egru.EGRU.from_gru(gru, events=events)
    assert layer.training == gru.training
    x, h = torch.randn(7, 6, 4), -50 * torch.rand(3 * (1 + bidirectional), 6 if not batch_first else 7, 5)
    outputs = []
    for module in (gru, layer):
        torch.manual_seed(1)  # the same dropout masks
        y, last = module(x, h)
        outputs.append((y, last if module is gru else last.y))
    assert outputs[0][0].min() < -0.99
    assert worst(*outputs) <= 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"reset": "output"},
        {"reset": "hard", "reset_scale": 0.5},
        {"reset_gate": "before"},
        {"threshold": egru.Threshold()},
        {"threshold": egru.Threshold.constant(-1.0)},
        {"zoneout": 0.1},
        {"threshold": egru.Threshold("abs", std=0.1), "events": "signed"},
        {"threshold": egru.Threshold.constant(0.1), "events": "delta"},
    ],
)
def test_from_gru_warns_of_options_that_change_the_function(options):
    name, value = next(iter(options.items()))
    with pytest.warns(UserWarning, match="does not compute the function of the GRU; train it again") as record:
        layer = egru.EGRU.from_gru(nn.GRU(3, 6), **options)
    assert f"with {name}={value!r} the layer" in str(record[0].message)
    assert getattr(layer, "threshold_config" if name == "threshold" else name) == value


@pytest.mark.parametrize(
    "options",
    [
        {"reset": "output", "reset_scale": 0.0},
        {"threshold": ALWAYS},
        {"lean": True, "dropconnect": 0.1},
        {"events": "delta", "threshold": egru.Threshold.constant(0.0, trainable=True)},
    ],
)
def test_from_gru_does_not_warn_of_options_that_keep_the_function(options):
    gru, x = nn.GRU(3, 6).eval(), torch.randn(5, 2, 3)
    assert worst([gru(x)[0]], [egru.EGRU.from_gru(gru, **options)(x)[0]]) <= 1e-12


def test_from_gru_refuses_projections():
    gru = nn.GRU(3, 6)
    gru.proj_size = 2  # torch refuses the argument, too
    with pytest.raises(ValueError, match=r"EGRU.from_gru: projections are not supported, got proj_size=2"):
        egru.EGRU.from_gru(gru)


@pytest.mark.parametrize(
    ("events", "threshold"),
    [("positive", ALWAYS), ("signed", egru.Threshold.constant(0)), ("delta", egru.Threshold.constant(0))],
)
def test_cell_with_gru_cell_weights_equals_it(events, threshold):
    dense = nn.GRUCell(4, 5)
    cell = egru.EGRUCell(4, 5, events=events, reset="none", reset_gate="after", threshold=threshold)
    cell.load_state_dict(dense.state_dict())
    x, h = torch.randn(3, 4), torch.randn(3, 5)
    torch.testing.assert_close(cell(x, egru.EventState(h, h)).y, dense(x, h), rtol=0, atol=1e-12)
