"""Gauss-Legendre quadrature on [0, 1], with the matrix that integrates up to each node."""

import functools
from typing import NamedTuple

import numpy as np


class Rule(NamedTuple):
    """``integral of f = w @ f(x)`` and ``integral of f from 0 to x_i = A[i] @ f(x)``, exact for polynomials."""

    x: np.ndarray
    w: np.ndarray
    A: np.ndarray


@functools.cache
def gauss_legendre(nodes: int) -> Rule:
    """The rule of ``nodes`` nodes; ``A`` is exact up to degree ``nodes - 1``."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    # Coefficients of the interpolant in the Legendre basis by discrete orthogonality, then the antiderivative of P_k,
    # (P_{k+1} - P_{k-1}) / (2k + 1), which vanishes at -1.
    k = np.arange(nodes)
    P = np.polynomial.legendre.legvander(x, nodes)
    coefficients = (k[:, None] + 0.5) * P[:, :nodes].T * w
    antiderivative = np.empty((nodes, nodes))
    antiderivative[:, 0] = P[:, 1] + 1
    antiderivative[:, 1:] = (P[:, 2:] - P[:, : nodes - 1]) / (2 * k[1:] + 1)
    return Rule((x + 1) / 2, w / 2, antiderivative @ coefficients / 2)
