"""The types that the loaders return."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Split(NamedTuple):
    """Inputs and labels.

    Attributes:
        x: Sequences, ``(N, T, ...)``.
        y: Labels, ``(N,)``, int64.
    """

    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Classification:
    """A data set of labelled sequences.

    Use the validation split for every decision, and the test split once, for the result.

    Attributes:
        name: Name for reports.
        classes: Number of classes.
        train: Training split.
        validation: Validation split.
        test: Test split.
        decode: Function that converts ``x`` of a batch to the input of a network, on the device of the batch. If None,
            ``x`` is used as it is.
        decode_training: Replaces ``decode`` for training batches, for example to augment them. If None, ``decode`` is
            used.

    Example:
        >>> x, y = torch.rand(100, 20, 1), torch.randint(2, (100,))
        >>> splits = [egru.data.Split(x[rows], y[rows]) for rows in (slice(60), slice(60, 80), slice(80, 100))]
        >>> data = egru.data.Classification("noise", 2, *splits)
        >>> data.train.x.shape
        torch.Size([60, 20, 1])
    """

    name: str
    classes: int
    train: Split
    validation: Split
    test: Split
    decode: Callable[[Tensor], Tensor] | None = dataclasses.field(default=None, kw_only=True)
    decode_training: Callable[[Tensor], Tensor] | None = dataclasses.field(default=None, kw_only=True)


class Text(NamedTuple):
    """A corpus as token ids.

    Attributes:
        name: Name for reports.
        vocabulary: Words; ``vocabulary[id]`` is the word of a token id.
        train: Token ids of the training split, ``(N,)``, int64.
        validation: Token ids of the validation split.
        test: Token ids of the test split.

    Example:
        >>> tokens = torch.tensor([0, 1, 0, 2])
        >>> text = egru.data.Text("tiny", ["the", "cat", "<eos>"], tokens, tokens, tokens)
        >>> " ".join(text.vocabulary[i] for i in text.train)
        'the cat the <eos>'
    """

    name: str
    vocabulary: list[str]
    train: Tensor
    validation: Tensor
    test: Tensor
