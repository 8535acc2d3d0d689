"""What every loader returns."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Split(NamedTuple):
    """``x`` of shape ``(N, T, ...)`` and integer labels ``y``."""

    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Classification:
    """A labelled data set of sequences; validation decides, the test split is touched once.

    ``decode`` turns ``x`` of a batch into what a network reads, on its device; None where it is that already.
    """

    name: str
    classes: int
    train: Split
    validation: Split
    test: Split
    decode: Callable[[Tensor], Tensor] | None = dataclasses.field(default=None, kw_only=True)


class Text(NamedTuple):
    """A corpus as token ids, one int64 vector a split; ``vocabulary[id]`` is the word."""

    name: str
    vocabulary: list[str]
    train: Tensor
    validation: Tensor
    test: Tensor


def batchify(tokens: Tensor, batch: int) -> Tensor:
    """``(steps, batch)``: the text cut into ``batch`` consecutive pieces that are read side by side; the rest is left.

    Column ``b`` continues at row ``t + 1``, so that state carried from one window of rows to the next stays true.
    """
    if tokens.dim() != 1:
        raise ValueError(f"batchify: tokens must be one vector, got shape {tuple(tokens.shape)}")
    if not 1 <= batch <= len(tokens):
        raise ValueError(f"batchify: batch must lie between 1 and the {len(tokens)} tokens, got {batch!r}")
    steps = len(tokens) // batch
    return tokens[: steps * batch].view(batch, steps).t().contiguous()
