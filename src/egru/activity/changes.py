"""Inputs that arrive as changes: what a layer receives that reads the output of a layer with ``events="delta"``."""

import torch
from torch import Tensor

from egru.layers import EventRNN, Record


class Changes:
    """The last output of each delta layer, and the number of events of each unit in it.

    A layer that reads such an output accumulates the changes: it does work for every event below it, not for every
    non-zero entry of its input. It is recognised by its memory, so an operation between the two layers that computes
    new values ends the chain.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[EventRNN, str], tuple[Tensor, Tensor]] = {}

    def add(self, record: Record, events: Tensor) -> None:
        """Remember the output of a direction, with the number of events of each unit."""
        if record.layer.events == "delta":
            self._outputs[record.layer, record.direction.name] = (record.y.detach(), events)

    def received(self, record: Record) -> Tensor | None:
        """Return the number of changes of each input of a record, or None if they are not known."""
        layer, below = record.layer, record.direction.layer - 1
        if below >= 0 and layer.events == "delta":
            names = [direction.name for direction in layer.directions() if direction.layer == below]
            return torch.cat([self._outputs[layer, name][1] for name in names])
        return self.find(record.input)

    def find(self, x: Tensor) -> Tensor | None:
        """Return the number of events of each feature of ``x`` if it is the output of a delta layer, else None."""
        if not self._outputs or torch.compiler.is_compiling():
            return None
        for y, events in self._outputs.values():
            if x.numel() == y.numel() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
                return events
        return None

    def clear(self) -> None:
        """Forget all outputs."""
        self._outputs.clear()
