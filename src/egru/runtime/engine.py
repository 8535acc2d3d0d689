"""The streaming engine: run a trained event-based network one step at a time, at a cost proportional to its events."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from egru.runtime import inputs
from egru.runtime.engine_file import read_engine, write_engine
from egru.runtime.engine_gaps import GapEngine
from egru.runtime.forward_check import check_forward, check_model
from egru.runtime.inputs import Array, Indices, Mask, SparseVector, StepInput, TokenIds, TokenSequence
from egru.runtime.network import Network, Trace, extract_network
from egru.runtime.options import DEFAULT_TOKEN_TABLE, Options
from egru.runtime.prediction import Prediction
from egru.runtime.tracing import find_parts
from egru.types import Packing, WeightFormat

# Names that `step` uses: a global is faster than an attribute of a module.
_empty_like = torch.empty_like
_np_float32, _empty, _ndarray = np.float32, np.empty, np.ndarray

Out = TypeVar("Out", Tensor, Array)


class EventEngine(GapEngine):
    """Run a trained network step by step, reading only the weights of active inputs and units.

    The engine has a packed copy of the weights: training the module afterwards does not change it. It also stores the
    state between calls. It computes in evaluation mode (zoneout mixes states by its probability, dropout does nothing)
    and in float32. For the same input, the result has the same bits regardless of ``threads``, ``streams`` and the
    division into calls.

    After every step, the output is that of ``module.forward`` for the sequence so far. The constructor checks this on a
    short random sequence and refuses a module whose ``forward`` computes something else.

    Engines can be copied and pickled. A copy has the same state and its own counters.

    Args:
        module: An :class:`egru.EGRU` or :class:`egru.ELSTM` (unidirectional), an :class:`egru.EGRUCell`, or a module
            whose children are, in this order, at most one ``nn.Embedding``, one or more of these layers, and at most
            one ``nn.Linear``. Dropout layers are ignored. Its ``forward`` may return the output of every step or of the
            last one. An ``nn.Sequential`` and a module without ``forward`` stand for their children, run in order.
        weights: Number format of the weights. ``"bfloat16"`` halves and ``"int8"`` quarters the memory read per event.
            int8 has one scale per output, and rounds the vector it is multiplied with to eight bits at every step.
            Input weights of a layer with at most 16 inputs stay float32.
        threads: Maximum number of threads. They divide the streams, or the units if there are fewer streams than
            threads. The engine measures its steps and uses fewer threads if that is faster. A single stream gains from
            steps of more than about 12 µs on one thread, called in quick succession.
        streams: Number of independent sequences that advance together. If more than 1, every input and output has a
            leading dimension ``(streams,)``.
        embedding: An ``nn.Embedding`` in front of ``module``.
        readout: An ``nn.Linear`` behind ``module``.
        trace: Summary of the outputs over time, which replaces ``y`` as the output or as the input of the readout. A
            number is the decay of a trace ``tr_t = trace * tr_{t-1} + y_t``; 1.0 is a running sum. ``"mean"`` is the
            mean since the last reset. If None, there is no summary.
        token_table: Maximum size in bytes of a table of input products, ``3 H`` floats per token (LSTM: ``4 H``). It is
            filled when a token first occurs; later the token costs no product. Not used if it would be larger.
        packing: Layout of the weights. ``"sparse"`` leaves out blocks of 16 outputs whose weights are all zero, as in a
            network pruned with ``block=16``; ``"dense"`` stores all weights. ``"auto"`` measures both layouts of each
            matrix with zeros and takes the faster one. All layouts compute the same bits, except after :meth:`skip`:
            there, ``"sparse"`` and ``"auto"`` update only the units that an input or an event reaches, if these are
            few, and states may differ by rounding.

    Raises:
        TypeError: If ``module`` is not supported, or its ``forward`` computes something else.
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
        >>> out = torch.empty(32)
        >>> engine.step(torch.randn(4), out=out) is out  # does not allocate
        True
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
        trace: Trace | None = None,
        token_table: int = DEFAULT_TOKEN_TABLE,
        packing: Packing = "auto",
    ) -> None:
        options = Options(weights, threads, streams, token_table, packing)
        self._build(extract_network(module, embedding, readout, trace), options)
        check_forward(module, embedding, readout, trace)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        weights: WeightFormat = "float32",
        threads: int = 1,
        streams: int = 1,
        *,
        token_table: int = DEFAULT_TOKEN_TABLE,
        packing: Packing = "auto",
    ) -> Self:
        """Build an engine for a whole model, whose parts are found by tracing its ``forward`` with ``torch.fx``.

        Supported are an embedding, event layers, and a readout of all outputs, of the last one (``y[:, -1]`` or
        ``h_n[-1]``), of their mean or sum over time or of their :func:`egru.exponential_trace`. Linear layers and
        ``BatchNorm1d`` in front of, between and behind the layers are folded into the weights. A model with a method
        ``streaming`` describes its parts itself. The engine is compared with ``forward``, as in the constructor.

        Args:
            model: A model with event layers. Arguments of ``forward`` after the sequence must have default values or be
                the lengths for ``pack_padded_sequence``: packed sequences are supported.
            weights, threads, streams, token_table, packing: As in the constructor.

        Raises:
            TypeError: If the model computes something that the engine cannot express, returns several outputs or has
                forward hooks; the message gives the reason.

        Example:
            >>> class Model(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.rnn = torch.nn.GRU(4, 32, batch_first=True)
            ...         self.readout = torch.nn.Linear(32, 10)
            ...     def forward(self, x):
            ...         return self.readout(self.rnn(x)[1][-1])
            >>> engine = egru.EventEngine.from_model(egru.convert(Model(), events="positive"))
            >>> engine.step(torch.randn(4)).shape
            torch.Size([10])
        """
        options = Options(weights, threads, streams, token_table, packing)
        engine = cls._from_network(extract_network(**find_parts(model)), options)
        check_model(model)
        return engine

    # ---- running ----------------------------------------------------------------------------------------------------

    @overload
    def step(self, x: Array | tuple[Indices, Array], out: None = None, *, mask: Mask | None = None) -> Array: ...
    @overload
    def step(
        self,
        x: Tensor | tuple[Indices, Tensor | list[float]] | Sequence[SparseVector] | TokenIds,
        out: None = None,
        *,
        mask: Mask | None = None,
    ) -> Tensor: ...
    @overload
    def step(self, x: StepInput, out: Out, *, mask: Mask | None = None) -> Out: ...
    def step(self, x: Any, out: Any = None, *, mask: Any = None) -> Any:
        """Compute one step.

        Args:
            x: For one stream, one of:

                - a float32 vector ``(I,)``, as a CPU tensor or a numpy array; zeros cost nothing;
                - a pair ``(indices, values)`` of its active entries, each a tensor, an array or a list;
                - a token id, if there is an embedding.

                For several streams: ``(N, I)``, a list of N pairs, or N token ids.
            out: Where to write the result: a contiguous float32 CPU tensor or array. The step then allocates no memory.
                If None, the result is a new tensor or array.
            mask: Which streams advance: N bool. The others keep their state, and their input is ignored. Their rows of
                the result are zero, or unchanged if ``out`` is given. If None, all streams advance.

        Returns:
            The output, ``([N,] O)``: ``out``, or a numpy array if ``x`` (or the values of a pair) is one, or a tensor.

        Raises:
            TypeError: If the type or dtype of ``x``, ``out`` or ``mask`` is not supported.
            ValueError: If a shape does not fit, ``x`` is not finite, an index or token id is out of range, or the state
                overflows.
            RuntimeError: If another thread uses the engine.
        """
        core = self._core
        if core is not None and mask is None:  # the common cases, with as few Python operations as possible
            input_type = type(x)
            if input_type is Tensor:
                result = _empty_like(self._out_like) if out is None else out
                if core.step_tensor(x, result, out is None):
                    return result
            elif input_type is _ndarray:
                result = _empty(self._out_shape, _np_float32) if out is None else out
                if type(result) is _ndarray and core.step_array(x, result):
                    return result
            elif input_type is int and self.streams == 1 and self._network.embedding is not None:
                result = _empty_like(self._out_like) if out is None else out
                if core.step_token(x, result, out is None):
                    return result
        return self._step_checked(x, out, mask)

    def _step_checked(self, x: Any, out: Any, mask: Any) -> Any:
        """Compute one step from any input, with all checks in Python."""
        caller = "EventEngine.step"
        selected = None if mask is None else inputs.stream_mask(caller, mask, self.streams)
        if out is None:
            returns_array = inputs.is_array(x) or (inputs.is_sparse(x) and inputs.is_array(x[1]))
            target: Array = np.zeros(self._out_shape, np.float32)
            result: Any = target if returns_array else torch.from_numpy(target)
        else:
            target, result = inputs.output_buffer(caller, out, self._out_shape), out
        block = target.reshape(1, self.streams, -1)
        if inputs.is_sparse(x) and self.streams == 1 and selected is None:
            index, value = inputs.sparse_vector(caller, x, self.input_size)
            self._runner.step_sparse(index, value, block[0])
            return result
        pairs = [x] if inputs.is_sparse(x) and self.streams == 1 else x
        if isinstance(pairs, list | tuple) and pairs and all(inputs.is_sparse(pair) for pair in pairs):
            x = inputs.to_dense(caller, pairs, self._in_shape, selected)
        array, ids = inputs.values_or_tokens(caller, x, self._in_shape, self.streams, self._network.tokens, selected)
        if selected is None:
            self._runner.run(array, ids, False, block)
        else:
            self._runner.step_masked(array, ids, selected, block)
        return result

    def predict(self, x: StepInput) -> Prediction:
        """Compute one step and return its scores as a distribution over the outputs.

        Args:
            x: As in :meth:`step`: for a language model, the id of a word.

        Returns:
            A :class:`~egru.runtime.Prediction` with the methods ``top(k)``, which returns the ``k`` most probable
            outputs, and ``log_probability(output)``.

        Raises:
            TypeError, ValueError, RuntimeError: As :meth:`step` does.

        Example:
            >>> model = egru.models.LanguageModel(vocabulary=100, embedding_size=16, hidden_size=32)
            >>> engine = egru.EventEngine(model)
            >>> prediction = engine.predict(7)
            >>> prediction.top(5).indices.shape
            torch.Size([5])
            >>> round(prediction.log_probability(3), 2) < 0
            True
        """
        scores = self.step(x)
        return Prediction(scores if isinstance(scores, Tensor) else torch.from_numpy(scores), self._core)

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
        array, ids = inputs.values_or_tokens("EventEngine.run", x, in_shape, self.streams, self._network.tokens)
        self._runner.run(array, ids, last, block[0] if last else block)
        return result

    # ---- files and copies -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network and the options of this engine to a file, without its state.

        The file has the safetensors format and contains the weights in the number format of the engine: about a quarter
        of the bytes for int8. Store :attr:`state` separately if needed.

        Args:
            path: File to create or replace, atomically.
        """
        write_engine(Path(path), self._network, self._options)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        weights: WeightFormat | None = None,
        threads: int | None = None,
        streams: int | None = None,
    ) -> Self:
        """Return the engine that :meth:`save` wrote, with a zero state.

        Args:
            path: File that :meth:`save` wrote.
            weights, threads, streams: Options as in the constructor. If None, those of the saved engine. Another
                number format requires a file with float32 weights.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is damaged, is not an engine file, has another version, or contains weights that are
                already rounded to another format than ``weights``.

        Example:
            >>> engine = egru.EventEngine(egru.EGRU(4, 32), weights="int8")
            >>> engine.save("engine.safetensors")
            >>> egru.EventEngine.load("engine.safetensors", streams=8).run(torch.randn(10, 8, 4)).shape
            torch.Size([10, 8, 32])
        """
        network, options = read_engine(Path(path))
        if weights not in (None, options.weights) and options.weights != "float32":
            raise ValueError(
                f"EventEngine.load: {path} contains {options.weights} weights, got weights={weights!r}; save an engine "
                "with float32 weights to choose the format of the loaded one"
            )
        given = {"weights": weights, "threads": threads, "streams": streams}
        changes = {name: value for name, value in given.items() if value is not None}
        return cls._from_network(network, dataclasses.replace(options, **changes))

    @classmethod
    def _from_network(
        cls, network: Network, options: Options, state: Mapping[str, Tensor] | None = None, time: int = 0
    ) -> Self:
        engine = cls.__new__(cls)
        engine._build(network, options)
        if state is not None:
            engine.state, engine.time = state, time
        return engine

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._from_network, (self._network, self._options, self.state, self.time)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._from_network(self._network, self._options, self.state, self.time)  # the network is never modified
