"""Word-level language model: embedding, recurrent layers, and a decoder with the embedding's weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.layers import checks
from egru.layers.dropout import sequence_dropout
from egru.models.stack import RecurrentStack, StackOutput
from egru.types import DROPOUT_MODES


class LanguageModel(RecurrentStack):
    r"""``scores, state = model(tokens, state)``: ids ``(T, B)`` to scores ``(T, B, vocabulary)`` of the next word.

    All layers but the last have ``hidden_size`` units; the last has ``embedding_size``, so that the decoder can use the
    embedding's weights (Merity et al., 2018). With ``cell="lstm"`` and ``dropconnect`` it is the AWD-LSTM; with
    ``cell="dense_indrnn"`` and one layer, that of Li et al. (2019), ``hidden_size`` being its growth.

    Args:
        vocabulary: number of words.
        embedding_size, hidden_size, num_layers, cell: as above; cells as in :class:`~egru.models.SequenceClassifier`.
        word_dropout: probability that a word's vector is zero, everywhere in a call.
        embedding_dropout: on the vectors.
        dropout, output_dropout: on the outputs of all layers but the last, and of the last.
        dropout_mode: "variational", one mask a sequence, or "plain", anew at every step; not of words.
        tied: whether the decoder shares the embedding's weights.
        options: go to every layer: ``dropconnect``, ``threshold``, ``surrogate``, ``zoneout``, …
    """

    def __init__(
        self,
        vocabulary: int,
        embedding_size: int,
        hidden_size: int,
        *,
        num_layers: int = 3,
        cell: str = "egru",
        word_dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        dropout_mode: str = "variational",
        tied: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        me = "LanguageModel"
        checks.positive_int(me, "vocabulary", vocabulary)
        checks.positive_int(me, "num_layers", num_layers)
        self.word_dropout = checks.probability(me, "word_dropout", word_dropout)
        self.embedding_dropout = checks.probability(me, "embedding_dropout", embedding_dropout)
        self.dropout_mode = checks.choice(me, "dropout_mode", dropout_mode, DROPOUT_MODES)
        if cell == "dense_indrnn":
            if num_layers != 1:
                raise ValueError(f"{me}: cell='dense_indrnn' is one deep layer, num_layers=1; got {num_layers}")
            options = {"growth": hidden_size, **options}
        self.embedding = nn.Embedding(vocabulary, embedding_size)
        sizes = [embedding_size, *[hidden_size] * (num_layers - 1), embedding_size]
        self._add_layers(sizes, cell, dropout, output_dropout, options)
        self.readout = Readout(embedding_size, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.readout.bias)
        if tied:
            self.readout.weight = self.embedding.weight
        else:
            nn.init.uniform_(self.readout.weight, -0.1, 0.1)

    def features(self, tokens: Tensor, state: tuple[Any, ...] | None = None) -> StackOutput:
        """Everything but the decoder. The activity regularisers of the baselines read ``dropped`` and ``output``."""
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"LanguageModel: tokens must be integers, (time, batch); got {tokens.dtype} {tuple(tokens.shape)}"
            )
        x = self.embedding(tokens)
        if self.training and self.word_dropout:
            words = torch.ones(self.embedding.num_embeddings, 1, dtype=x.dtype, device=x.device)
            x = x * F.embedding(tokens, F.dropout(words, self.word_dropout))
        x = sequence_dropout(x, self.embedding_dropout, self.dropout_mode, self.training)
        return self._run_layers(x, state)

    def forward(self, tokens: Tensor, state: tuple[Any, ...] | None = None) -> tuple[Tensor, tuple[Any, ...]]:
        _, dropped, state = self.features(tokens, state)
        return self.decode(dropped), state

    def decode(self, output: Tensor) -> Tensor:
        """Scores of the next word."""
        return self.readout(output)


class Readout(nn.Linear):
    """A linear layer whose half-precision products are aligned."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            return aligned_linear(input, self.weight, self.bias)
        return super().forward(input)


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``F.linear`` over features padded to a multiple of 8: half-precision products of others are twice as slow."""
    short = -x.shape[-1] % 8
    return F.linear(F.pad(x, (0, short)), F.pad(weight, (0, short)), bias) if short else F.linear(x, weight, bias)
