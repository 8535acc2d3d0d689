"""Who does the work behind :class:`egru.EventEngine`: the compiled core, or plain torch with the same arithmetic."""

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from egru import functional
from egru.events import EventState, Surrogate
from egru.runtime.network import Layer, Network

WEIGHTS = ("float32", "bfloat16", "int8")
FEW_INPUTS = 16
"""Input weights of a layer with no more inputs stay float32: there is nothing to gain from rounding them."""

Array = NDArray[Any]


class Runner(Protocol):
    """Arrays come in checked: ``x`` ``(T, N, I)`` float32, ``ids`` ``(T, N)`` int64, ``out`` ``([T,] N, O)``."""

    def run(self, x: Array | None, ids: Array | None, last: bool, out: Array) -> None: ...
    def step_sparse(self, index: Array, value: Array, out: Array) -> None: ...
    def reset(self) -> None: ...
    def reset_counters(self) -> None: ...
    def counters(self) -> tuple[int, int, list[int]]: ...
    def get_state(self, layer: int) -> EventState: ...
    def set_state(self, layer: int, c: Tensor, y: Tensor) -> None: ...
    def get_trace(self) -> Tensor: ...
    def set_trace(self, trace: Tensor) -> None: ...


class CompiledRunner:
    """The C++ core. ``core`` itself is used by the engine's shortest paths."""

    def __init__(
        self, module: Any, network: Network, weights: str, threads: int, streams: int, token_table: int
    ) -> None:
        def address(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        self._network, self._streams = network, streams
        self.core = module.EngineCore(
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
            WEIGHTS.index(weights),
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


class ReferenceRunner:
    """The same arithmetic in plain torch, dense and slow, in any floating type.

    Weights are rounded as the core rounds them, and for int8 so is what they are multiplied with: eight bits of the
    largest magnitude at every step.
    """

    def __init__(self, network: Network, weights: str, streams: int, *, dtype: torch.dtype = torch.float32) -> None:
        self._network, self._weights, self._streams, self._dtype = network, weights, streams, dtype
        self._w = [self._rounded(layer.weight_ih, input=True) for layer in network.layers]
        self._v = [self._rounded(layer.weight_hh) for layer in network.layers]
        self._readout = None if network.readout is None else self._rounded(network.readout)
        self.reset()
        self.reset_counters()

    def _rounded(self, weight: Tensor, input: bool = False) -> Tensor:
        if self._weights == "bfloat16" and not (input and weight.shape[1] <= FEW_INPUTS):
            weight = weight.to(torch.bfloat16)
        elif self._weights == "int8" and not (input and weight.shape[1] <= FEW_INPUTS):
            largest = weight.abs().amax(1, keepdim=True)
            scale = torch.where(largest > 0, largest / 127, 1.0)
            return (weight / scale).round().to(self._dtype) * scale.to(self._dtype)
        return weight.to(self._dtype)

    def _source(self, x: Tensor, weight: Tensor, input: bool = False) -> Tensor:
        """What multiplies ``weight``: ``x`` itself, or ``x`` in eight bits of its largest magnitude."""
        if self._weights != "int8" or (input and weight.shape[1] <= FEW_INPUTS):
            return x
        largest = x.abs().amax(-1, keepdim=True)
        q = (x.abs() * torch.where(largest > 0, 255 / largest, 0.0) + 0.5).floor()
        return x.sign() * q * largest / 255

    def _advance(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self._dtype)

        w, v = self._w[index], self._v[index]
        H = layer.hidden

        def update(p: Tensor, y: Tensor, memory: Tensor) -> functional.CellUpdate:
            if self._weights != "int8":
                return functional.gru_update(p, y, memory, v, cast(layer.bias_hh), layer.reset_gate)
            p_r, p_u, p_z = p.split(H, -1)
            bias = torch.zeros(3 * H, dtype=self._dtype) if layer.bias_hh is None else layer.bias_hh.to(self._dtype)
            v_r, v_u, q = F.linear(self._source(y, v), v, bias).split(H, -1)
            u, r = torch.sigmoid(-(p_u + v_u)), torch.sigmoid(p_r + v_r)
            if layer.reset_gate == "after":
                z = torch.tanh(p_z + r * q)
            else:
                z = torch.tanh(p_z + F.linear(self._source(r * y, v), v[2 * H :], bias[2 * H :]))
            return functional.CellUpdate(u * z + (1 - u) * memory, None, (u, r, z))

        state = self._states[index]
        self._macs += 3 * H * int((x != 0).sum() + (state.y != 0).sum() + self._streams)
        step = functional.event_step(
            update,
            F.linear(self._source(x, w, True), w, cast(layer.bias_ih)),
            state,
            None,
            layer.theta.to(self._dtype),
            reset=layer.reset,
            surrogate=Surrogate(),
            reset_scale=layer.reset_scale.to(self._dtype),
            keep=torch.tensor(layer.keep, dtype=self._dtype) if layer.keep else None,
        )
        self._states[index] = step.state
        self._events[index] += int(step.e.sum())
        return step.state.y

    def _step(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self._network.layers):
            x = self._advance(index, layer, x)
        self._steps += 1
        decay = self._network.trace
        if self._readout is None:
            if decay is None:
                return x
            self._trace = decay * self._trace + x
            return self._trace
        self._macs += int((x != 0).sum()) * len(self._readout)
        y = F.linear(self._source(x, self._readout), self._readout)
        if decay is not None:
            self._trace = y = decay * self._trace + y
        bias = self._network.readout_bias
        return y if bias is None else y + bias.to(self._dtype)

    @torch.no_grad()
    def run(self, x: Array | None, ids: Array | None, last: bool, out: Array) -> None:
        if ids is not None:
            assert self._network.embedding is not None
            sequence = self._network.embedding[torch.as_tensor(ids)]
        else:
            sequence = torch.as_tensor(x)
        for t, row in enumerate(sequence.to(self._dtype)):
            y = self._step(row).numpy()
            if not last:
                out[t] = y
            elif t == len(sequence) - 1:
                out[:] = y
        if not all(bool(torch.isfinite(state.c).all()) for state in self._states):
            raise ValueError(
                "EventEngine: the state became NaN or infinite: the weights or the input are too large. "
                "Call reset() to go on"
            )

    def step_sparse(self, index: Array, value: Array, out: Array) -> None:
        x = np.zeros((1, 1, self._network.inputs), np.float32)
        x[0, 0, index] = value
        self.run(x, None, True, out[None] if out.ndim == 1 else out)

    def reset(self) -> None:
        def zeros(width: int) -> Tensor:
            return torch.zeros(self._streams, width, dtype=self._dtype)

        self._states = [EventState(zeros(layer.hidden), zeros(layer.hidden)) for layer in self._network.layers]
        self._trace = zeros(self._network.outputs)

    def reset_counters(self) -> None:
        self._steps, self._macs, self._events = 0, 0, [0] * len(self._network.layers)

    def counters(self) -> tuple[int, int, list[int]]:
        return self._steps, self._macs, list(self._events)

    def get_state(self, layer: int) -> EventState:
        return EventState(*(half.to(torch.float32, copy=True) for half in self._states[layer]))

    def set_state(self, layer: int, c: Tensor, y: Tensor) -> None:
        self._states[layer] = EventState(c.to(self._dtype, copy=True), y.to(self._dtype, copy=True))

    def get_trace(self) -> Tensor:
        return self._trace.to(torch.float32, copy=True)

    def set_trace(self, trace: Tensor) -> None:
        self._trace = trace.to(self._dtype, copy=True)
