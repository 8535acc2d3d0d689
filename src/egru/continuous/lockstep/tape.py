"""The record of the iterations of a forward pass that the backward pass needs."""

import dataclasses

from torch import Tensor

Rows = tuple[Tensor, Tensor]
"""Samples, and for each of them the index of its input event or readout."""


@dataclasses.dataclass
class Emissions:
    """One internal event in each of some samples.

    Attributes:
        rows: The samples.
        units: The unit that emits.
        times: The times of the events.
        a_group: ``a`` before the group of simultaneous events that each belongs to, ``(rows, 3, H)``.
        first: Whether the event is the first of its group.
        forced: Whether the unit started above its threshold, so that the time is fixed.
        positions: Positions in the list of all events, set at the end of the forward pass.
    """

    rows: Tensor
    units: Tensor
    times: Tensor
    a_group: Tensor
    first: Tensor
    forced: Tensor
    positions: Tensor


@dataclasses.dataclass
class Deliveries:
    """One delayed event in each of some samples that reaches the receivers of a line.

    Attributes:
        rows: The samples.
        lines: The lines.
        events: Which event of its sample each of them is.
        gate: ``a_r`` of the reset gates that scale the jump: ``(rows, 1)``, or one per receiver, ``(rows, H)``.
    """

    rows: Tensor
    lines: Tensor
    events: Tensor
    gate: Tensor


@dataclasses.dataclass
class Iteration:
    """The state of all samples at the start of an iteration, how far each flows, and what happens then.

    Attributes:
        a: Activations ``(B, 3, H)`` at the start. ``c`` and ``o``, ``(B, H)``, likewise.
        t: The time of each sample at the start ``(B,)``, float64.
        dt: How far each sample flows ``(B,)``, 0 for some.
        rests: Which samples are at rest ``(B,)``: all their gates are constant, and ``dt`` may be longer than a panel.
        internal: Internal events after the flow.
        delivery: Delayed events that arrive after the flow.
        input: Input events after the flow.
        readout: Readouts after the flow.
    """

    a: Tensor
    c: Tensor
    o: Tensor
    t: Tensor
    dt: Tensor
    rests: Tensor
    internal: Emissions | None = None
    delivery: Deliveries | None = None
    input: Rows | None = None
    readout: Rows | None = None


@dataclasses.dataclass
class Tape:
    """All iterations, and the state after the last one."""

    iterations: list[Iteration]
    a: Tensor
    c: Tensor
    o: Tensor
