"""The compiled runner behind :class:`egru.EventEngine`, and the interface it shares with the reference runner."""

from typing import Any, Protocol

import torch
from torch import Tensor

from egru import compiled
from egru.events import EventState
from egru.runtime.gap import Gap, Rows, join_rows
from egru.runtime.inputs import Array
from egru.runtime.network import Network
from egru.runtime.options import Options
from egru.runtime.reference import REFRESH_STEPS

_ROWS = 64
"""Maximum number of ordinary steps of one call of the core in ``skip``: Python handles Ctrl-C between the calls."""


class Runner(Protocol):
    """Computes steps and stores the state.

    Arguments are already checked: ``x`` is ``(T, N, I)`` float32, ``ids`` is ``(T, N)`` int64 (one of the two is None),
    and ``out`` is ``(T, N, O)``, or ``(N, O)`` if only the last step is requested.
    """

    @property
    def time(self) -> int:
        """Number of steps since the last reset of all streams."""
        ...

    @time.setter
    def time(self, time: int) -> None: ...

    def run(self, x: Array | None, ids: Array | None, last: bool, out: Array) -> None: ...
    def skip(self, steps: int) -> Gap:
        """Compute steps without input."""
        ...

    def step_at(self, t: int, index: Array, value: Array, out: Tensor) -> Gap:
        """Skip to step ``t`` of one stream and compute it; ``out`` becomes the output of the result."""
        ...

    def step_sparse(self, index: Array, value: Array, out: Array) -> None: ...
    def step_masked(self, x: Array | None, ids: Array | None, mask: Array, out: Array) -> None:
        """Compute one step of the streams in ``mask``, ``(N,)`` of bool. Other rows of ``out`` are not written."""
        ...

    def reset(self, mask: Array | None = None) -> None: ...
    def reset_counters(self) -> None: ...
    def counters(self) -> tuple[int, int, list[int]]:
        """Return the number of steps over all streams, of multiply-adds, and of events per layer."""
        ...

    def get_state(self, layer: int) -> EventState: ...
    def set_state(self, layer: int, c: Tensor, y: Tensor) -> None: ...
    def get_trace(self) -> tuple[Tensor, Tensor]:
        """Return the trace, ``(N, O)`` of float64, and the number of steps that it covers, ``(N,)`` of int64."""
        ...

    def set_trace(self, trace: Tensor, steps: Tensor) -> None: ...


class CompiledRunner:
    """Runs the network in the C++ core.

    :class:`egru.EventEngine` calls ``core`` directly for the most common inputs, to save a Python call per step.
    """

    def __init__(self, network: Network, options: Options) -> None:
        def address(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        self._network, self._streams = network, options.streams
        shape = (network.outputs,) if options.streams == 1 else (options.streams, network.outputs)
        self._out_like = torch.empty(shape, dtype=torch.float32, device="cpu")
        # Memory that `skip` and `step_at` reuse.
        self._rows = torch.empty(_ROWS, dtype=torch.int64), self._out_like.new_empty(_ROWS, network.outputs)
        self._row_addresses = self._rows[0].data_ptr(), self._rows[1].data_ptr()
        self._no_events = join_rows(self._out_like, [])[1:]
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
                    layer.events,
                    layer.reset,
                    layer.cell == "gru" and layer.reset_gate == "after",
                    layer.keep,
                    layer.cell == "lstm",
                    layer.compare == "output",
                )
                for layer in network.layers
            ],
            options.weights,
            options.threads,
            options.streams,
            -1.0 if network.decay is None else network.decay,
            network.trace == "mean",
            REFRESH_STEPS[options.weights],
            options.token_table,
            options.packing,
        )
        if network.embedding is not None:
            self.core.set_embedding(address(network.embedding), *network.embedding.shape)
        if network.readout is not None:
            outputs, inputs = network.readout.shape
            self.core.set_readout(address(network.readout), address(network.readout_bias), inputs, outputs)
        self.core.set_gap(Gap, self._no_events, *self._row_addresses, _ROWS)

    def run(self, x: Array | None, ids: Array | None, last: bool, out: Array) -> None:
        steps = len(x) if x is not None else len(ids) if ids is not None else 0
        self.core.run(
            0 if x is None else x.ctypes.data, 0 if ids is None else ids.ctypes.data, steps, last, out.ctypes.data
        )

    @property
    def time(self) -> int:
        return self.core.time

    @time.setter
    def time(self, time: int) -> None:
        self.core.time = time

    def skip(self, steps: int) -> Gap:
        out = torch.empty_like(self._out_like)
        start, (row_steps, row_outputs), addresses = self.core.time, self._rows, self._row_addresses
        rows: list[Rows] = []
        for stream in range(self._streams):
            done = 0
            while done < steps:
                taken, count = self.core.skip(stream, steps - done, out.data_ptr(), *addresses, _ROWS)
                if count:
                    rows.append((row_steps[:count] + (start + done), stream, row_outputs[:count].clone()))
                done += taken
        return join_rows(out, rows) if rows else Gap(out, *self._no_events)

    def step_at(self, t: int, index: Array, value: Array, out: Tensor) -> Gap:
        return self.finish_step_at(self.core.step_at_address(t, index, value, out.data_ptr()), t, index, value, out)

    def finish_step_at(self, count: Any, t: int, index: Any, value: Any, out: Tensor) -> Gap:
        """Return the result of ``core.step_at``, which returned ``count``, after further calls if necessary."""
        if count == 0:
            return Gap(out, *self._no_events)
        parts = [self._take_rows(count)]
        while count < 0:
            count = self.core.step_at_address(t, index, value, out.data_ptr())
            parts.append(self._take_rows(count))
        return join_rows(out, parts)

    def _take_rows(self, count: int) -> Rows:
        """Return a copy of the rows that the core has written; a negative count is that of an incomplete call."""
        count = count if count >= 0 else -2 - count
        return self._rows[0][:count].clone(), 0, self._rows[1][:count].clone()

    def step_sparse(self, index: Array, value: Array, out: Array) -> None:
        self.core.step_sparse(index.ctypes.data, value.ctypes.data, len(index), out.ctypes.data)

    def step_masked(self, x: Array | None, ids: Array | None, mask: Array, out: Array) -> None:
        self.core.step_masked(
            0 if x is None else x.ctypes.data, 0 if ids is None else ids.ctypes.data, mask.ctypes.data, out.ctypes.data
        )

    def reset(self, mask: Array | None = None) -> None:
        self.core.reset(0 if mask is None else mask.ctypes.data)

    def reset_counters(self) -> None:
        self.core.reset_counters()

    def counters(self) -> tuple[int, int, list[int]]:
        return self.core.counters()

    def get_state(self, layer: int) -> EventState:
        c = torch.empty(self._streams, self._network.layers[layer].hidden, dtype=torch.float32, device="cpu")
        y = torch.empty_like(c)
        self.core.get_state(layer, c.data_ptr(), y.data_ptr())
        return EventState(c, y)

    def set_state(self, layer: int, c: Tensor, y: Tensor) -> None:
        self.core.set_state(layer, c.data_ptr(), y.data_ptr())

    def get_trace(self) -> tuple[Tensor, Tensor]:
        trace = torch.empty(self._streams, self._network.outputs, dtype=torch.float64, device="cpu")
        steps = torch.empty(self._streams, dtype=torch.int64, device="cpu")
        self.core.get_trace(trace.data_ptr(), steps.data_ptr())
        return trace, steps

    def set_trace(self, trace: Tensor, steps: Tensor) -> None:
        self.core.set_trace(trace.data_ptr(), steps.data_ptr())
