"""Replacement of the dense recurrent layers of a model by event layers that compute the same function."""

import warnings
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.utils import parametrize

from egru.compress.dense_layers import Dense, check_layer, describe, parameter_names, unsupported_layers
from egru.compress.drop_in import ConvertedGRU, ConvertedGRUCell, ConvertedLSTM, ConvertedLSTMCell
from egru.compress.references import check_references
from egru.compress.type_tests import find_type_tests
from egru.copies import copy_model
from egru.events import Surrogate
from egru.layers import EventRNN
from egru.types import Events

Model = TypeVar("Model", bound=nn.Module)
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
            method of a layer or a function that refers to one of its modules, or if it cannot be copied.
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
            check_layer(describe(name, module), module)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Dense)]
    if not layers:
        raise ValueError(f"convert: {_describe_missing(model)}")
    check_references(model)
    for test in find_type_tests(model):
        warnings.warn(
            f"convert: {test}, which does not recognise event layers; check that it takes the same branch", stacklevel=2
        )
    if dense := [describe(name, model.get_submodule(name)) for name in unsupported_layers(model)]:
        stay = "stays" if len(dense) == 1 else "stay"
        warnings.warn(f"convert: {', '.join(dense)} cannot be converted and {stay} dense", stacklevel=2)
    orders = {module.batch_first: name for name, module in layers if isinstance(module, nn.RNNBase)}
    if len(orders) > 1:
        warnings.warn(
            f"convert: {orders[True]} has batch_first=True and {orders[False]} has batch_first=False; the copy keeps "
            "both, check that the model transposes between them",
            stacklevel=2,
        )
    converted = copy_model(model, "convert")
    for module in list(converted.modules()):
        if isinstance(module, Dense):
            _become(module, _build_layer(module, events, surrogate))
    return converted


def _describe_missing(model: nn.Module) -> str:
    found = "torch.nn.GRU, GRUCell, LSTM or LSTMCell"
    if any(isinstance(module, EventRNN) for module in model.modules()):
        return f"{type(model).__name__} has event layers already and no {found}"
    others = sorted(set(unsupported_layers(model).values()))
    if any(isinstance(module, ScriptModule) for module in model.modules()):
        others = ", ".join(others) or "TorchScript"
        return f"{type(model).__name__} has no {found}; {others} cannot be converted; convert the original module"
    if others:
        return f"{type(model).__name__} has no {found}; {', '.join(others)} cannot be converted"
    return f"{type(model).__name__} has no {found}"


def _build_layer(dense: Dense, events: Events, surrogate: Surrogate | None) -> EventRNN:
    """Return an event layer of the same size that computes the function of ``dense`` if it has the same weights."""
    weight: Tensor = getattr(dense, parameter_names(dense)[0])
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
    for name in parameter_names(dense):
        if parametrize.is_parametrized(dense, name):
            parametrize.register_parametrization(layer, name, nn.Identity())
            layer.get_submodule("parametrizations").add_module(name, dense.get_submodule(f"parametrizations.{name}"))
        else:
            layer.register_parameter(name, dense._parameters[name])
    layer.train(dense.training)
    kept = {key: value for key, value in vars(dense).items() if "hook" in key or not key.startswith("_")}
    dense.__class__ = layer.__class__
    dense.__dict__ = kept | vars(layer) | {key: value for key, value in kept.items() if "hook" in key}
