"""A stack of recurrent layers: the base class of the classifier and the language model."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from egru.layers import EGRU, ELSTM, ERNN, checks
from egru.layers.dropout import sequence_dropout
from egru.models.baselines import CoRNN, DenseIndRNN, IndRNN
from egru.models.dense import GRU, LSTM
from egru.types import CELLS, Cell, DropoutMode

LAYER_CLASSES: dict[Cell, Callable[..., nn.Module]] = {
    "egru": EGRU,
    "elstm": ELSTM,
    "ernn": ERNN,
    "gru": GRU,
    "lstm": LSTM,
    "cornn": CoRNN,
    "indrnn": IndRNN,
    "dense_indrnn": DenseIndRNN,
}
"""Layer class of each cell name. A class is called with input size, output size and its options."""

_UNSUPPORTED_OPTIONS = {
    "batch_first": "the model arranges the input of its layers; a SequenceClassifier reads (B, T, features), "
    "a LanguageModel (T, B)",
    "dropout_mode": "the layers of a SequenceClassifier have no internal dropout, and dropout between layers is "
    "variational",
    "bidirectional": "the next layer and the readout expect the output of one direction",
    "proj_size": "the next layer and the readout expect hidden_size features",
}
"""Layer options that a stack does not support, with the reason."""


class StackOutput(NamedTuple):
    """Result of a stack.

    Attributes:
        output: Output of the last layer, ``(T, B, H)``.
        dropped: The same after dropout.
        state: State of every layer.
    """

    output: Tensor
    dropped: Tensor
    state: tuple[Any, ...]


class RecurrentStack(nn.Module):
    """One-layer modules ``layer0``, ``layer1``, … with dropout on the output of each.

    Sequences are time first. The layers are direct children of the model, where :class:`egru.EventEngine` expects
    them.

    It is the base class of :class:`SequenceClassifier` and :class:`LanguageModel`.

    Example:
        >>> model = egru.models.SequenceClassifier(1, 64, 10, num_layers=2)
        >>> [type(layer).__name__ for layer in model.layers]
        ['EGRU', 'EGRU']
    """

    dropout_mode: DropoutMode

    def __init__(self) -> None:
        super().__init__()
        self.num_layers = 0
        self.dropout = self.output_dropout = 0.0
        self.dropout_mode = "variational"

    def _add_layers(
        self, sizes: list[int], cell: Cell, dropout: float, output_dropout: float, options: dict[str, Any]
    ) -> None:
        """Add layers from ``sizes[0]`` inputs to ``sizes[-1]`` outputs, all with the same options."""
        owner = type(self).__name__
        checks.choice(owner, "cell", cell, CELLS)
        for name in _UNSUPPORTED_OPTIONS.keys() & options.keys():
            raise TypeError(
                f"{owner}: the layer option {name}={options[name]!r} is not supported: {_UNSUPPORTED_OPTIONS[name]}"
            )
        self.dropout = checks.probability(owner, "dropout", dropout)
        self.output_dropout = checks.probability(owner, "output_dropout", output_dropout)
        self.num_layers = len(sizes) - 1
        for i in range(self.num_layers):
            self.add_module(f"layer{i}", LAYER_CLASSES[cell](sizes[i], sizes[i + 1], **options))

    @property
    def layers(self) -> list[nn.Module]:
        """The layers in the order of execution."""
        return [self.get_submodule(f"layer{i}") for i in range(self.num_layers)]

    def _run_layers(self, x: Tensor, state: Any) -> StackOutput:
        """Run all layers over ``x``, ``(T, B, I)``, from the state of an earlier call, or from zeros if None."""
        if state is None:
            state = (None,) * self.num_layers
        if not isinstance(state, tuple) or len(state) != self.num_layers:
            received = f"a tuple of length {len(state)}" if isinstance(state, tuple) else type(state).__name__
            raise TypeError(
                f"{type(self).__name__}: state must be a tuple of length {self.num_layers}, one entry per layer; "
                f"got {received}"
            )
        states: list[Any] = []
        y = dropped = x
        for i, (layer, start) in enumerate(zip(self.layers, state, strict=True)):
            y, end = layer(dropped, start)
            states.append(end)
            p = self.output_dropout if i == self.num_layers - 1 else self.dropout
            dropped = sequence_dropout(y, p, self.dropout_mode, self.training)
        return StackOutput(y, dropped, tuple(states))


def detach_state(state: Any) -> Any:
    """Detach a state from the autograd graph, for truncated back-propagation through time.

    Args:
        state: Tensors in any nesting of tuples, named tuples and lists, as returned by a model.

    Returns:
        The same structure with detached tensors.

    Example:
        >>> model = egru.models.LanguageModel(vocabulary=100, embedding_size=16, hidden_size=32)
        >>> scores, state = model(torch.randint(100, (35, 4)))
        >>> scores, state = model(torch.randint(100, (35, 4)), egru.models.detach_state(state))
    """
    return map_state(Tensor.detach, state)


def map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Apply a function to every tensor of a nested state and return the same structure."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(map_state(function, part) for part in state))
    if isinstance(state, tuple | list):
        return type(state)(map_state(function, part) for part in state)
    return state
