"""Handwritten digits, 8 by 8 pixels, that ship inside scikit-learn: one pixel at a time, 64 steps."""

import itertools
from typing import Any

import numpy as np
import torch

from egru.data.sets import Classification, Split


def digits(*, permuted: bool = False, seed: int = 0) -> Classification:
    """The 1,797 digits, row by row or in one fixed random order of pixels, as 60 / 15 / 25 % splits.

    Splits and permutation depend on ``seed`` alone. Needs scikit-learn (``pip install 'egru[demo]'``).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'egru[demo]'") from error
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
