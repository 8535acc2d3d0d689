"""Measure how far the outputs of a quantised engine are from those of a float32 engine."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from egru.runtime.engine import EventEngine
from egru.runtime.inputs import Array


class Agreement(NamedTuple):
    """Agreement of two engines on the same sequences.

    Attributes:
        events: Fraction of units and steps in which both outputs are zero or both are not. Outputs of a readout are
            rarely zero; use ``choices`` for those.
        choices: Fraction of steps with the same largest output: the decision of a classifier or language model.
        error: Root mean square of the difference, relative to the root mean square of the other engine's output.
        steps: Number of steps compared.
    """

    events: float
    choices: float
    error: float
    steps: int


def compare(
    engine: EventEngine, other: EventEngine, sequences: Iterable[Tensor | Array | list[int]], *, last: bool = False
) -> Agreement:
    """Run two engines over the same sequences, starting each from a zero state, and compare their outputs.

    Args:
        engine: The engine to assess, such as one with int8 weights.
        other: The engine to compare it with.
        sequences: Inputs for :meth:`EventEngine.run`.
        last: If True, compare only the last step of each sequence.

    Raises:
        ValueError: If the engines differ in output size or number of streams, or ``sequences`` is empty.

    Example:
        >>> layer = egru.EGRU(8, 64)
        >>> int8, float32 = egru.EventEngine(layer, "int8"), egru.EventEngine(layer)
        >>> agreement = compare(int8, float32, [torch.randn(100, 8)])
        >>> agreement.steps
        100
    """
    if engine.output_size != other.output_size or engine.streams != other.streams:
        raise ValueError(f"compare: both engines must have the same output size and streams, got {engine!r}, {other!r}")
    same_events = same_choices = squared_difference = squared_output = 0.0
    elements = steps = 0
    for sequence in sequences:
        outputs: list[Tensor] = []
        for contestant in (engine, other):
            contestant.reset()
            output = torch.as_tensor(contestant.run(sequence, last=last))
            outputs.append(output.reshape(-1, contestant.output_size).double())
        y, y_other = outputs
        same_events += float(((y != 0) == (y_other != 0)).sum())
        same_choices += float((y.argmax(1) == y_other.argmax(1)).sum())
        squared_difference += float((y - y_other).square().sum())
        squared_output += float(y_other.square().sum())
        elements += y.numel()
        steps += len(y)
    if steps == 0:
        raise ValueError("compare: sequences must contain at least one sequence, got none")
    if squared_output > 0:
        error = (squared_difference / squared_output) ** 0.5
    else:
        error = 0.0 if squared_difference == 0 else float("inf")
    return Agreement(same_events / elements, same_choices / steps, error, steps)
