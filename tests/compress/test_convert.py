"""Conversion of dense recurrent layers: the same outputs, the same call sites, refusals."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import egru
from egru.layers import EventRNN, event_layers
from egru.models.dense import GRU as DropConnectGRU
from egru.types import EVENTS
from tests.helpers import worst

pytestmark = pytest.mark.filterwarnings("ignore:.*Converted.* runs in plain torch")

TOLERANCE = 1e-12


def flat(value):
    """Return all tensors in a nested output."""
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, torch.Tensor):
        return [value.as_subclass(torch.Tensor)]
    return [tensor for part in value for tensor in flat(part)]


def assert_same(model, converted, *inputs):
    """Compare outputs and all gradients of the parameters that both models have."""
    assert not any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in converted.modules())
    results = []
    for module in (model, converted):
        module.zero_grad()
        outputs = flat(module(*inputs))
        sum((output * output.cos()).sum() for output in outputs).backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters() if "threshold" not in name}
        results.append((outputs, gradients))
    (outputs, gradients), (expected_outputs, expected_gradients) = results
    assert gradients.keys() == expected_gradients.keys()
    assert worst(outputs, expected_outputs) <= TOLERANCE
    pairs = [(gradients[name], expected_gradients[name]) for name in gradients]
    assert worst(*zip(*pairs, strict=True)) <= TOLERANCE


LAYERS = [(layer_class, events) for layer_class in (nn.GRU, nn.LSTM) for events in EVENTS]
CELLS = [(cell_class, events) for cell_class in (nn.GRUCell, nn.LSTMCell) for events in EVENTS]
both_layers = pytest.mark.parametrize(("layer_class", "events"), LAYERS)


@both_layers
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "dropout": 0.5},
        {"batch_first": True},
        {"bidirectional": True},
        {"bias": False},
        {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_converted_layer_computes_the_same(layer_class, events, options):
    layer = layer_class(3, 5, **options).eval()
    assert_same(layer, egru.convert(layer, events), torch.randn(4, 6, 3))
    assert_same(layer, egru.convert(layer, events), torch.randn(6, 3))


@both_layers
@pytest.mark.parametrize("sorted", [True, False])
def test_packed_input(layer_class, events, sorted):
    layer = layer_class(3, 5, 2, bidirectional=True)
    lengths = [6, 4, 1] if sorted else [4, 1, 6]
    packed = pack_sequence([torch.randn(length, 3) for length in lengths], enforce_sorted=sorted)
    assert_same(layer, egru.convert(layer, events), packed)


@both_layers
def test_initial_state_of_torch_is_accepted(layer_class, events):
    layer = layer_class(3, 5, 2)
    h, c = torch.randn(2, 2, 4, 5).tanh()
    hx = (h, c) if layer_class is nn.LSTM else h
    converted = egru.convert(layer, events)
    assert_same(layer, converted, torch.randn(6, 4, 3), hx)
    assert_same(layer, converted, torch.randn(6, 3), (h[:, 0], c[:, 0]) if layer_class is nn.LSTM else h[:, 0])


@pytest.mark.parametrize(("cell_class", "events"), CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_cells(cell_class, events, bias):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell_class(3, 5, bias=bias)

        def forward(self, x):
            state, outputs = None, []
            for row in x:
                state = self.cell(row, state)
                outputs.append(state[0] if isinstance(state, tuple) else state)
            return torch.stack(outputs), state

    model = Loop()
    for x in (torch.randn(6, 4, 3), torch.randn(6, 3)):
        assert_same(model, egru.convert(model, events), x)


class Nested(nn.Module):
    """An encoder and a decoder, both recurrent, inside other modules, with an LSTM in a list."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"rnn": nn.GRU(3, 4, 2, batch_first=True), "linear": nn.Linear(4, 4)})
        self.decoder = nn.Sequential(nn.Identity(), nn.GRU(3, 4, 2, batch_first=True))
        self.others = nn.ModuleList([nn.LSTM(4, 5, batch_first=True)])

    def forward(self, x):
        _, h = self.encoder["rnn"](x)
        output, h = self.decoder[1](x, h)
        output, (h_last, _) = self.others[0](self.encoder["linear"](output))
        return output, h[-1], h_last[0]


@pytest.mark.parametrize("events", EVENTS)
def test_nested_modules_and_states_passed_between_layers(events):
    model = Nested()
    converted = egru.convert(model, events)
    assert [label for label, _ in event_layers(converted)] == ["encoder.rnn", "decoder.1", "others.0"]
    assert_same(model, converted, torch.randn(2, 5, 3))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.GRU(4, 4)
        self.second = self.first
        self.unregistered = [self.first]

    def forward(self, x):
        return self.unregistered[0](self.second(self.first(x)[0])[0])


def test_shared_modules_stay_shared():
    model = Shared()
    converted = egru.convert(model, "positive")
    assert converted.first is converted.second is converted.unregistered[0]
    assert isinstance(converted.first, EventRNN)
    assert_same(model, converted, torch.randn(5, 2, 4))


def test_tied_weights_stay_tied():
    model = nn.ModuleList([nn.GRU(4, 4), nn.GRU(4, 4), nn.Linear(4, 12, bias=False)])
    model[1].weight_ih_l0 = model[0].weight_ih_l0
    model[2].weight = model[0].weight_ih_l0
    converted = egru.convert(model, "positive")
    assert converted[0].weight_ih_l0 is converted[1].weight_ih_l0 is converted[2].weight
    assert converted[0].weight_ih_l0 is not model[0].weight_ih_l0
    for layer, event_layer in zip(model[:2], converted[:2], strict=True):
        assert_same(layer, event_layer, torch.randn(5, 2, 4))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@both_layers
def test_parametrised_weights_keep_their_parametrisation(layer_class, events):
    layer = layer_class(3, 5)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    parametrize.register_parametrization(layer, "weight_ih_l0", Doubled())
    layer(torch.randn(6, 2, 3))[0].sum().backward()  # torch keeps the computed weights with their graph
    converted = egru.convert(layer, events)
    assert parametrize.is_parametrized(converted, "weight_hh_l0")
    assert_same(layer, converted, torch.randn(6, 2, 3))
    with torch.no_grad():
        for module in (layer, converted):
            module.parametrizations.weight_hh_l0.original0.mul_(2)
    assert_same(layer, converted, torch.randn(6, 2, 3))


def test_dense_layers_with_parametrised_weights_are_copied():
    model = nn.ModuleDict({"gru": nn.GRU(3, 4), "rnn": nn.RNN(3, 4)})
    x = torch.randn(6, 2, 3)
    for layer in model.values():
        parametrizations.weight_norm(layer, "weight_hh_l0")
        layer(x)[0].sum().backward()
    with pytest.warns(UserWarning, match=r"rnn \(RNN\) cannot be converted and stays dense"):
        copied = egru.convert(model, "positive")["rnn"]
    gradients = []
    for layer in (copied, model["rnn"]):
        layer.zero_grad()
        layer(x)[0].sum().backward()
        gradients.append(layer.get_parameter("parametrizations.weight_hh_l0.original1").grad)
    assert torch.equal(copied(x)[0], model["rnn"](x)[0])
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_original_is_untouched():
    model = Nested().eval()
    model.encoder["linear"].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    converted = egru.convert(model, "positive")
    for parameter in converted.parameters():
        parameter.data.fill_(1.0)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not converted.training
    assert not converted.encoder["linear"].weight.requires_grad
    assert converted.decoder[1].weight_hh_l0.requires_grad


def test_frozen_weights_stay_frozen_and_attributes_are_kept():
    gru = nn.GRU(3, 4)
    gru.weight_ih_l0.requires_grad_(False)
    gru.note = "kept"  # pyright: ignore[reportAttributeAccessIssue]
    converted = egru.convert(gru, "positive")
    assert not converted.weight_ih_l0.requires_grad
    assert (converted.note, converted.mode, converted.proj_size) == ("kept", "GRU", 0)
    converted.flatten_parameters()


def test_hooks_are_kept():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4)

        def forward(self, x):
            return self.rnn(x)

    model, shapes = Model(), []
    model.rnn.register_forward_hook(lambda module, args, output: shapes.append(output[1].shape))
    model.rnn.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    assert_same(model, egru.convert(model, "positive"), torch.randn(5, 2, 3))
    assert shapes == [torch.Size([1, 2, 4])] * 2


def test_dropconnect_of_the_models_of_this_package_is_kept():
    layer = DropConnectGRU(3, 5, dropconnect=0.5)
    converted = egru.convert(layer, "positive")
    assert converted.dropconnect == 0.5
    assert_same(layer.eval(), converted.eval(), torch.randn(6, 2, 3))


@pytest.mark.parametrize("events", EVENTS)
def test_a_sparse_layer_continues_its_sequence_exactly(events):
    """The state that is returned contains c, although call sites see a tensor with the outputs."""
    layer = egru.convert(nn.GRU(3, 16, 2), events)
    egru.compress.raise_thresholds(layer, 0.1)
    x = torch.randn(12, 4, 3)
    expected, last = layer(x)
    assert (last.c != last).any()
    h: Any = None
    outputs = []
    for row in x.split(1):
        output, h = layer(row, h)
        outputs.append(output)
        h = h.detach()
    assert worst([torch.cat(outputs), *flat([h, h.c])], [expected, *flat([last, last.c])]) <= TOLERANCE
    # Reordering and masking, as in beam search and reinforcement learning.
    _, h = layer(x[:6])
    order, keep = torch.tensor([2, 0, 3, 1]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    changed, _ = layer(x[6:], torch.stack([part[order] for part in h]) * keep[:, None])
    expected, _ = layer(x[6:], egru.EventState(*((half[:, order] * keep[:, None]) for half in (h.c, h.clone()))))
    assert worst([changed], [expected]) <= TOLERANCE


@pytest.mark.parametrize("events", EVENTS)
def test_converted_model_is_saved_and_loaded(events):
    model = nn.ModuleDict({"rnn": nn.GRU(3, 4), "cell": nn.LSTMCell(3, 4)})
    converted = egru.convert(model, events)
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    again = egru.convert(model, events)
    again.load_state_dict(loaded.state_dict())
    x = torch.randn(5, 2, 3)
    outputs = [module["rnn"](x)[0] for module in (converted, loaded, again)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_converted_model_is_compiled_and_exported():
    model = Nested()
    converted = egru.convert(model, "positive")
    compiled = torch.compile(converted, backend="eager")
    x = torch.randn(2, 5, 3)
    assert worst(flat(compiled(x)), flat(model(x))) <= TOLERANCE
    layer = egru.convert(model.encoder["rnn"], "positive")
    exported = torch.export.export(layer.eval(), (x,)).module()
    assert worst(flat(exported(x)), flat(layer(x))) <= TOLERANCE


def test_packed_state_keeps_the_order_of_the_batch():
    gru = nn.GRU(3, 4)
    x, lengths = torch.randn(6, 3, 3), torch.tensor([2, 6, 4])
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    _, h = egru.convert(gru, "positive")(packed)
    assert worst([h.as_subclass(torch.Tensor)], [gru(packed)[1]]) <= TOLERANCE
