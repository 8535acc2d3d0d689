"""Without the units that speak least: the paper's activity pruning."""

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
    """A copy of ``model`` without the least active units of its layers.

    What is left computes as if the others were silent: nothing changes where units go that never spoke.

    Args:
        model: an :class:`egru.models.SequenceClassifier` or :class:`egru.models.LanguageModel` of event layers.
        activity: of this model, on data to judge by: ``ActivityMonitor.summary()``.
        share: of a layer's units that go, in [0, 1), for all layers or one a layer. None: those that never spoke.

    A decoder with the embedding's weights needs all units of the last layer: that is left as it is unless ``share``
    names one for every layer, and then the decoder gets weights of its own.
    """
    if not isinstance(model, RecurrentStack) or not all(isinstance(layer, EventRNN) for layer in model.layers):
        raise TypeError(f"prune: needs a model of event layers from egru.models, got {type(model).__name__}")
    rates = {layer.name: layer.unit_activity for layer in activity.layers}
    names = [f"layer{i}" for i in range(model.num_layers)]
    if [len(rates.get(name, ())) for name in names] != [layer.hidden_size for layer in model.layers]:
        raise ValueError("prune: activity is not of this model; watch it with an ActivityMonitor and pass its summary")
    shares = list(share) if isinstance(share, Sequence) else [share] * len(names)
    if len(shares) != len(names) or not all(each is None or 0 <= each < 1 for each in shares):
        raise ValueError(f"prune: share must be in [0, 1), one or {len(names)} of them, got {share!r}")
    readout = model.get_submodule("readout")
    assert isinstance(readout, nn.Linear)
    if (
        not isinstance(share, Sequence)
        and isinstance(model, LanguageModel)
        and readout.weight is model.embedding.weight
    ):
        shares[-1] = 0.0
    small, read = copy.deepcopy(model), None
    for name, layer, each in zip(names, model.layers, shares, strict=True):
        assert isinstance(layer, EventRNN)
        stays = _most_active(torch.tensor(rates[name]), each)
        small.add_module(name, layer.select(stays, read))
        read = stays
    assert read is not None
    if len(read) < readout.in_features:
        smaller = _columns(readout, read)
        if isinstance(norm := getattr(model, "normalise", None), nn.BatchNorm1d):
            small.add_module("normalise", _features(norm, read))
            gone = torch.ones(readout.in_features, dtype=torch.bool).index_fill(0, read, False)
            at_rest = copy.deepcopy(norm).eval()(torch.zeros_like(readout.weight[:1]))  # what the readout made of them
            smaller.bias += readout.weight[:, gone] @ at_rest[0, gone]
        small.add_module("readout", smaller)
    return small


def _most_active(rates: Tensor, share: float | None) -> Tensor:
    """Numbers of the units that stay, in order; one stays in any case."""
    silent = int((rates == 0).sum()) if share is None else round(share * len(rates))
    return rates.argsort(stable=True)[min(silent, len(rates) - 1) :].sort().values


def _columns(linear: nn.Linear, features: Tensor) -> nn.Linear:
    weight, small = linear.weight.detach()[:, features.to(linear.weight.device)], copy.deepcopy(linear)
    small.in_features, small.weight = len(features), nn.Parameter(weight.clone())
    return small


def _features(norm: nn.BatchNorm1d, features: Tensor) -> nn.BatchNorm1d:
    small = copy.deepcopy(norm)
    small.num_features = len(features)
    for name, value in (*norm.named_parameters(), *norm.named_buffers()):
        if value.dim():
            part = value.detach()[features.to(value.device)].clone()
            setattr(small, name, nn.Parameter(part) if isinstance(value, nn.Parameter) else part)
    return small
