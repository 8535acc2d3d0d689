"""Counts of products with pruned weights."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class PrunedProduct:
    """Counts of the product of a matrix that has zeros.

    Attributes:
        weights: Number of weights.
        nonzero: Number of weights that are not zero.
        macs: Number of multiply-accumulates with a non-zero input and a non-zero weight.
        all_macs: Number of multiply-accumulates with a non-zero input.
    """

    weights: int
    nonzero: int
    macs: int
    all_macs: int

    @classmethod
    @torch.no_grad()
    def count(cls, weight: Tensor, active: Tensor) -> Self | None:
        """Count a product, or return None if no weight is zero.

        Args:
            weight: Matrix, ``(outputs, inputs)``.
            active: How often each input was not zero, ``(inputs,)``.
        """
        columns = weight.count_nonzero(0)
        nonzero = int(columns.sum())
        if nonzero == weight.numel():
            return None
        return cls(weight.numel(), nonzero, int((columns * active).sum()), weight.shape[0] * int(active.sum()))

    @property
    def density(self) -> float:
        """Fraction of the multiply-accumulates with a non-zero input that have a non-zero weight."""
        return self.macs / self.all_macs if self.all_macs else self.nonzero / self.weights


def weight_sparsity(products: Sequence[tuple[PrunedProduct | None, int]]) -> float:
    """Return the fraction of zeros, given the counts and the number of weights of each matrix."""
    zeros = sum(product.weights - product.nonzero for product, _ in products if product is not None)
    return zeros / max(1, sum(weights for _, weights in products))
