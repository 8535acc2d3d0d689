"""Removal of the least active units: the paper's activity pruning."""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from egru.activity.summary import ActivitySummary
from egru.layers import EventRNN
from egru.models.language import LanguageModel
from egru.models.stack import RecurrentStack

Model = TypeVar("Model", bound=RecurrentStack)


@torch.no_grad()
def prune(model: Model, activity: ActivitySummary, share: float | Sequence[float] | None = None) -> Model:
    """Return a copy of a model without the least active units of its layers.

    The copy computes what the model computes if the removed units emit no events. Removing units that never emitted an
    event does not change the outputs.

    A decoder that shares the embedding's weights requires all units of the last layer, so that layer is not pruned.
    If ``share`` has a value per layer, it is pruned, and the decoder gets separate weights.

    Args:
        model: :class:`egru.models.SequenceClassifier` or :class:`egru.models.LanguageModel` with event layers.
        activity: Summary of an :class:`egru.ActivityMonitor` of this model, on representative data.
        share: Fraction of each layer's units to remove, in [0, 1): one number, or one per layer. If None, remove the
            units without any event.

    Returns:
        The smaller model. At least one unit per layer remains.

    Raises:
        TypeError: If the model is not a model of event layers from :mod:`egru.models`.
        ValueError: If ``activity`` is of another model, or ``share`` is out of range.

    Example:
        >>> import torch, egru
        >>> model = egru.models.SequenceClassifier(3, 16, 5)
        >>> with egru.ActivityMonitor(model) as monitor:
        ...     _ = model(torch.randn(2, 20, 3))
        >>> smaller = egru.compress.prune(model, monitor.summary(), share=0.25)
        >>> smaller.layers[0].hidden_size
        12
    """
    if not isinstance(model, RecurrentStack) or not all(isinstance(layer, EventRNN) for layer in model.layers):
        raise TypeError(f"prune: requires a model of event layers from egru.models, got {type(model).__name__}")
    rates = {layer.name: layer.unit_activity for layer in activity.layers}
    names = [f"layer{i}" for i in range(model.num_layers)]
    if [len(rates.get(name, ())) for name in names] != [layer.hidden_size for layer in model.layers]:
        raise ValueError(
            "prune: activity does not fit this model; run the model in an ActivityMonitor and pass its summary"
        )
    shares = list(share) if isinstance(share, Sequence) else [share] * len(names)
    if len(shares) != len(names) or not all(value is None or 0 <= value < 1 for value in shares):
        raise ValueError(f"prune: share must be one number in [0, 1) or {len(names)} of them, got {share!r}")
    readout = model.get_submodule("readout")
    assert isinstance(readout, nn.Linear)
    tied = isinstance(model, LanguageModel) and readout.weight is model.embedding.weight
    if tied and not isinstance(share, Sequence):
        shares[-1] = 0.0
    smaller, inputs = copy.deepcopy(model), None
    for name, layer, value in zip(names, model.layers, shares, strict=True):
        assert isinstance(layer, EventRNN)
        units = _most_active(torch.tensor(rates[name]), value)
        smaller.add_module(name, layer.select(units, inputs))
        inputs = units
    assert inputs is not None
    if len(inputs) < readout.in_features:
        smaller_readout = _select_inputs(readout, inputs)
        if isinstance(norm := getattr(model, "normalise", None), nn.BatchNorm1d):
            smaller.add_module("normalise", _select_features(norm, inputs))
            # Normalisation maps the zeros of removed units to constants. Move these into the bias.
            removed = torch.ones(readout.in_features, dtype=torch.bool).index_fill(0, inputs, False)
            constants = copy.deepcopy(norm).eval()(torch.zeros_like(readout.weight[:1]))
            smaller_readout.bias += readout.weight[:, removed] @ constants[0, removed]
        smaller.add_module("readout", smaller_readout)
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
