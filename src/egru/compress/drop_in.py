"""Event layers with the calling convention of ``torch.nn.GRU``, ``GRUCell``, ``LSTM`` and ``LSTMCell``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from egru.events import EventState
from egru.layers import EGRU, ELSTM, Direction, EGRUCell

# fmt: off
_APPLIED_TO_BOTH = {
    "__getitem__", "__setitem__", "__mul__", "__rmul__", "__imul__", "bfloat16", "cat", "chunk", "clone", "concat",
    "contiguous", "copy_", "cpu", "cuda", "detach", "detach_", "double", "expand", "fill_", "flatten", "flip", "float",
    "gather", "half", "index_copy_", "index_fill_", "index_put_", "index_select", "masked_fill", "masked_fill_",
    "masked_scatter_", "mul", "mul_", "narrow", "permute", "pin_memory", "repeat", "repeat_interleave",
    "requires_grad_", "reshape", "roll", "scatter_", "select", "split", "squeeze", "stack", "swapaxes", "to",
    "transpose", "type", "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as", "where", "zero_",
}
_COMBINATIONS = {"__add__", "__sub__", "add", "lerp", "sub"}
_IN_PLACE_OPERATORS = {
    "__iadd__", "__iand__", "__ifloordiv__", "__imod__", "__imul__", "__ior__", "__ipow__", "__isub__", "__itruediv__",
    "__ixor__", "__setitem__",
}
# fmt: on
"""Functions that select, arrange, copy, mask or overwrite states act on both parts of a :class:`HiddenState`, and so do
combinations of two states, as in ``mask * new + (1 - mask) * old``."""
_PROPERTIES_OF_BOTH = ("data", "T", "mT", "requires_grad")


class HiddenState(Tensor):
    """The state of a converted GRU: a tensor with the outputs of the last step, as ``torch.nn.GRU`` returns it.

    The attribute ``c`` is the internal state, which differs from the output for units without an event. Passed back to
    the layer, the object continues the sequence exactly. Indexing, stacking, copying, overwriting, detaching,
    multiplication with a mask and sums of two states act on both parts. Other functions see the outputs and return
    plain tensors; if they change the state in place, ``c`` restarts from the changed outputs.

    Args:
        y: Outputs of the last step.
        c: Internal state, of the same shape.

    Example:
        >>> output, h = egru.convert(torch.nn.GRU(4, 8))(torch.randn(20, 2, 4))
        >>> h.shape, h.c.shape
        (torch.Size([1, 2, 8]), torch.Size([1, 2, 8]))
    """

    y: Tensor
    c: Tensor

    @staticmethod
    def __new__(cls, y: Tensor, c: Tensor) -> "HiddenState":
        state = y.as_subclass(cls)
        state.y, state.c = y, c
        return state

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        target = kwargs.get("out", args[0] if args and _writes(name) else None)
        if target is not None and not isinstance(target, HiddenState):
            both = False  # a plain tensor receives the outputs
        elif name in ("__get__", "__set__"):
            both = func.__self__.__name__ in _PROPERTIES_OF_BOTH
        elif name in _COMBINATIONS:
            both = all(isinstance(operand, HiddenState) for operand in args[:2])
        else:
            both = name in _APPLIED_TO_BOTH
        with torch._C.DisableTorchFunctionSubclass():
            y = func(*_halves(args, _output), **_halves(kwargs, _output))
            if both:
                c = func(*_halves(args, _internal), **_halves(kwargs, _internal))
            elif isinstance(target, HiddenState):
                target.c = target.y.clone()
                return target
            else:
                return y
        if isinstance(target, HiddenState):
            return target
        if isinstance(y, tuple | list):
            return tuple(map(HiddenState, y, c))
        return HiddenState(y, c) if isinstance(y, Tensor) else y

    def __reduce_ex__(self, protocol: Any) -> Any:
        return HiddenState, (_output(self), self.c)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


torch.serialization.add_safe_globals([HiddenState])  # torch.load reads states with weights_only=True


def _writes(name: str) -> bool:
    """Return whether a function changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS


def _halves(values: Any, half: Callable[[HiddenState], Tensor]) -> Any:
    return _pytree.tree_map_only(HiddenState, half, values)


def _output(state: HiddenState) -> Tensor:
    return state.y


def _internal(state: HiddenState) -> Tensor:
    return state.c


def _event_state(hx: Any) -> Any:
    """Return the state of an event layer: a plain tensor stands for both halves."""
    return EventState(hx.c, _output(hx)) if isinstance(hx, HiddenState) else hx


def _hidden_state(state: EventState) -> Tensor:
    # torch.export returns plain tensors only.
    return state.y if torch.compiler.is_exporting() else HiddenState(state.y, state.c)


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

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Run the layers over a sequence, as ``torch.nn.GRU`` does."""
        output, state = super().forward(input, _event_state(hx))
        return output, _hidden_state(state)


class ConvertedGRUCell(EGRUCell):
    """An :class:`egru.EGRUCell` that is called like the ``torch.nn.GRUCell`` it was made from.

    ``forward`` returns a :class:`HiddenState`. See :class:`egru.EGRUCell` for the arguments.

    Example:
        >>> cell = egru.convert(torch.nn.GRUCell(4, 8))
        >>> h = cell(torch.randn(2, 4))
        >>> h = cell(torch.randn(2, 4), h)
    """

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Run one step, as ``torch.nn.GRUCell`` does."""
        return _hidden_state(super().forward(input, _event_state(hx)))


class ConvertedLSTM(ELSTM):
    """An :class:`egru.ELSTM` that is called like the ``torch.nn.LSTM`` it was made from; see :func:`egru.convert`.

    ``forward`` returns ``(output, (h_n, c_n))`` and accepts ``(h, c)``. The two tensors are the complete state.

    Example:
        >>> layer = egru.convert(torch.nn.LSTM(4, 8))
        >>> output, (h, c) = layer(torch.randn(20, 2, 4))
        >>> output, (h, c) = layer(torch.randn(20, 2, 4), (h, c))  # continues the sequence
    """

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Run the layers over a sequence, as ``torch.nn.LSTM`` does."""
        output, state = super().forward(input, _lstm_state(self, hx))
        return output, (state.y, state.c)


class ConvertedLSTMCell(ELSTM):
    """One step of :class:`egru.ELSTM`, called like the ``torch.nn.LSTMCell`` it was made from.

    ``forward`` returns ``(h, c)``.

    Example:
        >>> cell = egru.convert(torch.nn.LSTMCell(4, 8))
        >>> h, c = cell(torch.randn(2, 4))
        >>> h, c = cell(torch.randn(2, 4), (h, c))
    """

    def _build_directions(self) -> tuple[Direction, ...]:
        return (Direction("cell", 0, 0, False, self.input_size, ""),)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, hx: Any = None
    ) -> Any:
        """Run one step, as ``torch.nn.LSTMCell`` does."""
        c, y = self._run_step(input, _lstm_state(self, hx))
        return y, c


def _lstm_state(layer: ELSTM, hx: Any) -> EventState | None:
    """Return the state of an event layer from the pair ``(h, c)`` of an LSTM."""
    if hx is None or isinstance(hx, EventState):
        return hx
    if not isinstance(hx, tuple | list) or len(hx) != 2:
        raise TypeError(f"{type(layer).__name__}: hx must be a pair of tensors (h, c), got {type(hx).__name__}")
    h, c = hx
    return EventState(c, h)
