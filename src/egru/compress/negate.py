"""Negation of units: another form of the same network, with fewer positive states."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from egru.compress.batches import evaluation
from egru.layers import Record, event_layers
from egru.models.language import LanguageModel
from egru.models.stack import RecurrentStack


@torch.no_grad()
def negate_units(model: RecurrentStack, units: Sequence[Tensor]) -> None:
    """Negate states and outputs of some units, in place. The model computes the same function.

    A state of a GRU or LSTM changes its sign with the weights of its candidate, if all weights that read the output
    change their sign as well. This holds while every unit emits an event at every step, as after
    :func:`egru.convert`.

    Args:
        model: A classifier or language model of :mod:`egru.models` with cell ``egru``, ``elstm``, ``gru`` or ``lstm``.
        units: Mask of the units to negate, ``(H,)`` per layer.
    """
    signs = [1 - 2 * mask.to(next(model.parameters()).dtype) for mask in units]
    for layer, sign in zip(model.layers, signs, strict=True):
        H = len(sign)
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            candidate = layer.get_parameter(name)[2 * H : 3 * H]  # the same rows in torch's GRU and LSTM
            candidate.mul_(sign.view(-1, *[1] * (candidate.dim() - 1)))
        layer.get_parameter("weight_hh_l0").mul_(sign)
    for layer, sign in zip(model.layers[1:], signs, strict=False):
        layer.get_parameter("weight_ih_l0").mul_(sign)
    readout: Tensor = model.get_parameter("readout.weight")
    norm = getattr(model, "normalise", None)
    if isinstance(norm, nn.BatchNorm1d):
        assert norm.running_mean is not None
        norm.running_mean.mul_(signs[-1])
        norm.weight.mul_(signs[-1])
        return
    readout.mul_(signs[-1])
    if isinstance(model, LanguageModel) and readout is model.embedding.weight:
        model.layers[0].get_parameter("weight_ih_l0").mul_(signs[-1])


def negate_positive_units(model: RecurrentStack, run: Callable[[], object]) -> int:
    """Negate the units whose states are positive at most steps, in place.

    With positive events and thresholds near zero, a unit sends an event at every step with a positive state. After
    this call, these are fewer than half of the steps of every unit.

    Args:
        model: A converted classifier or language model, see :func:`negate_units`.
        run: Runs the model on representative data.

    Returns:
        The number of units that were negated.
    """
    layers = [layer for _, layer in event_layers(model)]
    shares: dict[int, list[Tensor]] = {id(layer): [] for layer in layers}

    def observe(record: Record) -> None:
        shares[id(record.layer)].append((record.c > 0).float().mean((0, 1)))

    removers = [layer.observe(observe) for layer in layers]
    try:
        with evaluation(model):
            run()
    finally:
        for remove in removers:
            remove()
    units = [torch.stack(shares[id(layer)]).mean(0) > 0.5 for layer in layers]
    negate_units(model, units)
    return int(sum(mask.sum().item() for mask in units))
