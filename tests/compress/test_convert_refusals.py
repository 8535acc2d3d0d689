"""What ``egru.convert`` refuses or warns of."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import egru
from tests.compress.test_convert import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*Converted.* runs in plain torch")


class OwnForward(nn.GRU):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


class Extra(nn.GRU):
    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(1))


class OwnCall(nn.GRU):
    def __call__(self, *args):
        output, h = super().__call__(*args)
        return 2 * output, h


class Helper(nn.GRU):
    def init_hidden(self, batch):
        return torch.zeros(1, batch, self.hidden_size)


class StoredMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4)
        self.run = [self.rnn.forward]


class PlainSubclass(nn.GRU):
    def __init__(self, size):
        super().__init__(size, size)


def with_old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(nn.GRU(3, 4), "weight_hh_l0")


def replaced_forward():
    gru: Any = nn.GRU(3, 4)
    gru.forward = lambda input, hx=None: (input, hx)
    return gru


class Lazy(nn.GRU):
    def __init__(self):
        super().__init__(3, 4)
        self.weight_ih_l0 = nn.UninitializedParameter()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Linear(3, 4), ValueError, "convert: Linear has no torch.nn.GRU, GRUCell, LSTM or LSTMCell"),
        (lambda: nn.Sequential(nn.RNN(3, 4)), ValueError, "RNN cannot be converted"),
        (lambda: egru.EGRU(3, 4), ValueError, "EGRU has event layers already"),
        (lambda: nn.ModuleList([nn.LSTM(3, 4, proj_size=2)]), ValueError, r"0 \(LSTM\) has proj_size=2"),
        (lambda: nn.ModuleList([OwnForward(3, 4)]), TypeError, r"0 \(OwnForward\) has its own forward method"),
        (lambda: OwnCall(3, 4), TypeError, "OwnCall is a subclass that defines __call__"),
        (lambda: Helper(3, 4), TypeError, "Helper is a subclass that defines init_hidden"),
        (StoredMethod, TypeError, "run is a method of a GRU, which would still run the dense layer"),
        (replaced_forward, TypeError, "GRU has its own forward method"),
        (lambda: Extra(3, 4), TypeError, "Extra has parameters or submodules that torch's layer lacks: scale"),
        (with_old_weight_norm, TypeError, "weight_hh_l0_g, weight_hh_l0_v"),
        (Lazy, ValueError, "weight_ih_l0 of Lazy is not initialised yet"),
        (lambda: torch.compile(nn.GRU(3, 4), backend="eager"), TypeError, "the model is compiled"),
        (lambda: 3, TypeError, "model must be a torch.nn.Module, got int"),
    ],
)
def test_what_cannot_be_converted_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        egru.convert(make(), "positive")


def test_pruned_weights_are_refused_until_they_are_permanent():
    gru = nn.GRU(3, 4)
    prune.l1_unstructured(gru, "weight_hh_l0", 0.5)
    with pytest.raises(TypeError, match="weight_hh_l0_orig"):
        egru.convert(gru, "positive")
    prune.remove(gru, "weight_hh_l0")
    assert_same(gru, egru.convert(gru, "positive"), torch.randn(5, 2, 3))


def test_a_model_that_cannot_be_copied_is_refused():
    gru: Any = nn.GRU(3, 4)
    gru.cached = (gru.weight_hh_l0 * 2,)
    with pytest.raises(TypeError, match="convert: GRU cannot be copied"):
        egru.convert(gru, "positive")


def test_subclass_without_methods_is_converted():
    layer = PlainSubclass(3)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    assert_same(layer, egru.convert(layer, "positive"), torch.randn(5, 2, 3))


def test_layers_in_plain_lists_and_hooks_of_parameters_warn():
    model: Any = nn.ModuleDict({"a": nn.GRU(3, 4)})
    model.others = {"b": nn.LSTM(3, 4)}
    with pytest.warns(UserWarning, match=r"others contains a layer \(LSTM\) that is not a submodule and stays dense"):
        egru.convert(model, "positive")
    model.others = {"b": model["a"]}
    model["a"].bias_ih_l0.register_hook(lambda gradient: gradient)
    with pytest.warns(UserWarning, match="hooks of parameters are not copied: a.bias_ih_l0"):
        egru.convert(model, "positive")


class TypeTest(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4)

    def forward(self, x):
        state = self.rnn(x)[1]
        return state[0] if isinstance(self.rnn, nn.LSTM) else state


def test_tests_for_dense_types_warn():
    with pytest.warns(
        UserWarning, match=r"TypeTest\.forward contains isinstance\(self\.rnn, nn\.LSTM\), which is false"
    ):
        egru.convert(TypeTest(), "positive")


def test_mixed_batch_first_warns():
    model = nn.ModuleDict({"a": nn.GRU(3, 4, batch_first=True), "b": nn.GRU(4, 4)})
    with pytest.warns(UserWarning, match="a has batch_first=True and b has batch_first=False"):
        egru.convert(model, "positive")


def test_unknown_events_are_refused():
    with pytest.raises(ValueError, match="events must be one of positive, signed, delta"):
        egru.convert(nn.GRU(3, 4), "spikes")  # pyright: ignore[reportArgumentType]
