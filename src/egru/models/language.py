"""A word-level language model: embedding, recurrent layers, and a decoder that shares the embedding's weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.layers import checks
from egru.layers.dropout import sequence_dropout
from egru.models.stack import RecurrentStack, StackOutput
from egru.types import DROPOUT_MODES, Cell, DropoutMode


class LanguageModel(RecurrentStack):
    r"""Language model that scores the next word at every step.

    All layers except the last have ``hidden_size`` units. The last has ``embedding_size`` units, so that the decoder
    can share the embedding's weights (Merity et al., 2018). With ``cell="lstm"`` and ``dropconnect`` it is the
    AWD-LSTM. With ``cell="dense_indrnn"`` and one layer it is the model of Li et al. (2019); ``hidden_size`` is then
    its growth.

    Args:
        vocabulary: Number of words.
        embedding_size: Size of the word vectors and of the last layer.
        hidden_size: Number of units of the other layers.
        num_layers: Number of recurrent layers. Default: 3.
        cell: Recurrent layer, one of :data:`egru.types.CELLS`. Default: ``"egru"``.
        word_dropout: Probability that a word's vector is zero, at all its positions in a call. Default: 0.
        embedding_dropout: Dropout probability of the word vectors. Default: 0.
        dropout: Dropout probability of the outputs of all layers except the last. Default: 0.
        output_dropout: Dropout probability of the output of the last layer. Default: 0.
        dropout_mode: ``"variational"`` draws one mask per sequence, ``"plain"`` one per step. Does not apply to
            ``word_dropout``. Default: ``"variational"``.
        tied: Whether the decoder shares the embedding's weights. Default: True.
        options: Further arguments of every layer, such as ``dropconnect``, ``threshold``, ``surrogate`` or
            ``zoneout``.

    Inputs:
        - **tokens**: Word ids, ``(T, B)``.
        - **state**: State returned by an earlier call, to continue its text. If None, start from zeros.

    Returns:
        - **scores**: Scores of the next word, ``(T, B, vocabulary)``.
        - **state**: Tuple with the state of every layer.

    Raises:
        TypeError: If an option is not supported or has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch, egru
        >>> model = egru.models.LanguageModel(vocabulary=100, embedding_size=16, hidden_size=32)
        >>> scores, state = model(torch.randint(100, (35, 4)))
        >>> scores.shape
        torch.Size([35, 4, 100])
    """

    def __init__(
        self,
        vocabulary: int,
        embedding_size: int,
        hidden_size: int,
        *,
        num_layers: int = 3,
        cell: Cell = "egru",
        word_dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        dropout_mode: DropoutMode = "variational",
        tied: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        owner = "LanguageModel"
        checks.positive_int(owner, "vocabulary", vocabulary)
        checks.positive_int(owner, "num_layers", num_layers)
        self.word_dropout = checks.probability(owner, "word_dropout", word_dropout)
        self.embedding_dropout = checks.probability(owner, "embedding_dropout", embedding_dropout)
        self.dropout_mode = checks.choice(owner, "dropout_mode", dropout_mode, DROPOUT_MODES)
        if cell == "dense_indrnn":
            if num_layers != 1:
                raise ValueError(f"{owner}: cell='dense_indrnn' requires num_layers=1, got {num_layers}")
            options = {"growth": hidden_size, **options}
        self.embedding = nn.Embedding(vocabulary, embedding_size)
        sizes = [embedding_size, *[hidden_size] * (num_layers - 1), embedding_size]
        self._add_layers(sizes, cell, dropout, output_dropout, options)
        self.readout = AlignedLinear(embedding_size, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.readout.bias)
        if tied:
            self.readout.weight = self.embedding.weight
        else:
            nn.init.uniform_(self.readout.weight, -0.1, 0.1)

    def features(self, tokens: Tensor, state: tuple[Any, ...] | None = None) -> StackOutput:
        """Run the model without its decoder.

        Args:
            tokens: Word ids, ``(T, B)``.
            state: State returned by an earlier call, or None.

        Returns:
            The output of the last layer before and after dropout, which the activity regularisers of the baselines
            use, and the state.
        """
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"LanguageModel: tokens must be integers of shape (time, batch), "
                f"got {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        x = self.embedding(tokens)
        if self.training and self.word_dropout:
            words = torch.ones(self.embedding.num_embeddings, 1, dtype=x.dtype, device=x.device)
            x = x * F.embedding(tokens, F.dropout(words, self.word_dropout))
        x = sequence_dropout(x, self.embedding_dropout, self.dropout_mode, self.training)
        return self._run_layers(x, state)

    def forward(self, tokens: Tensor, state: tuple[Any, ...] | None = None) -> tuple[Tensor, tuple[Any, ...]]:
        """Score the next word at every step; see the class for arguments and results."""
        _, dropped, state = self.features(tokens, state)
        return self.decode(dropped), state

    def decode(self, output: Tensor) -> Tensor:
        """Return the scores of the next word for outputs of the last layer."""
        return self.readout(output)


class AlignedLinear(nn.Linear):
    """A linear layer that pads its half-precision products on a GPU; see :func:`aligned_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            return aligned_linear(input, self.weight, self.bias)
        return super().forward(input)


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute ``F.linear`` with the features padded to a multiple of 8.

    Half-precision products with other sizes take twice as long on a GPU.
    """
    padding = -x.shape[-1] % 8
    return F.linear(F.pad(x, (0, padding)), F.pad(weight, (0, padding)), bias) if padding else F.linear(x, weight, bias)
