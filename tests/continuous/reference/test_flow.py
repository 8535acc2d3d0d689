"""One unit between events: the flow, the window in which it can fire, and the crossing search (checks A, G and J)."""

import itertools

import numpy as np
import pytest

from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.crossing import find_crossings, lower_bound, window
from egru.continuous.reference.flow import FlowSettings, flow, node_states, panel_nodes
from tests.continuous.figures import reached

FINE = gauss_legendre(12)


def units(count: int, seed: int = 0, spread: float = 3.0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0, spread, (3, count)), rng.normal(0, spread / 2, (3, count))
    theta = rng.uniform(0.02, 0.98, count)
    return a, b, theta - rng.uniform(0.001, 1.2, count), theta


def test_rule_integrates_polynomials_up_to_each_node():
    for n in (2, 4, 6, 12):
        x, w, A = gauss_legendre(n)
        for k in range(n):
            np.testing.assert_allclose(A @ x**k, x ** (k + 1) / (k + 1), atol=1e-15)
        for k in range(2 * n):
            np.testing.assert_allclose(w @ x**k, 1 / (k + 1), atol=1e-15)


def test_flow_against_dop853():
    """A: 1e-11 demanded."""
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


def test_states_at_the_nodes_are_the_flow_to_the_nodes():
    a, b, c, _ = units(50)
    settings = FlowSettings(1.3, 0.7, FINE, 1.0)
    h = 0.02
    inside = node_states(c, np.tanh(a[2]), h, panel_nodes(a, b, h, settings), FINE)
    for x, row in zip(FINE.x, inside, strict=True):
        np.testing.assert_allclose(row, flow(a, b, c, x * h, settings), atol=1e-13)


def test_flow_and_crossing_at_rest_have_a_closed_form():
    """J: a = b, so that c = z + (c - z) exp(-u t / tau_m)."""
    _, b, c, theta = units(400)
    settings = FlowSettings(0.8, 1.7, FINE, 1.0)
    u, z = 1 / (1 + np.exp(-b[0])), np.tanh(b[2])
    t = np.linspace(0.1, 9, 400)
    np.testing.assert_allclose(flow(b, b, c, t, settings), z + (c - z) * np.exp(-u * t / 1.7), atol=1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.where(z > theta, 1.7 / u * np.log((z - c) / (z - theta)), np.inf)
    exact = np.where(exact <= 40, exact, np.inf)
    found = find_crossings(b, b, c, theta, 40.0, settings).times
    assert np.array_equal(np.isfinite(found), np.isfinite(exact))
    assert 50 < np.isfinite(exact).sum() < 350
    finite = np.isfinite(exact)
    # An error of the state of one rounding moves the time by itself over the slope.
    rise = (u * (z - theta) / 1.7)[finite]
    miss = (abs(found[finite] - exact[finite]) * np.minimum(rise, 1)).max()
    assert reached("J", "reference", miss) < 1e-12


def test_still_activations_are_the_hold_model():
    """J: tau_s = 1e9 leaves a where it is."""
    a, b, c, _ = units(300)
    settings = FlowSettings(1e9, 1.0, FINE, 1.0)
    u, z = 1 / (1 + np.exp(-a[0])), np.tanh(a[2])
    np.testing.assert_allclose(flow(a, b, c, 3.0, settings), z + (c - z) * np.exp(-u * 3.0), atol=3e-8)
    # The distance is that of the finite tau_s: it falls with it.
    slower = FlowSettings(1e12, 1.0, FINE, 1.0)
    np.testing.assert_allclose(flow(a, b, c, 3.0, slower), z + (c - z) * np.exp(-u * 3.0), atol=3e-11)


def brute(a, b, c, theta, horizon, settings, steps):
    """First time on a grid at which the state is at or above its threshold."""
    first = np.full(c.shape, np.inf)
    dt = horizon / steps
    for k in range(1, steps + 1):
        c = flow(a, b, c, dt, settings)
        a = b + (a - b) * np.exp(-dt / settings.tau_s)
        first = np.where((c >= theta) & np.isinf(first), k * dt, first)
    return first


def test_no_crossing_is_missed():
    """G: against a fine grid; every time found is a crossing from below, and no grid point before it is above."""
    count = 20_000
    a, b, c, theta = units(count, seed=5)
    extreme = np.arange(count) % 7 == 0
    a[:, extreme] *= 4
    b[:, extreme] *= 2
    settings = FlowSettings(0.7, 1.1, FINE, 1.0)
    search = find_crossings(a, b, c, theta, 4.0, settings)
    found = search.times
    dt = 4.0 / 200
    first = brute(a, b, c, theta, 4.0, FlowSettings(0.7, 1.1, gauss_legendre(6), 0.5), 200)
    assert np.isfinite(first).sum() > count / 20
    missed, late = np.isfinite(first) & np.isinf(found), found > first + 1e-12
    assert reached("G", "reference", (missed | late).sum()) == 0
    caught = np.isfinite(found) & np.isfinite(first)
    assert (found[caught] > first[caught] - dt - 1e-12).all()  # early
    hit = np.isfinite(found)
    at, bt, ct = a[:, hit], b[:, hit], c[hit]
    assert abs(flow(at, bt, ct, found[hit], settings) - theta[hit]).max() < 1e-13
    assert (np.tanh(bt[2] + (at[2] - bt[2]) * np.exp(-found[hit] / 0.7)) > theta[hit]).all()
    # Found although the grid saw nothing: a hop over the threshold between two points.
    assert (np.isfinite(found) & np.isinf(first)).sum() < count / 200
    assert search.evaluations / max(1, search.solves) < 12


def test_lower_bound_holds_and_is_exact_at_rest():
    a, b, c, theta = units(5000, seed=8)
    settings = FlowSettings(0.7, 1.1, FINE, 1.0)
    found = find_crossings(a, b, c, theta, 6.0, settings).times
    hit = np.isfinite(found)
    bound = np.maximum(lower_bound(a, b, c, theta, settings), window(a, b, theta, settings)[0])
    assert (bound[hit] <= found[hit]).all()
    found = find_crossings(b, b, c, theta, 6.0, settings).times
    hit = np.isfinite(found)
    np.testing.assert_allclose(lower_bound(b, b, c, theta, settings)[hit], found[hit], rtol=1e-11)
    # A horizon just past the crossing, where the bound is tight, still shows it.
    again = find_crossings(b[:, hit], b[:, hit], c[hit], theta[hit], found[hit] * (1 + 1e-9), settings).times
    assert np.isfinite(again).all()


def test_grazing_is_decided_exactly():
    """A unit whose largest c is a hair above or below its threshold; at tangency the slope falls like a square root."""
    settings = FlowSettings(1.0, 1.0, FINE, 1.0)
    a, b, c = np.array([[1.0], [0.0], [2.0]]), np.array([[1.0], [0.0], [-2.0]]), np.array([0.0])
    lo, hi = 0.01, 0.9
    for _ in range(200):  # the threshold that is just reached: c = theta where z = theta
        theta = np.array([0.5 * (lo + hi)])
        _, w1 = window(a, b, theta, settings)
        lo, hi = (float(theta[0]), hi) if flow(a, b, c, w1, settings)[0] >= theta[0] else (lo, float(theta[0]))
    top = 0.5 * (lo + hi)
    slopes = []
    for gap in (1e-6, 1e-8, 1e-10, 1e-12):
        theta = np.array([top - gap])
        time = find_crossings(a, b, c, theta, 10.0, settings).times[0]
        assert np.isfinite(time)
        slopes.append(np.tanh(b[2, 0] + (a[2, 0] - b[2, 0]) * np.exp(-time)) - theta[0])
        assert np.isinf(find_crossings(a, b, c, np.array([top + gap]), 10.0, settings).times[0])
    assert all(s > 0 for s in slopes)
    ratios = [s / t for s, t in itertools.pairwise(slopes)]
    assert all(9.5 < ratio < 10.5 for ratio in ratios[:2])  # 1e-2 in the gap is 1e-1 in the slope


def test_units_pause_between_events_at_least_the_refractory_time():
    """P3: from reset, no unit gets to its threshold before tau_m log(1 / (1 - theta))."""
    a, b, _, theta = units(5000, seed=9, spread=20)
    settings = FlowSettings(0.7, 1.1, FINE, 1.0)
    found = find_crossings(a, b, np.zeros_like(theta), theta, 6.0, settings).times
    assert np.isfinite(found).sum() > 1000
    assert (found >= -1.1 * np.log1p(-theta) * (1 - 1e-12)).all()


def test_a_unit_above_its_threshold_fires_only_after_falling_below():
    settings = FlowSettings(1.0, 1.0, FINE, 1.0)
    theta = np.full(3, 0.4)
    c = np.full(3, 0.6)
    b = np.array([[3.0] * 3, [0.0] * 3, [2.0, 2.0, 2.0]])
    a = np.array([[3.0] * 3, [0.0] * 3, [1.0, -20.0, 0.3]])  # rising already; falls far first; too late to fall
    times = find_crossings(a, b, c, theta, 20.0, settings).times
    assert np.isinf(times[[0, 2]]).all()
    assert np.isfinite(times[1])
    assert flow(a[:, 1:2], b[:, 1:2], c[1:2], times[1] * 0.9, settings)[0] < 0.4
