"""The network, the state and the counters of an engine."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from egru import compiled
from egru.runtime import inputs
from egru.runtime.counters import Activity
from egru.runtime.inputs import Mask
from egru.runtime.network import Network
from egru.runtime.options import Options
from egru.runtime.reference import ReferenceRunner
from egru.runtime.runners import CompiledRunner, Runner
from egru.runtime.state import get_state, set_state
from egru.types import WeightFormat

if TYPE_CHECKING:
    from egru._core import EngineCore


class StatefulEngine:
    """The part of :class:`egru.EventEngine` that does not compute steps."""

    def _build(self, network: Network, options: Options) -> None:
        self._network, self._options = network, options
        self.weights: WeightFormat = options.weights
        self.threads, self.streams = options.threads, options.streams
        self._core: EngineCore | None = None
        self._runner: Runner
        if compiled.core is None:
            compiled.warn_missing()
            self._runner = ReferenceRunner(network, self.weights, self.streams)
        else:
            self._runner = CompiledRunner(network, options)
            self._core = self._runner.core
        rows = () if self.streams == 1 else (self.streams,)
        self._in_shape = torch.Size((*rows, network.inputs))
        self._out_shape = torch.Size((*rows, network.outputs))
        # empty_like is the fastest way to allocate a small tensor.
        self._out_like = torch.empty(self._out_shape, dtype=torch.float32, device="cpu")

    @property
    def input_size(self) -> int:
        """Number of input features."""
        return self._network.inputs

    @property
    def output_size(self) -> int:
        """Number of outputs of the readout, or of units of the last layer."""
        return self._network.outputs

    @property
    def level(self) -> str:
        """The instruction set that the engine uses, or ``"reference"`` without the compiled core."""
        return "reference" if self._core is None else self._core.level

    def reset(self, mask: Mask | None = None) -> None:
        """Set states, events and trace to zero. The counters of :attr:`activity` continue.

        Args:
            mask: Which streams to reset: N bool. If None, all, and :attr:`time` starts from zero.
        """
        self._runner.reset(None if mask is None else inputs.stream_mask("EventEngine.reset", mask, self.streams))

    @property
    def state(self) -> dict[str, Tensor]:
        """A copy of the complete state. Assign to it to continue from there, also in another engine of this network.

        Keys are ``"c"`` and ``"y"``, the two parts of an :class:`egru.EventState`, both ``(layers, [N,] H)``, or
        ``([N,] H)`` for a cell. If the engine was created from a module with children, the name of the child comes
        first, as in ``"rnn.c"``. With a trace, ``"trace"`` is its value after the readout and without its bias,
        ``([N,] O)`` in float64. With ``trace="mean"`` it is a sum, and ``"trace_steps"`` is the number of steps per
        stream. Values are plain tensors, for ``torch.save``, ``torch.load(weights_only=True)`` or safetensors.

        :attr:`time` is not part of the state: no output depends on it.
        """
        return get_state(self._runner, self._network, self.streams)

    @state.setter
    def state(self, state: Mapping[str, Tensor]) -> None:
        set_state(self._runner, self._network, self.streams, state)

    @property
    def activity(self) -> Activity:
        """Steps, events and multiply-adds so far."""
        steps, macs, events = self._runner.counters()
        hidden = tuple(layer.hidden for layer in self._network.layers)
        return Activity(steps, hidden, tuple(events), macs)

    def reset_activity(self) -> None:
        """Set the counters of :attr:`activity` to zero."""
        self._runner.reset_counters()

    def __repr__(self) -> str:
        sizes = " → ".join(str(n) for n in (self.input_size, *(layer.hidden for layer in self._network.layers)))
        if self._network.readout is not None:
            sizes += f" → {self.output_size}"
        return f"EventEngine({sizes}, weights={self.weights}, streams={self.streams}, level={self.level})"
