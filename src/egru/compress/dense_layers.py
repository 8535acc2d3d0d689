"""Dense recurrent layers: which of them an event layer can replace, and which stay dense."""

import types

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from egru.models.dense import GRU, LSTM

Dense = nn.GRU | nn.LSTM | nn.GRUCell | nn.LSTMCell
_KNOWN_FORWARDS = {c.forward for c in (nn.GRU, nn.LSTM, nn.GRUCell, nn.LSTMCell, GRU, LSTM)}
_UNUSED_BY_FORWARD = {"__init__", "__repr__", "extra_repr", "reset_parameters"}
_RECURRENT = {"RNN", "RNNCell", "GRU", "GRUCell", "LSTM", "LSTMCell"}


def describe(name: str, module: nn.Module) -> str:
    """Return the name and class of a module for messages."""
    return f"{name} ({_kind(module)})" if name else _kind(module)


def unsupported_layers(model: nn.Module) -> dict[str, str]:
    """Return the recurrent layers of torch that cannot be converted: the class of each by its name."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        scripted = isinstance(module, ScriptModule) and module.original_name in _RECURRENT
        if scripted or isinstance(module, nn.RNN | nn.RNNCell):
            found[name] = _kind(module)
    return found


def _kind(module: nn.Module) -> str:
    if isinstance(module, ScriptModule):
        return f"{module.original_name} in TorchScript"
    return type(module).__name__.removeprefix("Parametrized")  # created by torch.nn.utils.parametrize


def check_layer(label: str, layer: Dense) -> None:
    """Raise an error if an event layer cannot compute what ``layer`` computes."""
    if getattr(layer, "proj_size", 0):
        raise ValueError(f"convert: {label} has proj_size={layer.proj_size}; projections are not supported")
    if type(layer).forward not in _KNOWN_FORWARDS or "forward" in vars(layer):
        raise TypeError(
            f"convert: {label} has its own forward method, which the event layer would not run; replace it by the "
            "torch layer"
        )
    if methods := _own_methods(type(layer)):
        raise TypeError(
            f"convert: {label} is a subclass that defines {', '.join(methods)}, which the event layer would not have; "
            "move them to a module that contains the torch layer"
        )
    names = parameter_names(layer)
    tensors = {name for name, value in (layer._parameters | layer._buffers).items() if value is not None}
    if extra := sorted({*tensors, *layer._modules} - {*names, "parametrizations"}):
        raise TypeError(f"convert: {label} has parameters or submodules that torch's layer lacks: {', '.join(extra)}")
    for name in names:
        if name not in layer._parameters and not parametrize.is_parametrized(layer, name):
            raise ValueError(
                f"convert: {name} of {label} is not a parameter but computed by a hook; make it permanent "
                "(torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm) or use "
                "torch.nn.utils.parametrizations"
            )
        if is_lazy(getattr(layer, name)):
            raise ValueError(f"convert: {name} of {label} is not initialised yet; run the model once first")


def _own_methods(layer_type: type[Dense]) -> list[str]:
    """Return the methods and properties that a subclass adds to a dense layer or overrides."""
    functions = (types.FunctionType, property, classmethod, staticmethod)
    found: set[str] = set()
    for parent in layer_type.__mro__:
        if vars(parent).get("forward") in _KNOWN_FORWARDS:
            break
        if not parent.__name__.startswith("Parametrized"):  # created by torch.nn.utils.parametrize
            found |= {name for name, value in vars(parent).items() if isinstance(value, functions)}
    return sorted(found - _UNUSED_BY_FORWARD)


def parameter_names(layer: Dense) -> list[str]:
    """Return the names of the weights and biases of a dense layer."""
    if isinstance(layer, nn.RNNBase):
        return [name for names in layer._all_weights for name in names]
    return ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if layer.bias else [])]
