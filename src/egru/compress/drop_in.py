"""Event layers with the calling convention of ``torch.nn.GRU``, ``GRUCell``, ``LSTM`` and ``LSTMCell``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from egru.compress.hidden_state import HiddenState
from egru.events import EventState
from egru.layers import EGRU, ELSTM, Direction, EGRUCell, EventRNN


def _event_state(hx: Any) -> Any:
    """Return the state of an event layer: a plain tensor stands for both halves."""
    return EventState(hx.c, hx.y) if isinstance(hx, HiddenState) else hx


def _hidden_state(state: EventState) -> Tensor:
    # torch.export returns plain tensors only.
    return state.y if torch.compiler.is_exporting() else HiddenState(state.y, state.c)


def _run(layer: EventRNN, run: Callable[..., Any], input: Any, hx: Any, dim: int) -> Any:
    """Run a layer whose input has the batch in dimension ``dim``. As in torch, there may be no sequences."""
    if not isinstance(input, Tensor) or input.dim() <= dim or input.shape[dim] or input.shape.count(0) > 1:
        return run(input, hx)
    size = [size or 1 for size in input.shape]
    observers, layer._observers = layer._observers, []  # they would count a sequence
    try:
        result = run(input.new_zeros(size), None)
    finally:
        layer._observers = observers
    if isinstance(result, EventState):  # of a cell
        return EventState(*(half[:0] for half in result))
    output, state = result
    return output.narrow(dim, 0, 0), EventState(*(half[:, :0] for half in state))


class ConvertedGRU(EGRU):
    """An :class:`egru.EGRU` that is called like the ``torch.nn.GRU`` it was made from; see :func:`egru.convert`.

    ``forward`` returns ``(output, h_n)`` with a :class:`HiddenState`. As ``hx`` it accepts this object, an
    :class:`egru.EventState`, or a tensor, which stands for the state and the last output. See :class:`egru.EGRU` for
    the arguments.

    Example:
        >>> layer = egru.convert(torch.nn.GRU(4, 8))
        >>> output, h = layer(torch.randn(20, 2, 4))
        >>> output, h = layer(torch.randn(20, 2, 4), h)  # continues the sequence
    """

    _state_names = ("hx", "hx")

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Run the layers over a sequence, as ``torch.nn.GRU`` does."""
        batch = 0 if self.batch_first else 1
        output, state = _run(self, super().forward, input, _event_state(hx), batch)
        return output, _hidden_state(state)


class ConvertedGRUCell(EGRUCell):
    """An :class:`egru.EGRUCell` that is called like the ``torch.nn.GRUCell`` it was made from.

    ``forward`` returns a :class:`HiddenState`. See :class:`egru.EGRUCell` for the arguments.

    Example:
        >>> cell = egru.convert(torch.nn.GRUCell(4, 8))
        >>> h = cell(torch.randn(2, 4))
        >>> h = cell(torch.randn(2, 4), h)
    """

    _state_names = ("hx", "hx")

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Run one step, as ``torch.nn.GRUCell`` does."""
        return _hidden_state(_run(self, super().forward, input, _event_state(hx), 0))


class ConvertedLSTM(ELSTM):
    """An :class:`egru.ELSTM` that is called like the ``torch.nn.LSTM`` it was made from; see :func:`egru.convert`.

    ``forward`` returns ``(output, (h_n, c_n))`` and accepts ``(h, c)``. The two tensors are the complete state.

    Example:
        >>> layer = egru.convert(torch.nn.LSTM(4, 8))
        >>> output, (h, c) = layer(torch.randn(20, 2, 4))
        >>> output, (h, c) = layer(torch.randn(20, 2, 4), (h, c))  # continues the sequence
    """

    _state_names = ("c of hx", "h of hx")

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Run the layers over a sequence, as ``torch.nn.LSTM`` does."""
        batch = 0 if self.batch_first else 1
        output, state = _run(self, super().forward, input, _lstm_state(self, hx), batch)
        return output, (state.y, state.c)


class ConvertedLSTMCell(ELSTM):
    """One step of :class:`egru.ELSTM`, called like the ``torch.nn.LSTMCell`` it was made from.

    ``forward`` returns ``(h, c)``.

    Example:
        >>> cell = egru.convert(torch.nn.LSTMCell(4, 8))
        >>> h, c = cell(torch.randn(2, 4))
        >>> h, c = cell(torch.randn(2, 4), (h, c))
    """

    _state_names = ConvertedLSTM._state_names

    def _build_directions(self) -> tuple[Direction, ...]:
        return (Direction("cell", 0, 0, False, self.input_size, ""),)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, hx: Any = None
    ) -> Any:
        """Run one step, as ``torch.nn.LSTMCell`` does."""
        c, y = _run(self, self._run_step, input, _lstm_state(self, hx), 0)
        return y, c


def _lstm_state(layer: ELSTM, hx: Any) -> EventState | None:
    """Return the state of an event layer from the pair ``(h, c)`` of an LSTM."""
    if hx is None or isinstance(hx, EventState):
        return hx
    if not isinstance(hx, tuple | list) or len(hx) != 2:
        raise TypeError(f"{type(layer).__name__}: hx must be a pair of tensors (h, c), got {type(hx).__name__}")
    h, c = hx
    return EventState(c, h)
