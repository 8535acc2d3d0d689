"""The streaming engine: run a trained event-based network one step at a time, at a cost proportional to its events."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from egru import compiled
from egru.events import EventState
from egru.layers import checks
from egru.runtime import inputs
from egru.runtime.inputs import Array, Indices, SparseVector, StepInput, TokenIds, TokenSequence
from egru.runtime.network import check_state, extract_network
from egru.runtime.reference import ReferenceRunner
from egru.runtime.runners import CompiledRunner, Runner
from egru.types import WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from egru._core import EngineCore

_DEFAULT_TOKEN_TABLE = 256 << 20

Out = TypeVar("Out", Tensor, Array)


class Activity(NamedTuple):
    """Work done by an engine since it was built or :meth:`EventEngine.reset_activity` was called.

    Attributes:
        steps: Number of steps.
        streams: Number of streams advanced per step.
        hidden: Number of units, one per layer.
        events: Number of events over all streams, one per layer.
        macs: Number of multiply-adds with a non-zero input, plus ``3 H`` per layer, stream and step for the
            element-wise update.
    """

    steps: int
    streams: int
    hidden: tuple[int, ...]
    events: tuple[int, ...]
    macs: int

    @property
    def rates(self) -> tuple[float, ...]:
        """Events per unit and step, one per layer. The activity sparsity is ``1 - rate``."""
        total = max(1, self.steps * self.streams)
        return tuple(n / (total * h) for n, h in zip(self.events, self.hidden, strict=True))


class EventEngine:
    """Run a trained network step by step, reading only the weights of active inputs and units.

    The engine has a packed copy of the weights: training the module afterwards does not change it. It also stores the
    state between calls. It computes in evaluation mode (zoneout mixes states by its probability, dropout does nothing)
    and in float32. For the same input, the result has the same bits regardless of ``threads``, ``streams`` and the
    division into calls.

    Args:
        module: An :class:`egru.EGRU` (unidirectional), an :class:`egru.EGRUCell`, or a module whose children are, in
            this order, at most one ``nn.Embedding``, one or more of these layers, and at most one ``nn.Linear``.
            Dropout layers are ignored. The engine cannot see what else such a module computes in ``forward``; if in
            doubt, pass the layer, ``embedding`` and ``readout`` instead.
        weights: Number format of the weights. ``"bfloat16"`` halves and ``"int8"`` quarters the memory read per event.
            int8 has one scale per output, and rounds the vector it is multiplied with to eight bits at every step.
            Input weights of a layer with at most 16 inputs stay float32.
        threads: Number of threads. They divide the streams, or the units if there are fewer streams than threads.
        streams: Number of independent sequences that advance together. If more than 1, every input and output has a
            leading dimension ``(streams,)``.
        embedding: An ``nn.Embedding`` in front of ``module``.
        readout: An ``nn.Linear`` behind ``module``.
        trace: Decay of an output trace ``tr_t = trace * tr_{t-1} + y_t``, which replaces ``y`` as the output or as the
            input of the readout. If None, there is no trace.
        token_table: Maximum size in bytes of a table of input products, ``3 H`` floats per token. It is filled when a
            token first occurs; later the token costs no product. Not used if the table of all tokens is larger.

    Raises:
        TypeError: If ``module`` is not supported.
        ValueError: If an option is out of range, sizes do not fit, or a parameter is not finite.

    Example:
        >>> layer = egru.EGRU(4, 32)
        >>> engine = egru.EventEngine(layer)
        >>> for x in torch.randn(10, 4):
        ...     y = engine.step(x)
        >>> y.shape
        torch.Size([32])
        >>> engine.run(torch.randn(100, 4)).shape
        torch.Size([100, 32])
        >>> engine.activity.steps
        110
    """

    def __init__(
        self,
        module: nn.Module,
        weights: WeightFormat = "float32",
        threads: int = 1,
        streams: int = 1,
        *,
        embedding: nn.Embedding | None = None,
        readout: nn.Linear | None = None,
        trace: float | None = None,
        token_table: int = _DEFAULT_TOKEN_TABLE,
    ) -> None:
        checks.choice("EventEngine", "weights", weights, WEIGHT_FORMATS)
        self.weights: WeightFormat = weights
        self.threads = checks.positive_int("EventEngine", "threads", threads)
        self.streams = checks.positive_int("EventEngine", "streams", streams)
        if isinstance(token_table, bool) or not isinstance(token_table, int) or token_table < 0:
            raise ValueError(f"EventEngine: token_table must be a number of bytes, at least 0; got {token_table!r}")
        self._network = extract_network(module, embedding, readout, trace)
        self._core: EngineCore | None = None
        self._runner: Runner
        if compiled.core is None:
            compiled.warn_missing()
            self._runner = ReferenceRunner(self._network, weights, streams)
        else:
            self._runner = CompiledRunner(self._network, weights, threads, streams, token_table)
            self._core = self._runner.core
        rows = () if streams == 1 else (streams,)
        self._in_shape = torch.Size((*rows, self._network.inputs))
        self._out_shape = torch.Size((*rows, self._network.outputs))
        self._out = torch.zeros(self._out_shape, dtype=torch.float32)
        self._out_array: Array = self._out.numpy()
        self._out_address = self._out.data_ptr()

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

    # ---- running ----------------------------------------------------------------------------------------------------

    @overload
    def step(self, x: Array | tuple[Indices, Array], out: None = None) -> Array: ...
    @overload
    def step(
        self,
        x: Tensor | tuple[Indices, Tensor | list[float]] | Sequence[SparseVector] | TokenIds,
        out: None = None,
    ) -> Tensor: ...
    @overload
    def step(self, x: StepInput, out: Out) -> Out: ...
    def step(self, x: Any, out: Any = None) -> Any:
        """Compute one step.

        Args:
            x: For one stream, one of:

                - a float32 vector ``(I,)``, as a CPU tensor or a numpy array; zeros cost nothing;
                - a pair ``(indices, values)`` of its active entries, each a tensor, an array or a list;
                - a token id, if there is an embedding.

                For several streams: ``(N, I)``, a list of N pairs, or N token ids.
            out: Where to write the result: a contiguous float32 CPU tensor or array. If None, the result is written to
                a buffer of the engine, which the next step overwrites.

        Returns:
            The output, ``([N,] O)``: ``out``, or a numpy array if ``x`` (or the values of a pair) is one, or a tensor.

        Raises:
            TypeError: If the type or dtype of ``x`` or ``out`` is not supported.
            ValueError: If a shape does not fit, ``x`` is not finite, an index or token id is out of range, or the state
                overflows.
            RuntimeError: If another thread uses the engine.
        """
        if out is None and self._core is not None:
            input_type = type(x)
            if input_type is Tensor:
                if x.dtype is torch.float32 and x.shape == self._in_shape and x.is_contiguous() and x.is_cpu:
                    self._core.step_address(x.data_ptr(), self._out_address)
                    return self._out
            elif input_type is np.ndarray:
                if self._step_array(self._core, x):
                    return self._out_array
            elif input_type is int and self.streams == 1 and self._network.embedding is not None:
                self._core.step_token(x, self._out_address)
                return self._out
        return self._step_checked(x, out)

    def _step_array(self, core: "EngineCore", x: Array) -> bool:
        try:
            return core.step_array(x, self._out_address)
        except TypeError:  # not contiguous float32: _step_checked converts it or raises
            return False

    def _step_checked(self, x: Any, out: Any) -> Any:
        """Compute one step from any input, with all checks in Python."""
        returns_array = inputs.is_array(x) or (inputs.is_sparse(x) and inputs.is_array(x[1]))
        if out is None:
            target, result = self._out_array, self._out_array if returns_array else self._out
        else:
            target, result = inputs.output_buffer("EventEngine.step", out, self._out_shape), out
        block = target.reshape(1, self.streams, -1)
        if inputs.is_sparse(x) and self.streams == 1:
            index, value = inputs.sparse_vector("EventEngine.step", x, self.input_size)
            if self._core is None:
                inputs.check_finite("EventEngine.step", value)
            self._runner.step_sparse(index, value, block[0])
        elif isinstance(x, list | tuple) and x and all(inputs.is_sparse(pair) for pair in x):
            self._runner.run(self._to_dense(x), None, False, block)
        else:
            self._run_checked("EventEngine.step", x, 1, False, block, self._in_shape)
        return result

    @overload
    def run(self, x: Array, last: bool = False, out: None = None) -> Array: ...
    @overload
    def run(self, x: Tensor | TokenSequence, last: bool = False, out: None = None) -> Tensor: ...
    @overload
    def run(self, x: Tensor | Array | TokenSequence, last: bool = False, *, out: Out) -> Out: ...
    def run(self, x: Any, last: bool = False, out: Any = None) -> Any:
        """Compute a sequence of steps. The input product is batched over time.

        The state continues from the previous call. Ctrl-C interrupts the run between blocks of about 64 steps, with the
        state after the last complete block.

        Args:
            x: ``(T, [N,] I)`` float32, or ``(T[, N])`` token ids if there is an embedding; at least one step.
            last: If True, return only the output of the last step.
            out: Where to write the result: a contiguous float32 CPU tensor or array. If None, it is allocated.

        Returns:
            The outputs, ``(T, [N,] O)``, or ``([N,] O)`` if ``last``: ``out``, or a numpy array if ``x`` is one, or a
            tensor.

        Raises:
            TypeError: If the type or dtype of ``x`` or ``out`` is not supported.
            ValueError: If a shape does not fit, ``x`` is not finite, a token id is out of range, or the state
                overflows.
            RuntimeError: If another thread uses the engine.
        """
        steps = len(x) if hasattr(x, "__len__") else 0
        if steps == 0:
            raise ValueError(f"EventEngine.run: x must be a sequence of at least one step, got {inputs.describe(x)}")
        shape = self._out_shape if last else torch.Size((steps, *self._out_shape))
        if out is None:
            target: Array = np.empty(shape, np.float32)
            result: Any = target if inputs.is_array(x) else torch.from_numpy(target)
        else:
            target, result = inputs.output_buffer("EventEngine.run", out, shape), out
        block = target.reshape(-1, self.streams, self.output_size)
        in_shape = torch.Size((steps, *self._in_shape))
        self._run_checked("EventEngine.run", x, steps, last, block[0] if last else block, in_shape)
        return result

    def _run_checked(self, caller: str, x: Any, steps: int, last: bool, out: Array, shape: torch.Size) -> None:
        array: Any = x.detach().cpu().numpy() if isinstance(x, Tensor) and x.dtype != torch.bfloat16 else x
        if not inputs.is_array(array):
            tokens = ", or token ids" if self._network.embedding is not None else ""
            array = inputs.integers(caller, array, f"a float32 array or CPU tensor, (indices, values){tokens}")
        if array.dtype == np.float32:
            if array.shape != tuple(shape):
                raise ValueError(f"{caller}: x has shape {array.shape}, expected {tuple(shape)}")
            array = np.ascontiguousarray(array).reshape(steps, self.streams, -1)
            if self._core is None:
                inputs.check_finite(caller, array)
            self._runner.run(array, None, last, out)
        elif array.dtype.kind in "iu":
            if self._network.embedding is None:
                raise TypeError(f"{caller}: x must be float32 because there is no embedding, got {array.dtype}")
            ids = inputs.token_ids(caller, array, tuple(shape[:-1]), self._network.tokens)
            self._runner.run(None, ids.reshape(steps, self.streams), last, out)
        else:
            raise TypeError(
                f"{caller}: x must be float32, got {array.dtype}; convert it with .float() or .astype('float32')"
            )

    def _to_dense(self, pairs: Sequence[SparseVector]) -> Array:
        """Convert one sparse vector per stream to ``(1, N, I)``."""
        if len(pairs) != self.streams:
            raise ValueError(
                f"EventEngine.step: x must have one (indices, values) pair per stream, got {len(pairs)} pairs for "
                f"{self.streams} streams"
            )
        x = np.zeros((1, self.streams, self.input_size), np.float32)
        for row, pair in zip(x[0], pairs, strict=True):
            index, value = inputs.sparse_vector("EventEngine.step", pair, self.input_size)
            row[index] = value
        if self._core is None:
            inputs.check_finite("EventEngine.step", x)
        return x

    # ---- state and counters -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Set states, events and trace to zero. The counters of :attr:`activity` continue."""
        self._runner.reset()

    @property
    def state(self) -> EventState | tuple[EventState, ...]:
        """A copy of the state in the form that the module uses: ``(layers, [N,] H)`` for each of ``c`` and ``y``.

        A tuple with one state per event layer if the module has several. Assign to it to continue from a saved state;
        see also :attr:`trace`.
        """
        states: list[EventState] = []
        layer = 0
        for group in self._network.groups:
            parts = [self._runner.get_state(layer + i) for i in range(group.layers)]
            layer += group.layers
            shape = group.state_shape(self.streams)
            states.append(EventState(*(torch.stack(half).reshape(shape) for half in zip(*parts, strict=True))))
        return states[0] if len(states) == 1 else tuple(states)

    @state.setter
    def state(self, state: EventState | tuple[EventState, ...]) -> None:
        groups = self._network.groups
        states = (state,) if len(groups) == 1 else state
        if not isinstance(states, tuple) or len(states) != len(groups):
            raise TypeError(
                f"EventEngine: state must be a tuple of {len(groups)} egru.EventState, got {inputs.describe(state)}"
            )
        checked = [check_state(group, self.streams, s) for group, s in zip(groups, states, strict=True)]
        layer = 0
        for group, (c, y) in zip(groups, checked, strict=True):
            shape = (group.layers, self.streams, group.hidden)
            for c_l, y_l in zip(c.reshape(shape), y.reshape(shape), strict=True):
                self._runner.set_state(layer, c_l.contiguous(), y_l.contiguous())
                layer += 1

    @property
    def trace(self) -> Tensor | None:
        """A copy of the output trace, ``([N,] O)``, after the readout and without its bias; None if there is none."""
        return None if self._network.trace is None else self._runner.get_trace().reshape(self._out_shape)

    @trace.setter
    def trace(self, trace: Tensor) -> None:
        if self._network.trace is None:
            raise ValueError("EventEngine: this engine has no trace; create it with EventEngine(..., trace=0.9)")
        if not isinstance(trace, Tensor) or trace.shape != self._out_shape or not bool(torch.isfinite(trace).all()):
            raise ValueError(
                f"EventEngine: trace must be a finite tensor of shape {tuple(self._out_shape)}, "
                f"got {inputs.describe(trace)}"
            )
        values = trace.detach().to("cpu", torch.float32).contiguous()
        self._runner.set_trace(values.reshape(self.streams, -1))

    @property
    def activity(self) -> Activity:
        """Steps, events and multiply-adds so far."""
        steps, macs, events = self._runner.counters()
        hidden = tuple(layer.hidden for layer in self._network.layers)
        return Activity(steps, self.streams, hidden, tuple(events), macs)

    def reset_activity(self) -> None:
        """Set the counters of :attr:`activity` to zero."""
        self._runner.reset_counters()

    def __repr__(self) -> str:
        sizes = " → ".join(str(n) for n in (self.input_size, *(layer.hidden for layer in self._network.layers)))
        if self._network.readout is not None:
            sizes += f" → {self.output_size}"
        return f"EventEngine({sizes}, weights={self.weights}, streams={self.streams}, level={self.level})"
