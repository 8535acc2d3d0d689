"""The search for threshold crossings (check G of docs/concepts/continuous.md)."""

import itertools

import numpy as np

from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.crossing import find_crossings, lower_bound, window
from egru.continuous.reference.flow import FlowSettings, flow
from tests.continuous.figures import reached
from tests.continuous.reference.random_units import FINE, first_above_on_grid, units


def test_no_crossing_is_missed():
    """Check G: against a fine grid."""
    count = 20_000
    a, b, c, theta = units(count, seed=5)
    extreme = np.arange(count) % 7 == 0
    a[:, extreme] *= 4
    b[:, extreme] *= 2
    settings = FlowSettings(0.7, 1.1, FINE, 1.0)
    search = find_crossings(a, b, c, theta, 4.0, settings)
    crossing_times = search.times
    dt = 4.0 / 200
    first = first_above_on_grid(a, b, c, theta, 4.0, FlowSettings(0.7, 1.1, gauss_legendre(6), 0.5), 200)
    assert np.isfinite(first).sum() > count / 20
    missed, late = np.isfinite(first) & np.isinf(crossing_times), crossing_times > first + 1e-12
    assert reached("G", "reference", (missed | late).sum()) == 0
    caught = np.isfinite(crossing_times) & np.isfinite(first)
    assert (crossing_times[caught] > first[caught] - dt - 1e-12).all()  # early
    hit = np.isfinite(crossing_times)
    at, bt, ct = a[:, hit], b[:, hit], c[hit]
    assert abs(flow(at, bt, ct, crossing_times[hit], settings) - theta[hit]).max() < 1e-13
    assert (np.tanh(bt[2] + (at[2] - bt[2]) * np.exp(-crossing_times[hit] / 0.7)) > theta[hit]).all()
    # The grid misses only units that are above their threshold between two grid points.
    assert (np.isfinite(crossing_times) & np.isinf(first)).sum() < count / 200
    assert search.evaluations / max(1, search.solves) < 12


def test_lower_bound_holds_and_is_exact_at_rest():
    a, b, c, theta = units(5000, seed=8)
    settings = FlowSettings(0.7, 1.1, FINE, 1.0)
    crossing_times = find_crossings(a, b, c, theta, 6.0, settings).times
    hit = np.isfinite(crossing_times)
    bound = np.maximum(lower_bound(a, b, c, theta, settings), window(a, b, theta, settings)[0])
    assert (bound[hit] <= crossing_times[hit]).all()
    crossing_times = find_crossings(b, b, c, theta, 6.0, settings).times
    hit = np.isfinite(crossing_times)
    np.testing.assert_allclose(lower_bound(b, b, c, theta, settings)[hit], crossing_times[hit], rtol=1e-11)
    # A horizon just after the crossing, where the bound is tight, includes it.
    repeated = find_crossings(
        b[:, hit], b[:, hit], c[hit], theta[hit], crossing_times[hit] * (1 + 1e-9), settings
    ).times
    assert np.isfinite(repeated).all()


def test_grazing_is_decided_exactly():
    """The largest c is barely above or below the threshold. The slope goes like the square root of the difference."""
    settings = FlowSettings(1.0, 1.0, FINE, 1.0)
    a, b, c = np.array([[1.0], [0.0], [2.0]]), np.array([[1.0], [0.0], [-2.0]]), np.array([0.0])
    lo, hi = 0.01, 0.9
    for _ in range(200):  # bisect for the threshold that is just reached, where c = z = theta
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


def test_refractory_time():
    """After a reset, no unit reaches its threshold before tau_m log(1 / (1 - theta))."""
    a, b, _, theta = units(5000, seed=9, spread=20)
    settings = FlowSettings(0.7, 1.1, FINE, 1.0)
    crossing_times = find_crossings(a, b, np.zeros_like(theta), theta, 6.0, settings).times
    assert np.isfinite(crossing_times).sum() > 1000
    assert (crossing_times >= -1.1 * np.log1p(-theta) * (1 - 1e-12)).all()


def test_unit_above_threshold_emits_only_after_falling_below():
    settings = FlowSettings(1.0, 1.0, FINE, 1.0)
    theta = np.full(3, 0.4)
    c = np.full(3, 0.6)
    b = np.array([[3.0] * 3, [0.0] * 3, [2.0, 2.0, 2.0]])
    a = np.array([[3.0] * 3, [0.0] * 3, [1.0, -20.0, 0.3]])  # rises; falls below first; cannot fall in time
    times = find_crossings(a, b, c, theta, 20.0, settings).times
    assert np.isinf(times[[0, 2]]).all()
    assert np.isfinite(times[1])
    assert flow(a[:, 1:2], b[:, 1:2], c[1:2], times[1] * 0.9, settings)[0] < 0.4
