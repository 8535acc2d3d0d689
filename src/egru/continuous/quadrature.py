"""Gauss-Legendre quadrature on [0, 1], with the matrix that integrates from 0 to each node."""

import functools
from typing import NamedTuple

import numpy as np


class Rule(NamedTuple):
    """A quadrature rule: the integral of f is ``w @ f(x)``, and that from 0 to ``x[i]`` is ``A[i] @ f(x)``."""

    x: np.ndarray
    w: np.ndarray
    A: np.ndarray


@functools.cache
def gauss_legendre(nodes: int) -> Rule:
    """Return the rule with ``nodes`` nodes.

    ``w`` is exact for polynomials up to degree ``2 nodes - 1``, ``A`` up to degree ``nodes - 1``.
    """
    x, w = np.polynomial.legendre.leggauss(nodes)
    # Interpolate in the Legendre basis by discrete orthogonality, then integrate each P_k. Its antiderivative
    # (P_{k+1} - P_{k-1}) / (2k + 1) vanishes at -1.
    k = np.arange(nodes)
    P = np.polynomial.legendre.legvander(x, nodes)
    coefficients = (k[:, None] + 0.5) * P[:, :nodes].T * w
    antiderivative = np.empty((nodes, nodes))
    antiderivative[:, 0] = P[:, 1] + 1
    antiderivative[:, 1:] = (P[:, 2:] - P[:, : nodes - 1]) / (2 * k[1:] + 1)
    return Rule((x + 1) / 2, w / 2, antiderivative @ coefficients / 2)
