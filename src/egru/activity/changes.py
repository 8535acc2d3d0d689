"""Inputs that arrive as changes: what a layer receives that reads the output of a layer with ``events="delta"``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from egru.layers import EventRNN, Record


class Changes:
    """The last output of each delta layer, and the number of events of each unit in it.

    A layer that reads such an output accumulates the changes: it does work for every event below it, not for every
    non-zero entry of its input. It is recognised by its memory, so an operation between the two layers that computes
    new values ends the chain.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[EventRNN, str], tuple[Tensor, Tensor]] = {}
        self._received: dict[EventRNN, Tensor] = {}

    def follow(self, layer: EventRNN) -> list[Callable[[], None]]:
        """Follow packed sequences into a layer, and what it makes of its directions, and return what ends this.

        A packed input is padded by the layer, and the outputs of two directions are joined: both are new memory.
        """
        hooks = [
            layer.register_forward_pre_hook(self._before, with_kwargs=True),
            layer.register_forward_hook(self._after),
        ]
        return [hook.remove for hook in hooks]

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(layer, EventRNN)
        x = args[0] if args else kwargs.get("input")
        changes = self.find(x.data) if isinstance(x, PackedSequence) else None
        self._received.pop(layer, None)
        if changes is not None:
            self._received[layer] = changes

    def _after(self, layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        assert isinstance(layer, EventRNN)
        if layer.events != "delta" or not isinstance(result, tuple):
            return
        output = result[0].data if isinstance(result[0], PackedSequence) else result[0]
        last = [direction.name for direction in layer.directions() if direction.layer == layer.num_layers - 1]
        if isinstance(output, Tensor) and all((layer, name) in self._outputs for name in last):
            self._outputs[layer, ""] = output.detach(), torch.cat([self._outputs[layer, name][1] for name in last])

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
        changes = self._received.get(layer)
        return self.find(record.input) if changes is None else changes

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
        self._received.clear()
