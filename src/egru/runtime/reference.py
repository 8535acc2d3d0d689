"""The reference runner: the arithmetic of the compiled core in plain torch."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from egru import functional
from egru.events import EventState, Surrogate
from egru.runtime.inputs import Array
from egru.runtime.network import Layer, Network
from egru.types import WeightFormat

MAX_FLOAT32_INPUTS = 16
"""Input weights of a layer with at most this many inputs stay float32: quantising them gains nothing."""


class ReferenceRunner:
    """Runs the network in plain torch: dense, slow, and in any floating-point dtype.

    Weights are rounded as in the compiled core. With int8 weights, the vectors they are multiplied with are rounded
    too: to eight bits, relative to the largest magnitude in the vector.
    """

    def __init__(
        self, network: Network, weights: WeightFormat, streams: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self._network, self._weights, self._dtype = network, weights, dtype
        self._w = [self._round_weights(layer.weight_ih, input=True) for layer in network.layers]
        self._v = [self._round_weights(layer.weight_hh) for layer in network.layers]
        self._readout = None if network.readout is None else self._round_weights(network.readout)
        self._states = [
            EventState(*(torch.zeros(streams, layer.hidden, dtype=dtype, device="cpu") for _ in range(2)))
            for layer in network.layers
        ]
        self._trace = torch.zeros(streams, network.outputs, dtype=torch.float64, device="cpu")
        self._trace_steps = torch.zeros(streams, dtype=torch.int64, device="cpu")
        self.reset_counters()

    def _stays_float32(self, weight: Tensor, input: bool) -> bool:
        return input and weight.shape[1] <= MAX_FLOAT32_INPUTS

    def _round_weights(self, weight: Tensor, input: bool = False) -> Tensor:
        if self._weights == "bfloat16" and not self._stays_float32(weight, input):
            weight = weight.to(torch.bfloat16)
        elif self._weights == "int8" and not self._stays_float32(weight, input):
            largest = weight.abs().amax(1, keepdim=True)
            scale = torch.where(largest > 0, largest / 127, 1.0)
            return (weight / scale).round().to(self._dtype) * scale.to(self._dtype)
        return weight.to(self._dtype)

    def _round_vector(self, x: Tensor, weight: Tensor, input: bool = False) -> Tensor:
        """Round a vector that is multiplied with int8 weights; return other vectors unchanged."""
        if self._weights != "int8" or self._stays_float32(weight, input):
            return x
        largest = x.abs().amax(-1, keepdim=True)
        q = (x.abs() * torch.where(largest > 0, 255 / largest, 0.0) + 0.5).floor()
        return x.sign() * q * largest / 255

    def _cell(self, index: int, layer: Layer) -> Callable[[Tensor, Tensor, Tensor], functional.CellUpdate]:
        """Return the update of a layer as a function of projected input, last events and state."""
        v, H = self._v[index], layer.hidden

        def update(p: Tensor, y: Tensor, memory: Tensor) -> functional.CellUpdate:
            if layer.cell == "lstm":
                bias = None if layer.bias_hh is None else layer.bias_hh.to(self._dtype)
                return functional.lstm_update(p, self._round_vector(y, v), memory, v, bias, layer.compare)
            if self._weights != "int8":
                bias = None if layer.bias_hh is None else layer.bias_hh.to(self._dtype)
                return functional.gru_update(p, y, memory, v, bias, layer.reset_gate)
            p_r, p_u, p_z = p.split(H, -1)
            bias = torch.zeros(3 * H, dtype=self._dtype) if layer.bias_hh is None else layer.bias_hh.to(self._dtype)
            v_r, v_u, q = F.linear(self._round_vector(y, v), v, bias).split(H, -1)
            u, r = torch.sigmoid(-(p_u + v_u)), torch.sigmoid(p_r + v_r)
            if layer.reset_gate == "after":
                z = torch.tanh(p_z + r * q)
            else:
                z = torch.tanh(p_z + F.linear(self._round_vector(r * y, v), v[2 * H :], bias[2 * H :]))
            return functional.CellUpdate(u * z + (1 - u) * memory, None, (u, r, z))

        return update

    def _advance(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        """Compute one step of one layer and return its events."""
        w, state = self._w[index], self._states[index]
        bias = None if layer.bias_ih is None else layer.bias_ih.to(self._dtype)
        self._macs += layer.gates * layer.hidden * int((x != 0).sum() + (state.y != 0).sum() + len(x))
        step = functional.event_step(
            self._cell(index, layer),
            F.linear(self._round_vector(x, w, True), w, bias),
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
        """Compute one step of the network."""
        for index, layer in enumerate(self._network.layers):
            x = self._advance(index, layer, x)
        self._steps += len(x)
        if self._readout is not None:
            self._macs += int((x != 0).sum()) * len(self._readout)
            x = F.linear(self._round_vector(x, self._readout), self._readout)
        if self._network.decay is not None:
            self._trace = self._network.decay * self._trace + x
            self._trace_steps += 1
            mean = self._network.trace == "mean"
            x = (self._trace / self._trace_steps[:, None] if mean else self._trace).to(self._dtype)
        bias = self._network.readout_bias
        return x if bias is None else x + bias.to(self._dtype)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def run(self, x: Array | None, ids: Array | None, last: bool, out: Array) -> None:
        if ids is not None:
            assert self._network.embedding is not None
            sequence = self._network.embedding[torch.as_tensor(ids)]
        else:
            assert x is not None
            nonfinite = x[~np.isfinite(x)]
            if nonfinite.size:
                raise ValueError(f"EventEngine: x contains {nonfinite[0]}; expected finite values")
            sequence = torch.as_tensor(x)
        for t, row in enumerate(sequence.to(self._dtype)):
            y = self._step(row).numpy()
            if not last:
                out[t] = y
            elif t == len(sequence) - 1:
                out[:] = y
        if not all(bool(torch.isfinite(state.c).all()) for state in self._states):
            raise ValueError(
                "EventEngine: the state became NaN or infinite because the weights or the input are too large; "
                "call reset() to continue"
            )

    def step_sparse(self, index: Array, value: Array, out: Array) -> None:
        x = np.zeros((1, 1, self._network.inputs), np.float32)
        x[0, 0, index] = value
        self.run(x, None, True, out[None] if out.ndim == 1 else out)

    def step_masked(self, x: Array | None, ids: Array | None, mask: Array, out: Array) -> None:
        if not mask.any():
            return
        states, trace, steps = self._states, self._trace, self._trace_steps
        rows = torch.as_tensor(mask)
        self._states = [EventState(state.c[rows], state.y[rows]) for state in states]
        self._trace, self._trace_steps = trace[rows], steps[rows]
        part = np.empty((1, int(mask.sum()), self._network.outputs), out.dtype)
        try:
            self.run(None if x is None else x[:, mask], None if ids is None else ids[:, mask], False, part)
            out[0, mask] = part[0]
        finally:  # also if the input or the state is not finite
            for old, new in zip(states, self._states, strict=True):
                old.c[rows], old.y[rows] = new
            trace[rows], steps[rows] = self._trace, self._trace_steps
            self._states, self._trace, self._trace_steps = states, trace, steps

    def reset(self, mask: Array | None = None) -> None:
        rows = slice(None) if mask is None else torch.as_tensor(mask)
        for state in self._states:
            state.c[rows], state.y[rows] = 0, 0
        self._trace[rows], self._trace_steps[rows] = 0, 0

    def reset_counters(self) -> None:
        self._steps, self._macs, self._events = 0, 0, [0] * len(self._network.layers)

    def counters(self) -> tuple[int, int, list[int]]:
        return self._steps, self._macs, list(self._events)

    def get_state(self, layer: int) -> EventState:
        return EventState(*(half.to(torch.float32, copy=True) for half in self._states[layer]))

    def set_state(self, layer: int, c: Tensor, y: Tensor) -> None:
        self._states[layer] = EventState(c.to(self._dtype, copy=True), y.to(self._dtype, copy=True))

    def get_trace(self) -> tuple[Tensor, Tensor]:
        return self._trace.clone(), self._trace_steps.clone()

    def set_trace(self, trace: Tensor, steps: Tensor) -> None:
        self._trace, self._trace_steps = trace.clone(), steps.clone()
