"""Random units for tests of the flow and of the crossing search."""

import numpy as np

from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.flow import flow

FINE = gauss_legendre(12)


def units(count: int, seed: int = 0, spread: float = 3.0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0, spread, (3, count)), rng.normal(0, spread / 2, (3, count))
    theta = rng.uniform(0.02, 0.98, count)
    return a, b, theta - rng.uniform(0.001, 1.2, count), theta


def first_above_on_grid(a, b, c, theta, horizon, settings, steps):
    """Return the first time on a grid at which the state is at or above its threshold."""
    first = np.full(c.shape, np.inf)
    dt = horizon / steps
    for k in range(1, steps + 1):
        c = flow(a, b, c, dt, settings)
        a = b + (a - b) * np.exp(-dt / settings.tau_s)
        first = np.where((c >= theta) & np.isinf(first), k * dt, first)
    return first
