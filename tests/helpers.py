"""Small things several test files need."""

from collections.abc import Iterable

import torch
from torch import Tensor

import egru


def worst(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> float:
    """Largest difference between two lists of tensors, relative to the size of each; None must face None."""
    result = 0.0
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape
            assert torch.isfinite(a).all()
            assert torch.isfinite(b).all()
            result = max(result, ((a - b).abs().max() / (1 + a.abs().max())).item())
    return result


def weighted_sum(outputs: Iterable[Tensor]) -> Tensor:
    """A scalar whose gradient with respect to every output entry is a different fixed number."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros(())
    for out in outputs:
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        total = total.to(out) + (weight * out).sum()
    return total


def lively(layer: egru.EGRU, gain: float = 2.0) -> egru.EGRU:
    """Weights large enough that units fire often and at different times."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("threshold"):
                parameter.mul_(gain)
    return layer
