"""Recurrent layers one above the other: what the classifier and the language model share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from egru.layers import EGRU, ELSTM, ERNN, checks
from egru.layers.dropout import sequence_dropout
from egru.models.baselines import CoRNN, DenseIndRNN, IndRNN
from egru.models.dense import GRU, LSTM

CELLS: dict[str, Callable[..., nn.Module]] = {
    "egru": EGRU,
    "elstm": ELSTM,
    "ernn": ERNN,
    "gru": GRU,
    "lstm": LSTM,
    "cornn": CoRNN,
    "indrnn": IndRNN,
    "dense_indrnn": DenseIndRNN,
}
"""Kinds of layer by name; each is called with input and output size and its own options."""

REFUSED = {
    "batch_first": "the model arranges what its layers read; a SequenceClassifier reads (B, T, features), "
    "a LanguageModel (T, B)",
    "dropout_mode": "a layer of a SequenceClassifier has no dropout inside; what the model drops between layers is "
    "variational",
    "bidirectional": "the next layer and the readout are as wide as one direction",
    "proj_size": "the next layer and the readout are as wide as the layer",
}
"""Options of a layer that do not fit into a stack, and why."""


class StackOutput(NamedTuple):
    """Of the last layer: its output ``(T, B, H)`` as it came, the same after dropout, and the state of every layer."""

    output: Tensor
    dropped: Tensor
    state: tuple[Any, ...]


class RecurrentStack(nn.Module):
    """One-layer modules ``layer0``, ``layer1``, …, time first, dropout on what each puts out, variational by default.

    They are children of the model itself, where :class:`egru.EventEngine` looks for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_layers = 0
        self.dropout = self.output_dropout = 0.0
        self.dropout_mode = "variational"

    def _add_layers(
        self, sizes: list[int], cell: str, dropout: float, output_dropout: float, options: dict[str, Any]
    ) -> None:
        """Layers from ``sizes[0]`` inputs to ``sizes[-1]`` outputs; ``options`` go to each."""
        me = type(self).__name__
        checks.choice(me, "cell", cell, list(CELLS))
        for name in REFUSED.keys() & options.keys():
            raise TypeError(f"{me}: {name}={options[name]!r} is no option of its layers: {REFUSED[name]}; leave it out")
        self.dropout = checks.probability(me, "dropout", dropout)
        self.output_dropout = checks.probability(me, "output_dropout", output_dropout)
        self.num_layers = len(sizes) - 1
        for i in range(self.num_layers):
            self.add_module(f"layer{i}", CELLS[cell](sizes[i], sizes[i + 1], **options))

    @property
    def layers(self) -> list[nn.Module]:
        return [self.get_submodule(f"layer{i}") for i in range(self.num_layers)]

    def _run_layers(self, x: Tensor, state: Any) -> StackOutput:
        """``x`` of shape ``(T, B, I)``; ``state`` is what the last call gave back, or None to start from rest."""
        if state is None:
            state = (None,) * self.num_layers
        if not isinstance(state, tuple) or len(state) != self.num_layers:
            got = f"a tuple of {len(state)}" if isinstance(state, tuple) else type(state).__name__
            raise TypeError(
                f"{type(self).__name__}: state must be a tuple of {self.num_layers}, one a layer; got {got}"
            )
        after: list[Any] = []
        y = dropped = x
        for i, (layer, before) in enumerate(zip(self.layers, state, strict=True)):
            y, last = layer(dropped, before)
            after.append(last)
            p = self.output_dropout if i == self.num_layers - 1 else self.dropout
            dropped = sequence_dropout(y, p, self.dropout_mode, self.training)
        return StackOutput(y, dropped, tuple(after))


def detached(state: Any) -> Any:
    """The same state, of whatever nesting, cut off from the graph: what truncated BPTT carries on."""
    return map_state(Tensor.detach, state)


def map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """``function`` of every tensor in a state of whatever nesting."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(map_state(function, part) for part in state))
    if isinstance(state, tuple | list):
        return type(state)(map_state(function, part) for part in state)
    return state
