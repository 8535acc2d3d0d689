"""The compiled runner behind :class:`egru.EventEngine`, and the interface it shares with the reference runner."""

from typing import Protocol

import torch
from torch import Tensor

from egru import compiled
from egru.events import EventState
from egru.runtime.inputs import Array
from egru.runtime.network import Network
from egru.types import WeightFormat


class Runner(Protocol):
    """Computes steps and stores the state.

    Arguments are already checked: ``x`` is ``(T, N, I)`` float32, ``ids`` is ``(T, N)`` int64 (one of the two is None),
    and ``out`` is ``(T, N, O)``, or ``(N, O)`` if only the last step is requested.
    """

    def run(self, x: Array | None, ids: Array | None, last: bool, out: Array) -> None: ...
    def step_sparse(self, index: Array, value: Array, out: Array) -> None: ...
    def reset(self) -> None: ...
    def reset_counters(self) -> None: ...
    def counters(self) -> tuple[int, int, list[int]]:
        """Return the number of steps, of multiply-adds, and of events per layer."""
        ...

    def get_state(self, layer: int) -> EventState: ...
    def set_state(self, layer: int, c: Tensor, y: Tensor) -> None: ...
    def get_trace(self) -> Tensor: ...
    def set_trace(self, trace: Tensor) -> None: ...


class CompiledRunner:
    """Runs the network in the C++ core.

    :class:`egru.EventEngine` calls ``core`` directly for the most common inputs, to save a Python call per step.
    """

    def __init__(self, network: Network, weights: WeightFormat, threads: int, streams: int, token_table: int) -> None:
        def address(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        self._network, self._streams = network, streams
        self.core = compiled.require().EngineCore(
            [
                (
                    layer.inputs,
                    layer.hidden,
                    address(layer.weight_ih),
                    address(layer.weight_hh),
                    address(layer.bias_ih),
                    address(layer.bias_hh),
                    address(layer.theta),
                    address(layer.reset_scale),
                    layer.reset,
                    layer.reset_gate == "after",
                    layer.keep,
                )
                for layer in network.layers
            ],
            weights,
            threads,
            streams,
            -1.0 if network.trace is None else network.trace,
            token_table,
        )
        if network.embedding is not None:
            self.core.set_embedding(address(network.embedding), *network.embedding.shape)
        if network.readout is not None:
            outputs, inputs = network.readout.shape
            self.core.set_readout(address(network.readout), address(network.readout_bias), inputs, outputs)

    def run(self, x: Array | None, ids: Array | None, last: bool, out: Array) -> None:
        steps = len(x) if x is not None else len(ids) if ids is not None else 0
        self.core.run(
            0 if x is None else x.ctypes.data, 0 if ids is None else ids.ctypes.data, steps, last, out.ctypes.data
        )

    def step_sparse(self, index: Array, value: Array, out: Array) -> None:
        self.core.step_sparse(index.ctypes.data, value.ctypes.data, len(index), out.ctypes.data)

    def reset(self) -> None:
        self.core.reset()

    def reset_counters(self) -> None:
        self.core.reset_counters()

    def counters(self) -> tuple[int, int, list[int]]:
        return self.core.counters()

    def get_state(self, layer: int) -> EventState:
        c = torch.empty(self._streams, self._network.layers[layer].hidden, dtype=torch.float32)
        y = torch.empty_like(c)
        self.core.get_state(layer, c.data_ptr(), y.data_ptr())
        return EventState(c, y)

    def set_state(self, layer: int, c: Tensor, y: Tensor) -> None:
        self.core.set_state(layer, c.data_ptr(), y.data_ptr())

    def get_trace(self) -> Tensor:
        trace = torch.empty(self._streams, self._network.outputs, dtype=torch.float32)
        self.core.get_trace(trace.data_ptr())
        return trace

    def set_trace(self, trace: Tensor) -> None:
        self.core.set_trace(trace.data_ptr())
