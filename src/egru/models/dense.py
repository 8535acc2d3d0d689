"""torch's GRU and LSTM with DropConnect: some recurrent weights left out in training, one mask per call."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from egru.layers import checks


def _dropped(module: nn.RNNBase, p: float) -> list[Tensor]:
    """The weights in torch's order, recurrent ones masked; the same mask at every step."""
    names = [name for names in module._all_weights for name in names]
    return [
        F.dropout(module.get_parameter(name), p) if name.startswith("weight_hh") else module.get_parameter(name)
        for name in names
    ]


@contextmanager
def _masked(module: nn.RNNBase, p: float) -> Iterator[None]:
    """Inside, torch's own forward sees the weights of :func:`_dropped`: all it accepts is accepted.

    Masked weights lie apart from the others; cuDNN copies them together at every call and says so every time.
    """
    whole = module._flat_weights
    module._flat_weights = _dropped(module, p)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
            yield
    finally:
        module._flat_weights = whole


class GRU(nn.GRU):
    """``torch.nn.GRU`` with ``dropconnect``; without it, and in evaluation, torch's own."""

    def __init__(self, input_size: int, hidden_size: int, *args: Any, dropconnect: float = 0.0, **options: Any) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        self.dropconnect = checks.probability("GRU", "dropconnect", dropconnect)

    def forward(self, input: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        if not (self.dropconnect and self.training):
            return super().forward(input, hx)
        _check(self, input)
        with _masked(self, self.dropconnect):
            return super().forward(input, hx)


class LSTM(nn.LSTM):
    """``torch.nn.LSTM`` with ``dropconnect``: three of them make an AWD-LSTM (Merity et al., 2018)."""

    def __init__(self, input_size: int, hidden_size: int, *args: Any, dropconnect: float = 0.0, **options: Any) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        self.dropconnect = checks.probability("LSTM", "dropconnect", dropconnect)

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Any, tuple[Tensor, Tensor]]:
        if not (self.dropconnect and self.training):
            return super().forward(input, hx)
        _check(self, input)
        with _masked(self, self.dropconnect):
            return super().forward(input, hx)


def _check(module: nn.RNNBase, x: Tensor | PackedSequence) -> None:
    if isinstance(x, PackedSequence):
        return
    if x.dim() not in (2, 3) or x.shape[-1] != module.input_size:
        raise ValueError(
            f"{type(module).__name__}: input must have shape (time, batch, {module.input_size}), got {tuple(x.shape)}"
        )
