"""Removal of the least active units: the paper's activity pruning."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from egru.activity.summary import ActivitySummary
from egru.compress.readers import Readers, find_readers
from egru.copies import copy_model
from egru.layers import EventRNN, event_layers
from egru.models.language import LanguageModel
from egru.models.stack import RecurrentStack

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def prune(model: Model, activity: ActivitySummary, share: float | Sequence[float] | None = None) -> Model:
    """Return a copy of a model without the least active units of its layers.

    The copy computes what the model computes if the removed units emit no events. Removing units that never emitted an
    event does not change the outputs.

    In a language model of :mod:`egru.models` whose decoder shares the embedding's weights, the decoder requires all
    units of the last layer, so that layer is not pruned. If ``share`` has a value per layer, it is pruned, and the
    decoder gets separate weights.

    The modules that read the outputs of a layer get smaller as well. They are found by tracing ``forward`` with
    ``torch.fx`` and must be linear layers, batch normalisations in front of one, or other event layers.

    Args:
        model: Any model with event layers of one layer and direction each, such as a result of :func:`egru.convert`, or
            a model of :mod:`egru.models`.
        activity: Summary of an :class:`egru.ActivityMonitor` of this model, on representative data.
        share: Fraction of each layer's units to remove, in [0, 1): one number, or one per layer. If None, remove the
            units without any event.

    Returns:
        The smaller model. At least one unit per layer remains.

    Raises:
        TypeError: If the model has no event layer or cannot be traced, or ``activity`` is not a summary.
        ValueError: If ``activity`` is of another model, ``share`` is out of range, or units of a layer cannot be
            removed, for example because the model returns their outputs. A share of 0 keeps such a layer.

    Example:
        >>> import torch, egru
        >>> model = egru.models.SequenceClassifier(3, 16, 5)
        >>> with egru.ActivityMonitor(model) as monitor:
        ...     _ = model(torch.randn(2, 20, 3))
        >>> smaller = egru.compress.prune(model, monitor.summary(), share=0.25)
        >>> smaller.layers[0].hidden_size
        12
    """
    if not any(event_layers(model)):
        raise TypeError(f"prune: the model must have an event layer, got {type(model).__name__}")
    if not isinstance(activity, ActivitySummary):
        raise TypeError(
            "prune: activity must be the summary of an ActivityMonitor, monitor.summary(), got "
            f"{type(activity).__name__}"
        )
    if isinstance(model, RecurrentStack):
        return _prune_stack(model, activity, share)
    if isinstance(model, EventRNN):
        raise ValueError("prune: the model is a layer and returns its outputs; model.select(units) removes units")
    readers = find_readers(model, "prune")
    if missing := [name for name, _ in event_layers(model) if name not in readers]:
        raise ValueError(f"prune: {', '.join(missing)} is not used in {type(model).__name__}.forward; remove it")
    kept: dict[str, Tensor] = {}  # units of the layers that get smaller
    smaller = copy_model(model, "prune")
    for (name, use), value in zip(readers.items(), _shares(share, len(readers)), strict=True):
        layer = model.get_submodule(name)
        assert isinstance(layer, EventRNN)
        units = torch.arange(layer.hidden_size)
        if value != 0:
            _check_removal(model, use)
            units = _most_active(_rates(activity, name, layer), value)
        inputs = kept.get(use.source or "")
        if len(units) < layer.hidden_size:
            kept[name] = units
            for linear, norms in use.linears.items():
                _shrink_readout(model, smaller, linear, norms, units)
        if name in kept or inputs is not None:
            smaller.set_submodule(name, layer.select(units, inputs))
    return smaller


def _shares(share: float | Sequence[float] | None, layers: int) -> list[float | None]:
    shares: list[float | None] = list(share) if isinstance(share, Sequence) else [share] * layers
    if len(shares) != layers or not all(value is None or 0 <= value < 1 for value in shares):
        raise ValueError(f"prune: share must be one number in [0, 1) or {layers} of them, got {share!r}")
    return shares


def _rates(activity: ActivitySummary, name: str, layer: EventRNN) -> Tensor:
    """Return the activity of every unit of a layer."""
    rates = next((found.unit_activity for found in activity.layers if found.name == name), ())
    if len(rates) != layer.hidden_size:
        raise ValueError(
            "prune: activity does not fit this model; run the model in an ActivityMonitor and pass its summary"
        )
    return torch.tensor(rates)


def _check_removal(model: nn.Module, use: Readers) -> None:
    """Raise an error if units of a layer cannot be removed."""
    obstacle = use.obstacle
    if parametrize.is_parametrized(model.get_submodule(use.layer)):
        obstacle = f"the weights of {use.layer} are parametrised (WeightPruning.remove() removes masks)"
    parameters = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name in (use.layer, *use.linears):
        if any(parameters.count(id(p)) > 1 for p in model.get_submodule(name).parameters()):
            obstacle = obstacle or f"{name} shares parameters with another module"
    if obstacle is not None:
        raise ValueError(f"prune: units of {use.layer} cannot be removed: {obstacle}; a share of 0 keeps the layer")


def _shrink_readout(model: nn.Module, smaller: nn.Module, name: str, norms: Sequence[str], units: Tensor) -> None:
    """Remove inputs of a linear layer, and features of the batch normalisations in front of it."""
    readout = model.get_submodule(name)
    assert isinstance(readout, nn.Linear)
    narrow = _select_inputs(readout, units)
    if norms:
        # Normalisation maps the zeros of removed units to constants. Move these into the bias.
        constants = torch.zeros_like(readout.weight[:1])
        for norm in map(model.get_submodule, norms):
            constants = copy.deepcopy(norm).eval()(constants)
        removed = torch.ones(readout.in_features, dtype=torch.bool).index_fill(0, units, False)
        offset = readout.weight[:, removed] @ constants[0, removed]
        narrow.bias = nn.Parameter(offset if readout.bias is None else readout.bias + offset)
        for norm in norms:
            original = model.get_submodule(norm)
            assert isinstance(original, nn.BatchNorm1d)
            smaller.set_submodule(norm, _select_features(original, units))
    smaller.set_submodule(name, narrow)


def _prune_stack(model: Any, activity: ActivitySummary, share: float | Sequence[float] | None) -> Any:
    """Prune a model of :mod:`egru.models`."""
    layers: list[Any] = model.layers
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        raise ValueError("prune: the model has parametrised weights; WeightPruning.remove() removes masks")
    names = [f"layer{i}" for i in range(len(layers))]
    shares = _shares(share, len(names))
    rates = {name: _rates(activity, name, layer) for name, layer in zip(names, layers, strict=True)}
    readout = model.readout
    tied = isinstance(model, LanguageModel) and readout.weight is model.embedding.weight
    if tied and not isinstance(share, Sequence):
        shares[-1] = 0.0
    smaller, inputs = copy.deepcopy(model), None
    for name, layer, value in zip(names, layers, shares, strict=True):
        units = _most_active(rates[name], value)
        smaller.add_module(name, layer.select(units, inputs))
        inputs = units
    assert inputs is not None
    if len(inputs) < readout.in_features:
        norm = ("normalise",) if isinstance(getattr(model, "normalise", None), nn.BatchNorm1d) else ()
        _shrink_readout(model, smaller, "readout", norm, inputs)
    return smaller


def _most_active(rates: Tensor, share: float | None) -> Tensor:
    """Return the sorted indices of the units to keep, at least one."""
    removed = int((rates == 0).sum()) if share is None else round(share * len(rates))
    return rates.argsort(stable=True)[min(removed, len(rates) - 1) :].sort().values


def _select_inputs(linear: nn.Linear, features: Tensor) -> nn.Linear:
    """Return a copy of a linear layer with a subset of its inputs."""
    smaller = copy.deepcopy(linear)
    weight = linear.weight.detach()[:, features.to(linear.weight.device)]
    smaller.in_features, smaller.weight = len(features), nn.Parameter(weight.clone())
    return smaller


def _select_features(norm: nn.BatchNorm1d, features: Tensor) -> nn.BatchNorm1d:
    """Return a copy of a batch normalisation with a subset of its features."""
    smaller = copy.deepcopy(norm)
    smaller.num_features = len(features)
    for name, value in (*norm.named_parameters(), *norm.named_buffers()):
        if value.dim():
            selected = value.detach()[features.to(value.device)].clone()
            setattr(smaller, name, nn.Parameter(selected) if isinstance(value, nn.Parameter) else selected)
    return smaller
