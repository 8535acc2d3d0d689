"""The reference runner: the arithmetic of the compiled core in plain torch."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from egru import functional
from egru.events import EventState, Surrogate
from egru.runtime.gap import Gap, Rows, join_rows
from egru.runtime.inputs import Array
from egru.runtime.network import Layer, Network
from egru.types import WeightFormat

MAX_FLOAT32_INPUTS = 16
"""Input weights of a layer with at most this many inputs stay float32: quantising them gains nothing."""


REFRESH_STEPS: dict[WeightFormat, int] = {"float32": 1024, "bfloat16": 1024, "int8": 64}
"""Steps after which the sums that receivers of delta events accumulate are computed from the outputs again. Rounding
errors then do not accumulate; with int8 weights, every change that is added is rounded to eight bits."""


class ReferenceRunner:
    """Runs the network in plain torch: dense, slow, and in any floating-point dtype.

    Weights are rounded as in the compiled core. With int8 weights, the vectors they are multiplied with are rounded
    too: to eight bits, relative to the largest magnitude in the vector.
    """

    def __init__(
        self, network: Network, weights: WeightFormat, streams: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self._network, self._dtype = network, dtype
        self._weights: WeightFormat = weights
        self._w = [self._round_weights(layer.weight_ih, input=True) for layer in network.layers]
        self._v = [self._round_weights(layer.weight_hh) for layer in network.layers]
        self._readout = None if network.readout is None else self._round_weights(network.readout)
        # Number of non-zero weights per input of each product, before rounding.
        self._nonzero = {f"input {i}": layer.weight_ih.count_nonzero(0) for i, layer in enumerate(network.layers)}
        self._nonzero |= {f"recurrent {i}": layer.weight_hh.count_nonzero(0) for i, layer in enumerate(network.layers)}
        if network.readout is not None:
            self._nonzero["readout"] = network.readout.count_nonzero(0)
        self._states = [
            EventState(*(torch.zeros(streams, layer.hidden, dtype=dtype, device="cpu") for _ in range(2)))
            for layer in network.layers
        ]
        self._trace = torch.zeros(streams, network.outputs, dtype=torch.float64, device="cpu")
        self._trace_steps = torch.zeros(streams, dtype=torch.int64, device="cpu")
        # Delta events: the last changes of each layer, the sums of their receivers, and the age of these sums in steps.
        self._sent = [torch.zeros_like(state.y) for state in self._states]
        self._sums: dict[str, Tensor] = {}
        self._sends = torch.zeros(streams, dtype=torch.bool, device="cpu")  # streams with events of the last layer
        self.time = 0
        self._age = torch.zeros(streams, dtype=torch.int64, device="cpu")
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

    def _product(self, name: str, x: Tensor, changes: Tensor | None, weight: Tensor, input: bool = False) -> Tensor:
        """Return ``x W^T``. If ``changes`` of ``x`` are given, add their product to that of the previous step."""
        if changes is None:
            self._macs += int(((x != 0) * self._nonzero[name]).sum())
            return F.linear(self._round_vector(x, weight, input), weight)
        refresh = (self._age % REFRESH_STEPS[self._weights] == 0)[:, None]
        x = torch.where(refresh, x, changes)
        self._macs += int(((x != 0) * self._nonzero[name]).sum())
        product = F.linear(self._round_vector(x, weight, input), weight)
        self._sums[name] = torch.where(refresh, 0, self._sums.get(name, torch.zeros_like(product))) + product
        return self._sums[name]

    def _cell(self, index: int, layer: Layer) -> Callable[[Tensor, Tensor, Tensor], functional.CellUpdate]:
        """Return the update of a layer as a function of projected input, last output and state."""
        v, H, changes = self._v[index], layer.hidden, self._sent[index] if layer.events == "delta" else None
        rows = layer.gates * H
        bias = torch.zeros(rows, dtype=self._dtype) if layer.bias_hh is None else layer.bias_hh.to(self._dtype)

        def update(p: Tensor, y: Tensor, memory: Tensor) -> functional.CellUpdate:
            product = self._product(f"recurrent {index}", y, changes, v) + bias
            if layer.cell == "lstm":
                i, f, g, o = (p + product).chunk(4, -1)
                c = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
                return functional.CellUpdate(c, torch.sigmoid(o), (), layer.compare == "output")
            p_r, p_u, p_z = p.split(H, -1)
            v_r, v_u, q = product.split(H, -1)
            u, r = torch.sigmoid(-(p_u + v_u)), torch.sigmoid(p_r + v_r)
            if layer.reset_gate == "after":
                z = torch.tanh(p_z + r * q)
            else:
                z = torch.tanh(p_z + F.linear(self._round_vector(r * y, v), v[2 * H :], bias[2 * H :]))
            return functional.CellUpdate(u * z + (1 - u) * memory, None, (u, r, z))

        return update

    def _advance(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        """Compute one step of one layer and return its output."""
        w, state = self._w[index], self._states[index]
        changes = self._changes(index - 1)
        self._macs += layer.gates * layer.hidden * len(x)
        p = self._product(f"input {index}", x, changes, w, True)
        step = functional.event_step(
            self._cell(index, layer),
            p if layer.bias_ih is None else p + layer.bias_ih.to(self._dtype),
            state,
            None,
            layer.theta.to(self._dtype),
            events=layer.events,
            reset=layer.reset,
            surrogate=Surrogate(),
            reset_scale=layer.reset_scale.to(self._dtype),
            keep=torch.tensor(layer.keep, dtype=self._dtype) if layer.keep else None,
        )
        self._states[index] = step.state
        self._sent[index] = step.state.y - state.y
        self._events[index] += int(step.e.sum())
        self._sends = step.e.any(-1)
        return step.state.y

    def _changes(self, index: int) -> Tensor | None:
        """Return the changes that a layer with delta events has sent at this step; None for other inputs."""
        return self._sent[index] if index >= 0 and self._network.layers[index].events == "delta" else None

    def _step(self, x: Tensor) -> Tensor:
        """Compute one step of the network."""
        for index, layer in enumerate(self._network.layers):
            x = self._advance(index, layer, x)
        self._steps += len(x)
        if self._readout is not None:
            x = self._product("readout", x, self._changes(len(self._network.layers) - 1), self._readout)
        self._age += 1
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
        self.time += len(sequence)
        if not all(bool(torch.isfinite(state.c).all()) for state in self._states):
            raise ValueError(
                "EventEngine: the state became NaN or infinite because the weights or the input are too large; "
                "call reset() to continue"
            )

    def skip(self, steps: int) -> Gap:
        streams = len(self._age)
        x = np.zeros((1, streams, self._network.inputs), np.float32)
        out = np.zeros((1, streams, self._network.outputs), np.float32)
        rows: list[Rows] = []
        for step in range(self.time, self.time + steps):
            self.run(x, None, False, out)
            for stream in self._sends.nonzero()[:, 0].tolist():
                rows.append((torch.tensor([step]), stream, torch.from_numpy(out[:, stream].copy())))
        return join_rows(torch.from_numpy(out[0, 0] if streams == 1 else out[0]), rows)

    def step_at(self, t: int, index: Array, value: Array, out: Tensor) -> Gap:
        rows = self.skip(t - self.time)[1:] if t > self.time else join_rows(out, [])[1:]
        self.step_sparse(index, value, out.numpy()[None])
        return Gap(out, *rows)

    def step_sparse(self, index: Array, value: Array, out: Array) -> None:
        x = np.zeros((1, 1, self._network.inputs), np.float32)
        x[0, 0, index] = value
        self.run(x, None, True, out[None] if out.ndim == 1 else out)

    def step_masked(self, x: Array | None, ids: Array | None, mask: Array, out: Array) -> None:
        if not mask.any():
            self.time += 1
            return
        states, trace, steps = self._states, self._trace, self._trace_steps
        sent, sums, age = self._sent, self._sums, self._age
        rows = torch.as_tensor(mask)
        self._states = [EventState(state.c[rows], state.y[rows]) for state in states]
        self._trace, self._trace_steps = trace[rows], steps[rows]
        self._sent, self._age = [part[rows] for part in sent], age[rows]
        self._sums = {name: part[rows] for name, part in sums.items()}
        part = np.empty((1, int(mask.sum()), self._network.outputs), out.dtype)
        try:
            self.run(None if x is None else x[:, mask], None if ids is None else ids[:, mask], False, part)
            out[0, mask] = part[0]
        finally:  # also if the input or the state is not finite
            for old, new in zip(states, self._states, strict=True):
                old.c[rows], old.y[rows] = new
            trace[rows], steps[rows] = self._trace, self._trace_steps
            for old, new in zip(sent, self._sent, strict=True):
                old[rows] = new
            for name, new in self._sums.items():
                sums.setdefault(name, new.new_zeros(len(rows), new.shape[1]))[rows] = new
            age[rows] = self._age
            self._states, self._trace, self._trace_steps = states, trace, steps
            self._sent, self._sums, self._age = sent, sums, age

    def reset(self, mask: Array | None = None) -> None:
        rows = slice(None) if mask is None else torch.as_tensor(mask)
        for state in self._states:
            state.c[rows], state.y[rows] = 0, 0
        self._trace[rows], self._trace_steps[rows] = 0, 0
        self._age[rows] = 0
        self.time = 0 if mask is None else self.time

    def reset_counters(self) -> None:
        self._steps, self._macs, self._events = 0, 0, [0] * len(self._network.layers)

    def counters(self) -> tuple[int, int, list[int]]:
        return self._steps, self._macs, list(self._events)

    def get_state(self, layer: int) -> EventState:
        self._age.zero_()  # as in the compiled core: an engine and a copy of it continue with the same sums
        return EventState(*(half.to(torch.float32, copy=True) for half in self._states[layer]))

    def set_state(self, layer: int, c: Tensor, y: Tensor) -> None:
        self._age.zero_()
        self._states[layer] = EventState(c.to(self._dtype, copy=True), y.to(self._dtype, copy=True))

    def get_trace(self) -> tuple[Tensor, Tensor]:
        return self._trace.clone(), self._trace_steps.clone()

    def set_trace(self, trace: Tensor, steps: Tensor) -> None:
        self._trace, self._trace_steps = trace.clone(), steps.clone()
