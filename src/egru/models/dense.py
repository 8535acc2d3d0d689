"""torch's GRU and LSTM with DropConnect: some recurrent weights left out in training, one mask per call."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.layers import checks


def _dropped(module: nn.RNNBase, p: float) -> list[Tensor]:
    """The weights in torch's order, recurrent ones masked; the same mask at every step."""
    names = [name for names in module._all_weights for name in names]
    return [
        F.dropout(module.get_parameter(name), p) if name.startswith("weight_hh") else module.get_parameter(name)
        for name in names
    ]


@contextmanager
def _scattered() -> Iterator[None]:
    """Masked weights lie apart from the others; cuDNN copies them together at every call and says so every time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
        yield


class GRU(nn.GRU):
    """``torch.nn.GRU`` with ``dropconnect``; without it, and in evaluation, torch's own."""

    def __init__(self, input_size: int, hidden_size: int, *, dropconnect: float = 0.0, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.dropconnect = checks.probability("GRU", "dropconnect", dropconnect)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not (self.dropconnect and self.training):
            return super().forward(input, state)
        state = _rest(self, input) if state is None else state
        how = (self.bias, self.num_layers, self.dropout, True, self.bidirectional, self.batch_first)
        with _scattered():
            return torch.gru(input, state, _dropped(self, self.dropconnect), *how)


class LSTM(nn.LSTM):
    """``torch.nn.LSTM`` with ``dropconnect``: three of them make an AWD-LSTM (Merity et al., 2018)."""

    def __init__(self, input_size: int, hidden_size: int, *, dropconnect: float = 0.0, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.dropconnect = checks.probability("LSTM", "dropconnect", dropconnect)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not (self.dropconnect and self.training):
            return super().forward(input, state)
        h, c = (_rest(self, input), _rest(self, input)) if state is None else state
        how = (self.bias, self.num_layers, self.dropout, True, self.bidirectional, self.batch_first)
        with _scattered():
            y, h, c = torch.lstm(input, (h, c), _dropped(self, self.dropconnect), *how)
        return y, (h, c)


def _rest(module: nn.RNNBase, x: Tensor) -> Tensor:
    if x.dim() != 3 or x.shape[-1] != module.input_size:
        raise ValueError(
            f"{type(module).__name__}: input must have shape (time, batch, {module.input_size}), got {tuple(x.shape)}"
        )
    rows = x.shape[0] if module.batch_first else x.shape[1]
    return x.new_zeros(module.num_layers * (2 if module.bidirectional else 1), rows, module.hidden_size)
