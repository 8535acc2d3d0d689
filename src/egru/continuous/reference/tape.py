"""The record of a forward pass that the backward pass needs."""

import dataclasses
from typing import Literal

import numpy as np

StepKind = Literal["internal", "delivery", "input", "readout", "end"]


@dataclasses.dataclass
class Step:
    """One internal event, input event or readout, or the end of the run, with the state before and after it.

    Attributes:
        kind: What happened.
        index: The unit of an internal event, the line of a delivered one, the position of an input event in the batch,
            or the readout.
        time: When it happened.
        a_minus: ``a`` just before. ``c_minus`` and ``o_minus`` likewise.
        a_plus: ``a`` just after. ``c_plus`` and ``o_plus`` likewise.
        a_group: ``a`` before the group of simultaneous internal events that this one belongs to. For a delivered event,
            that of its emission; with ``reset_side="post"``, ``a`` before the delivery.
        first: Whether an internal event is the first of its group.
        forced: Whether the unit started above its threshold, so that the time of the event is fixed.
        event: Which event of the sample it is, for internal and delivered events.
    """

    kind: StepKind
    index: int
    time: float
    a_minus: np.ndarray
    c_minus: np.ndarray
    o_minus: np.ndarray
    a_plus: np.ndarray
    c_plus: np.ndarray
    o_plus: np.ndarray
    a_group: np.ndarray | None = None
    first: bool = True
    forced: bool = False
    event: int = -1


Tape = list[list[Step]]
"""The steps of each sample, in the order they happened."""
