"""How far a quantised engine is from the network it came from, on given sequences."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egru.runtime.engine import EventEngine


class Agreement(NamedTuple):
    """Outputs of two engines on the same sequences.

    ``events``: share of units and steps where both are active or both silent (1.0 behind a readout too, where outputs
    are rarely zero: read ``choices`` there). ``choices``: share of steps with the same largest output, the decision of
    a classifier or language model. ``error``: root mean square difference over the root mean square output.
    """

    events: float
    choices: float
    error: float
    steps: int


def compare(engine: EventEngine, other: EventEngine, sequences: Iterable[Any], *, last: bool = False) -> Agreement:
    """Run both engines over every sequence from rest; ``last`` looks at the final step only."""
    if engine.output_size != other.output_size or engine.streams != other.streams:
        raise ValueError(f"compare: engines differ in shape: {engine!r} and {other!r}")
    same_events = same_choices = difference = size = 0.0
    elements = steps = 0
    for sequence in sequences:
        outputs: list[Tensor] = []
        for each in (engine, other):
            each.reset()
            outputs.append(torch.as_tensor(each.run(sequence, last=last)).reshape(-1, each.output_size).double())
        ours, theirs = outputs
        same_events += float(((ours != 0) == (theirs != 0)).sum())
        same_choices += float((ours.argmax(1) == theirs.argmax(1)).sum())
        difference += float((ours - theirs).square().sum())
        size += float(theirs.square().sum())
        elements += ours.numel()
        steps += len(ours)
    if steps == 0:
        raise ValueError("compare: sequences is empty; at least one is needed")
    error = (difference / size) ** 0.5 if size > 0 else (0.0 if difference == 0 else float("inf"))
    return Agreement(same_events / elements, same_choices / steps, error, steps)
