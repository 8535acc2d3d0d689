"""The handwritten digits of scikit-learn, 8 by 8 pixels, as sequences of 64 pixels."""

import itertools
from typing import Any

import numpy as np
import torch

from egru.data.datasets import Classification, Split


def digits(*, permuted: bool = False, seed: int = 0) -> Classification:
    """Load the digits that ship with scikit-learn, one pixel per step.

    Args:
        permuted: If True, apply one random permutation to the pixels of all images.
        seed: Seed of the splits and of the permutation.

    Returns:
        1,078 / 270 / 449 sequences (60 / 15 / 25 %) with ``x`` of shape ``(N, 64, 1)``, float32 in [0, 1], and 10
        classes.

    Raises:
        ImportError: If scikit-learn is not installed (``pip install 'egru[demo]'``).

    Example:
        >>> data = egru.data.digits()
        >>> data.train.x.shape, data.classes
        (torch.Size([1078, 64, 1]), 10)
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("egru.data.digits requires scikit-learn: pip install 'egru[demo]'") from error
    data: Any = load_digits()
    rng = np.random.default_rng(seed)
    order, pixels = rng.permutation(len(data.target)), rng.permutation(64)
    images = data.images.reshape(-1, 64) / 16
    if permuted:
        images = images[:, pixels]
    x = torch.from_numpy(images[order].astype(np.float32))[..., None]
    y = torch.from_numpy(data.target[order].astype(np.int64))
    n = len(y)
    edges = [0, round(0.6 * n), round(0.75 * n), n]
    splits = [Split(x[a:b].contiguous(), y[a:b].contiguous()) for a, b in itertools.pairwise(edges)]
    return Classification("permuted digits" if permuted else "digits", 10, *splits)
