"""``torch.nn.GRU`` and ``torch.nn.LSTM`` with DropConnect on the recurrent weights."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from egru.layers import checks


def _masked_weights(module: nn.RNNBase, p: float) -> list[Tensor]:
    """Return all weights in torch's order, the recurrent ones with elements set to zero with probability ``p``."""
    names = [name for names in module._all_weights for name in names]
    return [
        F.dropout(module.get_parameter(name), p) if name.startswith("weight_hh") else module.get_parameter(name)
        for name in names
    ]


@contextmanager
def _dropconnect(module: nn.RNNBase, p: float) -> Iterator[None]:
    """Replace the weights by masked ones inside the context, so that torch's ``forward`` uses them.

    Masked weights are not contiguous with the others. cuDNN copies them at every call and warns each time; the warning
    is suppressed.
    """
    weights = module._flat_weights
    module._flat_weights = _masked_weights(module, p)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
            yield
    finally:
        module._flat_weights = weights


class GRU(nn.GRU):
    """``torch.nn.GRU`` with DropConnect on the recurrent weights in training.

    Args:
        input_size, hidden_size, args, options: As in ``torch.nn.GRU``.
        dropconnect: Probability that a recurrent weight is set to zero, with one mask per call. Default: 0.

    Example:
        >>> layer = egru.models.GRU(4, 8, dropconnect=0.5)
        >>> output, h = layer(torch.randn(20, 2, 4))
    """

    def __init__(self, input_size: int, hidden_size: int, *args: Any, dropconnect: float = 0.0, **options: Any) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        self.dropconnect = checks.probability("GRU", "dropconnect", dropconnect)

    def forward(self, input: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        if not (self.dropconnect and self.training):
            return super().forward(input, hx)
        _check_input(self, input)
        with _dropconnect(self, self.dropconnect):
            return super().forward(input, hx)


class LSTM(nn.LSTM):
    """``torch.nn.LSTM`` with DropConnect on the recurrent weights in training, as in the AWD-LSTM (Merity et al. 2018).

    Args:
        input_size, hidden_size, args, options: As in ``torch.nn.LSTM``.
        dropconnect: Probability that a recurrent weight is set to zero, with one mask per call. Default: 0.

    Example:
        >>> layer = egru.models.LSTM(4, 8, dropconnect=0.5)
        >>> output, (h, c) = layer(torch.randn(20, 2, 4))
    """

    def __init__(self, input_size: int, hidden_size: int, *args: Any, dropconnect: float = 0.0, **options: Any) -> None:
        super().__init__(input_size, hidden_size, *args, **options)
        self.dropconnect = checks.probability("LSTM", "dropconnect", dropconnect)

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Any, tuple[Tensor, Tensor]]:
        if not (self.dropconnect and self.training):
            return super().forward(input, hx)
        _check_input(self, input)
        with _dropconnect(self, self.dropconnect):
            return super().forward(input, hx)


def _check_input(module: nn.RNNBase, x: Tensor | PackedSequence) -> None:
    if isinstance(x, PackedSequence):
        return
    if x.dim() not in (2, 3) or x.shape[-1] != module.input_size:
        raise ValueError(
            f"{type(module).__name__}: input must have shape (time, batch, {module.input_size}), got {tuple(x.shape)}"
        )
