"""Replacement of the dense recurrent layers of a model by event layers that compute the same function."""

import copy
import inspect
import re
import types
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from egru.compress.drop_in import ConvertedGRU, ConvertedGRUCell, ConvertedLSTM, ConvertedLSTMCell
from egru.events import Surrogate
from egru.layers import EventRNN
from egru.models.dense import GRU, LSTM
from egru.types import Events

Model = TypeVar("Model", bound=nn.Module)
Dense = nn.GRU | nn.LSTM | nn.GRUCell | nn.LSTMCell
_KNOWN_FORWARDS = {c.forward for c in (nn.GRU, nn.LSTM, nn.GRUCell, nn.LSTMCell, GRU, LSTM)}
_TYPE_TEST = re.compile(r"isinstance\([^\n]*\b(GRU|LSTM|GRUCell|LSTMCell|RNNBase|RNNCellBase)\b[^\n)]*\)*")
_UNUSED_BY_FORWARD = {"__init__", "__repr__", "extra_repr", "reset_parameters"}
_SIZES = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")


def convert(model: Model, events: Events = "delta", *, surrogate: Surrogate | None = None) -> Model:
    """Return a copy of a model in which event layers replace the dense recurrent layers.

    Replaced are all ``nn.GRU``, ``nn.GRUCell``, ``nn.LSTM`` and ``nn.LSTMCell``. The copy computes the same
    outputs to rounding: every change of a state is an event. :func:`egru.compress.raise_thresholds` reduces the number
    of events. Event layers are called like the layers they replace: they return ``(output, h_n)`` or
    ``(output, (h_n, c_n))``, read packed sequences, and have the same parameters plus thresholds. Parameters that
    several layers share stay shared. Parametrisations and hooks of modules are kept; hooks of parameters are lost, with
    a warning.

    Args:
        model: Any module, or a recurrent layer itself. It does not change.
        events: Kind of events, see :data:`egru.types.Events`. ``"delta"`` sends changes of the state, and a trained
            network becomes sparse without training. ``"signed"`` and ``"positive"`` send the state itself, and the
            network has to be fine-tuned to become sparse. Default: ``"delta"``.
        surrogate: Gradient of the step function, for fine-tuning. If None, the default of :meth:`egru.EGRU.from_gru`.

    Returns:
        The converted copy, in the same mode (training or evaluation).

    Raises:
        TypeError: If a layer is a subclass with methods of its own, such as ``forward``, if the model stores a bound
            method of a layer, or if it cannot be copied.
        ValueError: If there is no recurrent layer, or one with ``proj_size``, with parameters that are not initialised
            yet, or with weights that a hook computes.

    Example:
        >>> import torch, egru
        >>> model = torch.nn.ModuleDict({"rnn": torch.nn.GRU(4, 8), "readout": torch.nn.Linear(8, 2)})
        >>> events = egru.convert(model)
        >>> x = torch.randn(5, 1, 4)
        >>> torch.allclose(events["rnn"](x)[0], model["rnn"](x)[0], atol=1e-6)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            raise TypeError("convert: the model is compiled; convert the original module, then call torch.compile")
        if isinstance(module, Dense):
            _check_layer(_label(name, module), module)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Dense)]
    if not layers:
        raise ValueError(f"convert: {_describe_missing(model)}")
    _check_references(model)
    _check_type_tests(model)
    orders = {module.batch_first: name for name, module in layers if isinstance(module, nn.RNNBase)}
    if len(orders) > 1:
        warnings.warn(
            f"convert: {orders[True]} has batch_first=True and {orders[False]} has batch_first=False; the copy keeps "
            "both, check that the model transposes between them",
            stacklevel=2,
        )
    if hooked := [name for name, p in model.named_parameters() if p._backward_hooks]:
        warnings.warn(f"convert: hooks of parameters are not copied: {', '.join(hooked)}", stacklevel=2)
    try:
        converted = copy.deepcopy(model)
    except Exception as error:  # deepcopy of arbitrary attributes
        raise TypeError(f"convert: {type(model).__name__} cannot be copied: {error}") from error
    for module in list(converted.modules()):
        if isinstance(module, Dense):
            _become(module, _build_layer(module, events, surrogate))
    return converted


def _label(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _describe_missing(model: nn.Module) -> str:
    names = {type(module).__name__ for module in model.modules()}
    found = "torch.nn.GRU, GRUCell, LSTM or LSTMCell"
    if any(isinstance(module, EventRNN) for module in model.modules()):
        return f"{type(model).__name__} has event layers already and no {found}"
    if others := sorted(names & {"RNN", "RNNCell", "RecursiveScriptModule"}):
        return f"{type(model).__name__} has no {found}; {', '.join(others)} cannot be converted"
    return f"{type(model).__name__} has no {found}"


def _check_layer(label: str, layer: Dense) -> None:
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
    names = _parameter_names(layer)
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


def _check_references(model: nn.Module) -> None:
    """Raise an error for stored methods of dense layers, and warn of dense layers that torch has not registered."""
    modules = set(model.modules())
    for name, module in model.named_modules():
        for attribute, value in _attributes(module):
            owner = f"{name}.{attribute}" if name else attribute
            if isinstance(value, types.MethodType) and isinstance(value.__self__, Dense):
                raise TypeError(
                    f"convert: {owner} is a method of a {type(value.__self__).__name__}, which would still run the "
                    "dense layer; store the layer and call it"
                )
            if isinstance(value, Dense) and value not in modules:
                warnings.warn(
                    f"convert: {owner} contains a layer ({type(value).__name__}) that is not a submodule and stays "
                    "dense; use nn.ModuleList or nn.ModuleDict",
                    stacklevel=3,
                )


def _check_type_tests(model: nn.Module) -> None:
    """Warn of modules whose ``forward`` tests for the types of dense layers."""
    for module_type in {type(module) for module in model.modules()}:
        if module_type.__module__.startswith(("torch.", "egru.")):
            continue
        try:
            source = inspect.getsource(module_type.forward)
        except (OSError, TypeError):  # defined in an interactive session, or in C
            continue
        if found := _TYPE_TEST.search(source):
            warnings.warn(
                f"convert: {module_type.__name__}.forward contains {found[0]}, which is false for event layers; check "
                "that it takes the same branch",
                stacklevel=3,
            )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and the entries of its lists, tuples and dictionaries."""
    for name, value in vars(module).items():
        if isinstance(value, dict) and not name.startswith("_"):
            value = list(value.values())
        for entry in value if isinstance(value, list | tuple) else [value]:
            yield name, entry


def _parameter_names(layer: Dense) -> list[str]:
    if isinstance(layer, nn.RNNBase):
        return [name for names in layer._all_weights for name in names]
    return ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if layer.bias else [])]


def _build_layer(dense: Dense, events: Events, surrogate: Surrogate | None) -> EventRNN:
    """Return an event layer of the same size that computes the function of ``dense`` if it has the same weights."""
    weight: Tensor = getattr(dense, _parameter_names(dense)[0])
    options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    sizes = {name: getattr(dense, name) for name in _SIZES if hasattr(dense, name)}
    is_lstm = isinstance(dense, nn.LSTM | nn.LSTMCell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has warned of options without effect when the layer was built
        plain: Any = (nn.LSTM if is_lstm else nn.GRU)(**sizes, **options)
        given = {} if surrogate is None else {"surrogate": surrogate}
        layer = (ConvertedLSTM.from_lstm if is_lstm else ConvertedGRU.from_gru)(
            plain, events=events, dropconnect=getattr(dense, "dropconnect", 0.0), **given
        )
    if isinstance(dense, nn.RNNBase):
        return layer
    for name in ("events", "reset", "reset_gate", "compare", "surrogate"):
        if hasattr(layer, name):
            options[name] = getattr(layer, name)
    cell = ConvertedLSTMCell if is_lstm else ConvertedGRUCell
    return cell(**sizes, **options, threshold=layer.threshold_config)


def _become(dense: Any, layer: EventRNN) -> None:
    """Turn ``dense`` into ``layer``, with its parameters, parametrisations, hooks and attributes.

    The object stays the same, so that every reference to it in the model remains valid.
    """
    for name in _parameter_names(dense):
        if parametrize.is_parametrized(dense, name):
            parametrize.register_parametrization(layer, name, nn.Identity())
            layer.get_submodule("parametrizations").add_module(name, dense.get_submodule(f"parametrizations.{name}"))
        else:
            layer.register_parameter(name, dense._parameters[name])
    layer.train(dense.training)
    kept = {key: value for key, value in vars(dense).items() if "hook" in key or not key.startswith("_")}
    dense.__class__ = layer.__class__
    dense.__dict__ = kept | vars(layer) | {key: value for key, value in kept.items() if "hook" in key}
