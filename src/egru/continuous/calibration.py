"""Initialisation of a layer for a wanted activity."""

import torch
from torch import Tensor

from egru.continuous.checks import positive_number
from egru.continuous.inputs import InputEvents
from egru.continuous.module import ContinuousEGRU
from egru.layers.checks import positive_int


@torch.no_grad()
def calibrate_activity(
    layer: ContinuousEGRU, input: InputEvents, horizon: float | Tensor, events: float, *, iterations: int = 24
) -> Tensor:
    """Shift the biases of gates u and z until every unit emits ``events`` events per sample, on average over ``input``.

    Event gradients need events. With default parameters the activity depends on the input: many units may emit none.
    Call it once, before training, with a batch of training data. Layers of a stack are calibrated first to last.

    Larger gates u and z make a unit emit more events. Both biases of a unit move by the same step towards the wanted
    number, and the step is halved whenever they pass it. The recurrent input of a unit changes with the other units, so
    the result is approximate.

    Args:
        layer: The layer to change.
        input: A representative batch.
        horizon: The end of the run, as for :meth:`ContinuousEGRU.forward`.
        events: The wanted number of events per unit and sample.
        iterations: How often the layer is run.

    Returns:
        The number of events per sample that each unit emits now, ``(H,)``. Compare it with ``events``: units cannot
        emit more than their refractory time allows.

    Raises:
        ValueError: If ``events`` is not positive, or an argument of the layer is invalid.

    Example:
        >>> reached = calibrate_activity(layer, events, horizon=4.0, events=2.0)
    """
    events = positive_number("calibrate_activity", "events", events)
    positive_int("calibrate_activity", "iterations", iterations)
    sign, start = 1.0 if layer.bias_sign == "+" else -1.0, layer.b.clone()
    gates = torch.tensor([[1.0], [0.0], [1.0]][-len(start) :]).to(start) * sign  # LIF neurons have one bias
    shift = torch.zeros_like(start[0])
    step, direction = torch.full_like(shift, 0.5), torch.zeros_like(shift)
    best, best_error = shift, torch.full_like(shift, torch.inf)

    def events_at(shift: Tensor) -> Tensor:
        layer.b.copy_(start + gates * shift)
        return layer(input, horizon).counts().to(shift).mean(0)

    for _ in range(iterations):
        reached = events_at(shift)
        error = (reached - events).abs()
        best = torch.where(error <= best_error, shift, best)
        best_error = torch.minimum(error, best_error)
        needed = torch.sign(events - reached)
        step = torch.where(needed * direction < 0, step / 2, step)
        direction = torch.where(needed == 0, direction, needed)
        shift = shift + needed * step
    return events_at(best)
