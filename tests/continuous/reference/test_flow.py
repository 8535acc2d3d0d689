"""The flow of units between events (checks A and J of docs/concepts/continuous.md)."""

import numpy as np
import pytest

from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.crossing import find_crossings
from egru.continuous.reference.flow import FlowSettings, flow, node_states, panel_nodes
from tests.continuous.figures import reached
from tests.continuous.reference.random_units import FINE, units


def test_quadrature_is_exact_for_polynomials():
    for n in (2, 4, 6, 12):
        x, w, A = gauss_legendre(n)
        for k in range(n):
            np.testing.assert_allclose(A @ x**k, x ** (k + 1) / (k + 1), atol=1e-15)
        for k in range(2 * n):
            np.testing.assert_allclose(w @ x**k, 1 / (k + 1), atol=1e-15)


def test_flow_matches_dop853():
    """Check A: to 1e-11."""
    integrate = pytest.importorskip("scipy.integrate", reason="compares with SciPy")
    from tests.continuous.scipy_solver import TIGHT, vector_field

    rng = np.random.default_rng(1)
    worst = 0.0
    for i in range(200):
        a, b, c, _ = units(1, seed=100 + i)
        tau_s, tau_m, dt = rng.uniform(0.3, 3, 3)
        settings = FlowSettings(tau_s, tau_m, FINE, 1.0)
        state = integrate.solve_ivp(vector_field(b, tau_s, tau_m), (0, dt), np.concatenate([a.ravel(), c]), **TIGHT).y[
            :, -1
        ]
        worst = max(worst, abs(flow(a, b, c, dt, settings)[0] - state[3]))
    assert reached("A", "reference", worst) < 1e-11


def test_node_states_match_the_flow_to_each_node():
    a, b, c, _ = units(50)
    settings = FlowSettings(1.3, 0.7, FINE, 1.0)
    h = 0.02
    inside = node_states(c, np.tanh(a[2]), h, panel_nodes(a, b, h, settings), FINE)
    for x, row in zip(FINE.x, inside, strict=True):
        np.testing.assert_allclose(row, flow(a, b, c, x * h, settings), atol=1e-13)


def test_flow_and_crossing_at_rest_match_the_closed_form():
    """Check J: for a = b, c = z + (c - z) exp(-u t / tau_m)."""
    _, b, c, theta = units(400)
    settings = FlowSettings(0.8, 1.7, FINE, 1.0)
    u, z = 1 / (1 + np.exp(-b[0])), np.tanh(b[2])
    t = np.linspace(0.1, 9, 400)
    np.testing.assert_allclose(flow(b, b, c, t, settings), z + (c - z) * np.exp(-u * t / 1.7), atol=1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.where(z > theta, 1.7 / u * np.log((z - c) / (z - theta)), np.inf)
    exact = np.where(exact <= 40, exact, np.inf)
    crossing_times = find_crossings(b, b, c, theta, 40.0, settings).times
    assert np.array_equal(np.isfinite(crossing_times), np.isfinite(exact))
    assert 50 < np.isfinite(exact).sum() < 350
    finite = np.isfinite(exact)
    # A rounding error of the state changes the time by the error divided by the slope.
    rise = (u * (z - theta) / 1.7)[finite]
    miss = (abs(crossing_times[finite] - exact[finite]) * np.minimum(rise, 1)).max()
    assert reached("J", "reference", miss) < 1e-12


def test_flow_with_constant_activations_matches_the_closed_form():
    """Check J: a hardly changes for tau_s = 1e9."""
    a, b, c, _ = units(300)
    settings = FlowSettings(1e9, 1.0, FINE, 1.0)
    u, z = 1 / (1 + np.exp(-a[0])), np.tanh(a[2])
    np.testing.assert_allclose(flow(a, b, c, 3.0, settings), z + (c - z) * np.exp(-u * 3.0), atol=3e-8)
    # The difference is due to the finite tau_s and decreases with it.
    slower = FlowSettings(1e12, 1.0, FINE, 1.0)
    np.testing.assert_allclose(flow(a, b, c, 3.0, slower), z + (c - z) * np.exp(-u * 3.0), atol=3e-11)
