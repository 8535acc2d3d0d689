"""Helpers that several test files share."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import egru
from egru.data import Split

PATIENCE = 240.0
"""Seconds to wait for another process. Only a test that hangs takes as long: a busy machine is no failure."""


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until ``condition`` returns a true value; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.02)


def worst(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> float:
    """Return the largest relative difference between two lists of tensors. None matches only None."""
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
    """Return a scalar whose gradient with respect to every output entry is a different fixed number."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros(())
    for out in outputs:
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        total = total.to(out) + (weight * out).sum()
    return total


def lively(layer: egru.EGRU, gain: float = 2.0) -> egru.EGRU:
    """Scale the weights of a layer so that its units emit events often and at different times."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("threshold"):
                parameter.mul_(gain)
    return layer


def mnist_sample() -> Split:
    """Return every 20th digit of the MNIST test set, 500 in total, in the form of ``egru.data.sequential_mnist``.

    The file contains the published bytes: ``images[::20]`` and ``labels[::20]`` of what ``parse_idx`` reads.
    """
    with np.load(Path(__file__).with_name("mnist-sample.npz")) as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    return Split((images.float() / 255).flatten(1)[..., None], labels.long())
