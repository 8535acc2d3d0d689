"""Conversion between event layers and the dense layers of torch."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from egru._warn import warn_user
from egru.events import Surrogate
from egru.layers.stack import EventRNN
from egru.layers.threshold import BELOW_ALL_STATES, Threshold
from egru.types import Events

Layer = TypeVar("Layer", bound=EventRNN)
Dense = TypeVar("Dense", bound=nn.RNNBase)

_SHARED = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")


def from_dense(
    cls: type[Layer], dense: nn.RNNBase, expected: type[nn.RNNBase], defaults: Mapping[str, Any], options: Any
) -> Layer:
    """Build an event layer with a copy of a dense layer's weights, in the same mode (training or evaluation).

    Args:
        cls: Class of the event layer.
        dense: The dense layer.
        expected: Class that ``dense`` must have.
        defaults: Arguments with which the event layer computes the function of the dense layer.
        options: Arguments of the caller, which take precedence.

    Raises:
        TypeError: If ``dense`` is not an instance of ``expected``.
        ValueError: If ``dense`` has projections (``proj_size``).
    """
    method = f"{cls.__name__}.from_{expected.__name__.lower()}"
    if not isinstance(dense, expected):
        raise TypeError(f"{method}: expected a torch.nn.{expected.__name__}, got {type(dense).__name__}")
    if dense.proj_size:
        raise ValueError(f"{method}: projections are not supported, got proj_size={dense.proj_size}")
    weight = getattr(dense, "weight_hh_l0")  # noqa: B009  (typed as a tensor or a module)
    arguments = {name: getattr(dense, name) for name in _SHARED}
    arguments |= {"device": weight.device, "dtype": weight.dtype, "dropout_mode": "plain", **defaults}
    layer = cls(**arguments | options)
    layer.load_state_dict(dense.state_dict())
    layer.train(dense.training)
    return layer


def warn_differences(layer: EventRNN, expected: type[nn.RNNBase], fits: Mapping[str, bool]) -> None:
    """Warn if options of a converted layer make its outputs differ from those of the dense layer.

    Args:
        layer: The converted layer.
        expected: Class of the dense layer.
        fits: Per option, as an attribute of the layer, whether it keeps the function.
    """
    changed = [f"{name.removesuffix('_config')}={getattr(layer, name)!r}" for name, same in fits.items() if not same]
    if changed:
        name = expected.__name__
        warn_user(
            f"{type(layer).__name__}.from_{name.lower()}: with {', '.join(changed)} the layer does not compute the "
            f"function of the {name}; train it again, or omit these options"
        )


def always_active(events: Events) -> dict[str, Any]:
    """Return the arguments of an event layer with which every unit emits an event at every step."""
    if events == "positive":
        return {"threshold": Threshold.constant(BELOW_ALL_STATES)}
    # "abs": thresholds that are trained later stay above 0. bounded: gradients are those of the dense layer, too.
    return {"threshold": Threshold("abs", mean=0.0, std=0.0, trainable=False), "surrogate": Surrogate(bounded=True)}


def is_always_active(layer: EventRNN, bound: float) -> bool:
    """Return whether every unit of a new layer with states above ``bound`` emits an event at every step."""
    theta = layer.threshold_config.initial_value()
    return theta is not None and (theta < bound if layer.events == "positive" else theta == 0)


def to_dense(layer: EventRNN, expected: type[Dense]) -> Dense:
    """Return a dense layer with a copy of an event layer's weights, masked or parametrised as they are used."""
    weight = layer.all_weights[0][1]
    arguments = {name: getattr(layer, name) for name in _SHARED}
    dense = expected(**arguments, device=weight.device, dtype=weight.dtype)
    dense.load_state_dict({name: getattr(layer, name).detach() for name in dense.state_dict()})
    return dense
