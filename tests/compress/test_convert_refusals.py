"""What ``egru.convert`` refuses or warns of."""

import functools
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


class StoredFunction(nn.Module):
    def __init__(self, double):
        super().__init__()
        self.rnn = nn.GRU(3, 4)
        self.run = double(self)


def doubled(module: Any) -> Any:
    run = module.forward

    def forward(x):
        return 2 * run(x)

    module.forward = forward
    return module


def wrapped(module: nn.Module) -> nn.Module:
    inner = doubled(module).forward
    module.forward = functools.wraps(inner)(lambda *args: inner(*args))
    return module


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
        (lambda: doubled(nn.Sequential(nn.GRU(3, 4))), TypeError, "forward is a function that refers to Sequential"),
        (lambda: wrapped(nn.Sequential(nn.GRU(3, 4))), TypeError, "so the copy would run the original; define it as"),
        (lambda: StoredFunction(lambda m: lambda x: m.rnn(x)), TypeError, "run is a function that refers to StoredF"),
        (
            lambda: StoredFunction(lambda m: lambda x, rnn=m.rnn: rnn(x)),
            TypeError,
            "run is a function that refers to GRU",
        ),
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
    model: Any = nn.ModuleDict({"rnn": nn.GRU(3, 4)})
    model["rnn"].cached = (model["rnn"].weight_hh_l0 * 2,)
    message = (
        r"convert: ModuleDict cannot be copied because of rnn\.cached \(Only Tensors .*\); detach it or set it to None"
    )
    with pytest.raises(TypeError, match=message):
        egru.convert(model, "positive")
    model["rnn"].cached = None
    model.register_buffer("hidden", torch.zeros(4))
    model.hidden = model["rnn"](torch.randn(5, 3))[1]
    with pytest.raises(TypeError, match="because of hidden"):
        egru.convert(model, "positive")


def test_stored_functions_that_do_not_refer_to_the_model_are_kept():
    model: Any = nn.ModuleDict({"rnn": nn.GRU(3, 4)})

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n > 0 and even(n - 1)

    other = nn.Linear(2, 2)
    model.functions = [even, nn.functional.relu, torch.relu, lambda x: other(x)]
    assert egru.convert(model, "positive").functions == model.functions


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
    model["a"].bias_hh_l0.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.warns(UserWarning, match="hooks of parameters are not copied: a.bias_ih_l0, a.bias_hh_l0"):
        egru.convert(model, "positive")


def test_recurrent_layers_that_stay_dense_warn():
    model = nn.ModuleDict({"a": nn.GRU(3, 4), "b": nn.RNN(3, 4), "c": nn.Sequential(nn.RNNCell(3, 4))})
    with pytest.warns(UserWarning, match=r"convert: b \(RNN\), c\.0 \(RNNCell\) cannot be converted and stay dense"):
        egru.convert(model, "positive")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated by torch
        scripted = nn.ModuleDict({"a": nn.GRU(3, 4), "b": torch.jit.script(nn.LSTM(3, 4))})
        traced: Any = torch.jit.trace(nn.GRU(3, 4), torch.randn(5, 2, 3))
    with pytest.warns(UserWarning, match=r"convert: b \(LSTM in TorchScript\) cannot be converted and stays dense"):
        egru.convert(scripted, "positive")
    with pytest.raises(
        ValueError, match=r"Sequential has no torch\.nn\.GRU.*; LSTM in TorchScript cannot be converted"
    ):
        egru.convert(nn.Sequential(scripted["b"]), "positive")
    with pytest.raises(ValueError, match="; GRU in TorchScript cannot be converted; convert the original module"):
        egru.convert(traced, "positive")


class TypeTest(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4)

    def init_weights(self):
        assert isinstance(self.rnn, nn.LSTM)

    def forward(self, x):
        state = self.rnn(x)[1]
        return state[0] if isinstance(self.rnn, nn.LSTM) else state


class Helpers(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4)
        assert type(self.rnn) is nn.GRU

    def exact(self):
        return type(self.rnn) in (nn.LSTM, nn.GRU)

    @property
    def named(self):
        return self.rnn.__class__.__name__ == "GRU"

    @staticmethod
    def listed(layer):
        return any(isinstance(layer, kind) for kind in (int, float)) or isinstance(
            layer,
            nn.RNNBase,
        )

    def branches(self):
        match self.rnn:
            case nn.GRUCell():
                return 1

    def contained(self):
        return "GRU" in type(self.rnn).__name__ and self.rnn.mode == "GRU"


class Inherited(Helpers):
    def exact(self):
        return True


def warnings_of_conversion(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        egru.convert(model, "positive")
    return [str(warning.message) for warning in caught]


def test_tests_for_dense_types_warn():
    (message,) = warnings_of_conversion(TypeTest())
    assert message.startswith(
        "convert: TypeTest.forward contains isinstance(self.rnn, nn.LSTM), which does not recognise"
    )
    tests = {
        "exact": "type(self.rnn) in (nn.LSTM, nn.GRU)",
        "named": "self.rnn.__class__.__name__ == 'GRU'",
        "listed": "isinstance(layer, nn.RNNBase)",
        "branches": "nn.GRUCell()",
    }
    messages = warnings_of_conversion(Helpers())
    assert [message.split(", which does")[0] for message in messages] == [
        f"convert: Helpers.{name} contains {test}" for name, test in tests.items()
    ]
    assert len(warnings_of_conversion(Inherited())) == 3


def test_mixed_batch_first_warns():
    model = nn.ModuleDict({"a": nn.GRU(3, 4, batch_first=True), "b": nn.GRU(4, 4)})
    with pytest.warns(UserWarning, match="a has batch_first=True and b has batch_first=False"):
        egru.convert(model, "positive")


def test_unknown_events_are_refused():
    with pytest.raises(ValueError, match="events must be one of positive, signed, delta"):
        egru.convert(nn.GRU(3, 4), "spikes")  # pyright: ignore[reportArgumentType]
