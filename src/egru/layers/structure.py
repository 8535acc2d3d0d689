"""Descriptions of an event layer: its directions, their weights, and the record of a forward pass."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from egru.events import Surrogate

if TYPE_CHECKING:
    from egru.layers.stack import EventRNN


@dataclasses.dataclass(frozen=True)
class Direction:
    """One layer of a stack in one direction.

    Attributes:
        name: ``"l0"``, ``"l0_reverse"``, ``"l1"``, …; ``"cell"`` for a cell.
        index: Position in the order of execution, which is the first dimension of a state.
        layer: Number of the layer in the stack, starting at 0.
        reverse: Whether the layer reads its input backwards in time.
        input_size: Number of input features.
        suffix: Ending of the parameter names, such as ``"_l0"`` in ``weight_ih_l0``; empty for a cell.
    """

    name: str
    index: int
    layer: int
    reverse: bool
    input_size: int
    suffix: str


class Weights(NamedTuple):
    """Effective parameters of one direction.

    Attributes:
        ih: Input weights, ``(gates * H, input_size)``.
        hh: Recurrent weights, ``(gates * H, H)``.
        bias_ih: Input bias, ``(gates * H,)``, or None.
        bias_hh: Recurrent bias, ``(gates * H,)``, or None.
        theta: Constrained thresholds, ``(H,)``.
        reset_scale: Scale of the reset, 0-dim or ``(H,)``.
    """

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    theta: Tensor
    reset_scale: Tensor


class Record(NamedTuple):
    """One forward pass of one direction.

    Tensors are time first, in input order, with padding at the end, and remain part of the autograd graph.

    Attributes:
        label: Unique name of the direction in its model; see :func:`egru.layers.event_directions`.
        layer: The layer that ran.
        direction: The direction that ran.
        input: Input, ``(T, B, input_size)``.
        y: Output, ``(T, B, H)``.
        c: State before the reset "threshold", or output with ``ELSTM(compare="output")``, ``(T, B, H)``.
        seen: Value that was compared with the threshold, ``(T, B, H)``: ``c``, or with ``events="delta"`` its
            difference from the previous output. On padded steps it has no meaning.
        theta: Thresholds, ``(H,)``.
        surrogate: Surrogate gradient of the layer.
        lengths: Number of valid steps per sequence, ``(B,)``, or None if no sequence is padded.
    """

    label: str
    layer: "EventRNN"
    direction: Direction
    input: Tensor
    y: Tensor
    c: Tensor
    seen: Tensor
    theta: Tensor
    surrogate: Surrogate
    lengths: Tensor | None

    def magnitude(self) -> Tensor:
        """Return what has to exceed the threshold for an event: ``seen``, or ``|seen|`` unless events are positive."""
        return self.seen if self.layer.events == "positive" else self.seen.abs()

    def events(self) -> Tensor:
        """Return where there is an event, ``(T, B, H)``, bool; padded steps have none."""
        events = self.magnitude() > self.theta
        if self.lengths is None:
            return events
        return events & (torch.arange(len(events), device=events.device)[:, None] < self.lengths)[..., None]

    def sent(self) -> Tensor:
        """Return what was communicated, ``(T, B, H)``: the output, or with ``events="delta"`` its changes."""
        return self.seen * self.events() if self.layer.events == "delta" else self.y


Observer = Callable[[Record], None]


def direction_name(layer: int, reverse: bool) -> str:
    """Return the name of a direction: ``"l0"``, ``"l0_reverse"``, …."""
    return f"l{layer}_reverse" if reverse else f"l{layer}"


def class_label(module: nn.Module) -> str:
    """Return the name of a module's class in lower case. For a pruned layer, this is its class before pruning."""
    cls = type(module)
    if parametrize.is_parametrized(module):  # torch derives a class for each such module
        cls = cls.__bases__[0]
    return cls.__name__.lower()


def direction_label(label: str, name: str, count: int) -> str:
    """Return the label of direction ``name`` in a layer with this label and ``count`` directions."""
    return f"{label}.{name}" if count > 1 else label
