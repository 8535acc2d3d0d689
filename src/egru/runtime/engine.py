"""The streaming engine: a trained event-based network, one step at a time, at the cost of its events."""

import operator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from egru import compiled
from egru.events import EventState
from egru.layers import checks
from egru.runtime.network import check_state, describe
from egru.runtime.runners import WEIGHTS, Array, CompiledRunner, ReferenceRunner, Runner

_ME = "EventEngine"
_DEFAULT_TOKEN_TABLE = 256 << 20


class Activity(NamedTuple):
    """What an engine has done since it was built or ``reset_activity`` was called.

    ``events`` per layer, over all streams; ``macs`` counts multiply-adds whose operand from the input, a unit or the
    layer below was not zero, plus the ``3 H`` of the element-wise part per layer, stream and step.
    """

    steps: int
    streams: int
    hidden: tuple[int, ...]
    events: tuple[int, ...]
    macs: int

    @property
    def rates(self) -> tuple[float, ...]:
        """Events per unit and step, layer by layer; ``1 - rate`` is the activity sparsity."""
        total = max(1, self.steps * self.streams)
        return tuple(n / (total * h) for n, h in zip(self.events, self.hidden, strict=True))


class EventEngine:
    r"""Run a trained network step by step; only the weights of active units are read.

    ::

        engine = egru.EventEngine(layer)                     # an EGRU or EGRUCell, or embedding → EGRUs → readout
        for x in stream:
            y = engine.step(x)                               # one step, no allocation
        ys = engine.run(sequence)                            # many steps: the input product is batched over time

    The engine holds a copy of the weights, packed for this purpose, and the state; training the module afterwards does
    not change it. It computes in evaluation mode (zoneout mixes by its probability, dropout does nothing), in float32
    arithmetic. The same input gives the same bits whatever ``threads``, ``streams`` and the division into calls.

    Args:
        module: an :class:`egru.EGRU` (one direction), an :class:`egru.EGRUCell`, or a module whose children are, in
            order, at most one ``nn.Embedding``, one or more of these layers, and at most one ``nn.Linear``. Dropout
            is skipped. What else such a module does in its ``forward`` cannot be seen: name the parts where in doubt.
        weights: how weights are kept. "bfloat16" halves and "int8" quarters what is read per event. int8 has one
            scale per output of a product, and rounds what is multiplied to eight bits of its largest magnitude at
            every step; weights of a layer with at most 16 inputs stay float32.
        threads: they divide the streams, or the units where there are fewer streams than threads.
        streams: independent sequences advanced together; every input and output then has a leading ``(streams,)``.
        embedding, readout: an ``nn.Embedding`` in front of and an ``nn.Linear`` behind ``module``.
        trace: decay of an output trace ``tr_t = trace * tr_{t-1} + y_t``, which then takes the place of ``y`` as
            output, or as what the readout reads.
        token_table: bytes that may be spent on keeping the product of embedding and input weights, token by token as
            they are met (``3 H`` floats each): a token met before costs no product. Where the table of all tokens
            would be larger, none is kept.

    Input of a step, for one stream: a float32 vector ``(I,)`` (numpy array or CPU tensor; zeros are skipped), a pair
    ``(indices, values)`` of its active entries, or a token id where there is an embedding. For several streams:
    ``(N, I)``, a list of N pairs, or N token ids. Results are numpy arrays for numpy input and tensors otherwise.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: str = "float32",
        threads: int = 1,
        streams: int = 1,
        *,
        embedding: nn.Embedding | None = None,
        readout: nn.Linear | None = None,
        trace: float | None = None,
        token_table: int = _DEFAULT_TOKEN_TABLE,
    ) -> None:
        self.weights = checks.choice(_ME, "weights", weights, WEIGHTS)
        self.threads = checks.positive_int(_ME, "threads", threads)
        self.streams = checks.positive_int(_ME, "streams", streams)
        if isinstance(token_table, bool) or not isinstance(token_table, int) or token_table < 0:
            raise ValueError(f"{_ME}: token_table must be a number of bytes, at least 0; got {token_table!r}")
        self._network = describe(module, embedding, readout, trace)
        core = compiled.core
        self._core: Any = None
        self._runner: Runner
        if core is None:
            compiled.warn_missing()
            self._runner = ReferenceRunner(self._network, weights, streams)
        else:
            self._runner = CompiledRunner(core, self._network, weights, threads, streams, token_table)
            self._core = self._runner.core
        rows = () if streams == 1 else (streams,)
        self._in_shape = torch.Size((*rows, self._network.inputs))
        self._out_shape = torch.Size((*rows, self._network.outputs))
        self._out = torch.zeros(self._out_shape, dtype=torch.float32)
        self._out_array: Array = self._out.numpy()
        self._out_address = self._out.data_ptr()

    @property
    def input_size(self) -> int:
        return self._network.inputs

    @property
    def output_size(self) -> int:
        return self._network.outputs

    @property
    def level(self) -> str:
        """The instruction set this engine was built for, or "reference" without the compiled core."""
        return "reference" if self._core is None else self._core.level

    # ---- running ----------------------------------------------------------------------------------------------------

    def step(self, x: Any, out: Any = None) -> Any:
        """One step. The result is ``out`` or, without one, a buffer of the engine that the next step overwrites."""
        if out is None and self._core is not None:
            kind = type(x)
            if kind is Tensor:
                if x.dtype is torch.float32 and x.shape == self._in_shape and x.is_contiguous() and x.is_cpu:
                    self._core.step_address(x.data_ptr(), self._out_address)
                    return self._out
            elif kind is np.ndarray:
                if self._step_array(x):
                    return self._out_array
            elif kind is int and self.streams == 1 and self._network.embedding is not None:
                self._core.step_token(x, self._out_address)
                return self._out
        return self._step_any(x, out)

    def _step_array(self, x: Array) -> bool:
        try:
            return self._core.step_array(x, self._out_address)
        except TypeError:  # not contiguous float32: looked at, and perhaps refused, at leisure
            return False

    def _step_any(self, x: Any, out: Any) -> Any:
        as_array = _is_array(x) or (_is_pair(x) and _is_array(x[1]))
        if out is None:
            target, result = self._out_array, self._out_array if as_array else self._out
        else:
            target, result = self._target("step", out, self._out_shape), out
        one = target.reshape(1, self.streams, -1)
        if _is_pair(x) and self.streams == 1:
            index, value = self._pair(x)
            if self._core is None:
                self._check_finite("step", value)
            self._runner.step_sparse(index, value, one[0])
        elif isinstance(x, list | tuple) and x and all(_is_pair(pair) for pair in x):
            self._runner.run(self._from_pairs(x), None, False, one)
        else:
            self._run_any("step", x, 1, False, one, self._in_shape)
        return result

    def run(self, x: Any, last: bool = False, out: Any = None) -> Any:
        """A sequence: ``(T, [N,] I)`` float32, or ``(T[, N])`` token ids where there is an embedding.

        Gives ``(T, [N,] O)``, or with ``last`` the result of the last step only. The state goes on from where it was
        and is left after the last step. Ctrl-C is heeded between blocks of some 64 steps, and leaves the state there.
        """
        steps = len(x) if hasattr(x, "__len__") else 0
        if steps == 0:
            raise ValueError(f"{_ME}.run: x must be a sequence of at least one step, got {_shown(x)}")
        shape = self._out_shape if last else torch.Size((steps, *self._out_shape))
        if out is None:
            target: Array = np.empty(shape, np.float32)
            result: Any = target if _is_array(x) else torch.from_numpy(target)
        else:
            target, result = self._target("run", out, shape), out
        block = target.reshape(-1, self.streams, self.output_size)
        self._run_any("run", x, steps, last, block[0] if last else block, torch.Size((steps, *self._in_shape)))
        return result

    def _run_any(self, method: str, x: Any, steps: int, last: bool, out: Array, shape: torch.Size) -> None:
        array: Any = x.detach().cpu().numpy() if isinstance(x, Tensor) and x.dtype != torch.bfloat16 else x
        if not _is_array(array):
            array = self._ids(method, array)
        if array.dtype == np.float32:
            if array.shape != tuple(shape):
                raise ValueError(f"{_ME}.{method}: x has shape {array.shape}, expected {tuple(shape)}")
            array = np.ascontiguousarray(array).reshape(steps, self.streams, -1)
            if self._core is None:
                self._check_finite(method, array)
            self._runner.run(array, None, last, out)
        elif array.dtype.kind in "iu":
            if self._network.embedding is None:
                raise TypeError(
                    f"{_ME}.{method}: x holds integers ({array.dtype}) and there is no embedding; expected float32"
                )
            if array.shape != tuple(shape[:-1]):
                raise ValueError(f"{_ME}.{method}: token ids have shape {array.shape}, expected {tuple(shape[:-1])}")
            ids = np.ascontiguousarray(array, np.int64).reshape(steps, self.streams)
            outside = ids[(ids < 0) | (ids >= self._network.tokens)]
            if outside.size:
                raise ValueError(
                    f"{_ME}.{method}: token id {outside[0]} is outside the embedding; "
                    f"expected 0 to {self._network.tokens - 1}"
                )
            self._runner.run(None, ids, last, out)
        else:
            raise TypeError(f"{_ME}.{method}: x is {array.dtype}; expected float32 (convert with .float() or .astype)")

    # ---- input and output -------------------------------------------------------------------------------------------

    def _ids(self, method: str, x: Any) -> Array:
        """A token id or nested lists of them as an array; anything else is refused."""
        accepted = "a float32 array or CPU tensor, (indices, values)"
        if self._network.embedding is not None:
            accepted += ", or token ids"
        try:
            array = np.asarray(operator.index(x)) if not isinstance(x, list | tuple) else np.asarray(x)
        except (TypeError, ValueError):
            raise TypeError(f"{_ME}.{method}: x must be {accepted}; got {_shown(x)}") from None
        if array.dtype.kind not in "iu":
            raise TypeError(f"{_ME}.{method}: x must be {accepted}; got {_shown(x)}")
        return array

    def _pair(self, pair: Any) -> tuple[Array, Array]:
        """Active inputs, checked, in ascending order."""
        index, value = (np.asarray(half.detach() if isinstance(half, Tensor) else half) for half in pair)
        if index.size == 0:
            index = index.astype(np.int64)
        if index.dtype.kind not in "iu" or index.ndim != 1:
            raise TypeError(f"{_ME}.step: indices must be a vector of integers, got {index.dtype} {index.shape}")
        if value.dtype != np.float32 and (_is_array(pair[1]) or isinstance(pair[1], Tensor)):
            raise TypeError(f"{_ME}.step: values are {value.dtype}; expected float32")
        value = value.astype(np.float32)
        if value.shape != index.shape:
            raise ValueError(f"{_ME}.step: {index.size} indices and values of shape {value.shape}; expected one each")
        if index.size and not (index.min() >= 0 and index.max() < self.input_size):
            outside = index[(index < 0) | (index >= self.input_size)][0]
            raise ValueError(f"{_ME}.step: index {outside} is outside the input; expected 0 to {self.input_size - 1}")
        index = index.astype(np.int64)  # differences of unsigned ones wrap around
        if (np.diff(index) <= 0).any():
            order = np.argsort(index, kind="stable")
            index, value = index[order], value[order]
            twice = index[1:][np.diff(index) == 0]
            if twice.size:
                raise ValueError(f"{_ME}.step: index {twice[0]} is given twice; expected every index at most once")
        return np.ascontiguousarray(index, np.int32), np.ascontiguousarray(value)

    def _from_pairs(self, pairs: Any) -> Array:
        if len(pairs) != self.streams:
            raise ValueError(f"{_ME}.step: {len(pairs)} pairs (indices, values) for {self.streams} streams")
        x = np.zeros((1, self.streams, self.input_size), np.float32)
        for row, pair in zip(x[0], pairs, strict=True):
            index, value = self._pair(pair)
            row[index] = value
        if self._core is None:
            self._check_finite("step", x)
        return x

    def _target(self, method: str, out: Any, shape: torch.Size) -> Array:
        if isinstance(out, Tensor):
            if out.requires_grad:
                raise ValueError(f"{_ME}.{method}: out requires grad; the engine does not differentiate")
            if not out.is_cpu or out.dtype != torch.float32:
                raise TypeError(
                    f"{_ME}.{method}: out is {out.dtype} on {out.device}; expected torch.float32 on the cpu"
                )
            array: Any = out.numpy()
        else:
            array = out
        if not _is_array(array):
            raise TypeError(f"{_ME}.{method}: out must be an array or a CPU tensor, got {type(out).__name__}")
        if array.dtype != np.float32 or array.shape != tuple(shape):
            raise ValueError(
                f"{_ME}.{method}: out is {array.dtype} {array.shape}; expected float32 of shape {tuple(shape)}"
            )
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError(f"{_ME}.{method}: out must be contiguous and writeable")
        return array

    def _check_finite(self, method: str, values: Array) -> None:
        bad = values[~np.isfinite(values)]
        if bad.size:
            raise ValueError(f"{_ME}.{method}: x holds {bad[0]}; expected finite values")

    # ---- state ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Back to rest: no state, no events, no trace. Counters go on."""
        self._runner.reset()

    @property
    def state(self) -> EventState | tuple[EventState, ...]:
        """A copy of the carried state, as the module itself takes and returns it: ``(layers, [N,] H)`` each half.

        For a module of several event layers a tuple, one each. Set it to go on from there; see also :attr:`trace`.
        """
        states: list[EventState] = []
        layer = 0
        for group in self._network.groups:
            parts = [self._runner.get_state(layer + i) for i in range(group.layers)]
            layer += group.layers
            halves = (torch.stack(half).reshape(group.shape(self.streams)) for half in zip(*parts, strict=True))
            states.append(EventState(*halves))
        return states[0] if len(states) == 1 else tuple(states)

    @state.setter
    def state(self, state: EventState | tuple[EventState, ...]) -> None:
        groups = self._network.groups
        given = (state,) if len(groups) == 1 else state
        if not isinstance(given, tuple) or len(given) != len(groups):
            raise TypeError(f"{_ME}: state must be a tuple of {len(groups)} egru.EventState, got {_shown(state)}")
        checked = [check_state(group, self.streams, s) for group, s in zip(groups, given, strict=True)]
        layer = 0
        for group, (c, y) in zip(groups, checked, strict=True):
            shape = (group.layers, self.streams, group.hidden)
            for c_l, y_l in zip(c.reshape(shape), y.reshape(shape), strict=True):
                self._runner.set_state(layer, c_l.contiguous(), y_l.contiguous())
                layer += 1

    @property
    def trace(self) -> Tensor | None:
        """A copy of the output trace, ``([N,] O)``, behind the readout and without its bias; None if there is none."""
        return None if self._network.trace is None else self._runner.get_trace().reshape(self._out_shape)

    @trace.setter
    def trace(self, trace: Tensor) -> None:
        if self._network.trace is None:
            raise ValueError(f"{_ME}: this engine has no trace; give a decay, EventEngine(..., trace=0.9)")
        if not isinstance(trace, Tensor) or trace.shape != self._out_shape or not bool(torch.isfinite(trace).all()):
            raise ValueError(
                f"{_ME}: trace must be a finite tensor of shape {tuple(self._out_shape)}, got {_shown(trace)}"
            )
        values = trace.detach().to("cpu", torch.float32).contiguous()
        self._runner.set_trace(values.reshape(self.streams, -1))

    @property
    def activity(self) -> Activity:
        """Events, steps and multiply-adds so far."""
        steps, macs, events = self._runner.counters()
        hidden = tuple(layer.hidden for layer in self._network.layers)
        return Activity(steps, self.streams, hidden, tuple(events), macs)

    def reset_activity(self) -> None:
        """Count from zero again."""
        self._runner.reset_counters()

    def __repr__(self) -> str:
        sizes = " → ".join(str(n) for n in (self.input_size, *(layer.hidden for layer in self._network.layers)))
        if self._network.readout is not None:
            sizes += f" → {self.output_size}"
        return f"EventEngine({sizes}, weights={self.weights}, streams={self.streams}, level={self.level})"


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _is_pair(x: Any) -> bool:
    vectors = (np.ndarray, Tensor, list)
    return isinstance(x, tuple) and len(x) == 2 and all(isinstance(half, vectors) for half in x)


def _shown(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__} {x!r:.60}" if shape is None else f"{type(x).__name__} of shape {tuple(shape)}"
