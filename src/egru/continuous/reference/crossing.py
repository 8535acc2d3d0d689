"""The search for the next threshold crossing of each unit, in NumPy.

Between events ``a_z`` is monotone, so ``z > theta`` holds in one interval of time, known in closed form. Where
``c = theta``, ``c`` rises exactly if ``z > theta``. So a unit crosses its threshold upwards only inside this window, at
most once, and one evaluation of ``c`` at the end of the window decides whether it does. No crossing can be missed.

In adaptive units ``z - theta`` is a constant and two exponentials. It has at most one extremum, known in closed form,
so that ``z > theta`` holds in at most two intervals. In each of them the same argument applies, and between them ``c``
cannot rise to ``theta``.

Arrays have one entry per unit, as in :mod:`egru.continuous.reference.flow`. Times are relative to the given state.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from egru.continuous.problem import U, Z
from egru.continuous.reference.flow import FlowSettings, flow, relax, slope


class Search(NamedTuple):
    """Crossing times, ``inf`` for units without one, and the cost of the search."""

    times: np.ndarray
    solves: int
    evaluations: int


def window(a: np.ndarray, b: np.ndarray, theta: np.ndarray, settings: FlowSettings) -> tuple[np.ndarray, np.ndarray]:
    """Return the interval ``(w0, w1)`` in which ``z > theta``; ``w0`` is infinite if it is empty."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        level = settings.level(theta)
        now, later = a[Z] > level, b[Z] > level
        change = settings.tau_s * np.log((a[Z] - b[Z]) / (level - b[Z]))
    w0 = np.where(now, 0.0, np.where(later, change, np.inf))
    w1 = np.where(later, np.inf, np.where(now, change, 0.0))
    return w0, w1


def windows(
    a: np.ndarray, b: np.ndarray, theta: np.ndarray, horizon: np.ndarray | float, settings: FlowSettings
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the intervals up to ``horizon`` in which ``z > theta``, in order, as :func:`window` does."""
    if settings.tau_a is None:
        return [window(a, b, theta, settings)]

    def excess(t: np.ndarray) -> np.ndarray:
        later = relax(a, b, t, settings)
        return settings.z(later[Z], later[U]) - theta

    end = np.broadcast_to(np.asarray(horizon, dtype=np.float64), theta.shape)
    start, turn = np.zeros_like(end), turning_point(a, b, settings)
    middle = np.clip(np.where(np.isnan(turn), 0.0, turn), 0.0, end)
    before, after = _bisect(excess, start, middle), _bisect(excess, middle, end)
    now, between, then = excess(start) > 0, excess(middle) > 0, excess(end) > 0
    opens = np.where(now, 0.0, np.where(between, before, np.where(then, after, np.inf)))
    closes = np.where(now & ~between, before, np.where(between & ~then, after, np.inf))
    again = np.where(now & ~between & then, after, np.inf)
    return [(opens, closes), (again, np.full_like(again, np.inf))]


def turning_point(a: np.ndarray, b: np.ndarray, settings: FlowSettings) -> np.ndarray:
    """Return the time at which ``dz/dt`` of adaptive units changes its sign, NaN or not positive if there is none."""
    assert settings.tau_a is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (a[Z] - b[Z]) / settings.tau_s / ((a[U] - b[U]) / settings.tau_a)
        return np.log(ratio) / (1 / settings.tau_s - 1 / settings.tau_a)


def _bisect(function: Callable[[np.ndarray], np.ndarray], lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Return the root of a monotone function in ``[lo, hi]``, or any of their points if there is none."""
    sign = function(lo) > 0
    for _ in range(1100):  # enough for any two floating-point numbers
        t = 0.5 * (lo + hi)
        if ((t <= lo) | (t >= hi)).all():
            break
        same = (function(t) > 0) == sign
        lo, hi = np.where(same, t, lo), np.where(same, hi, t)
    return hi


def lower_bound(a: np.ndarray, b: np.ndarray, c: np.ndarray, theta: np.ndarray, settings: FlowSettings) -> np.ndarray:
    """Return a time before which the unit does not cross, from the largest ``u`` and ``z`` to come; exact at rest."""
    tiny = 4 * np.finfo(np.float64).eps
    gap = settings.z(np.maximum(a[Z], b[Z]), np.minimum(a[U], b[U])) - theta
    u = np.maximum(settings.u(np.maximum(a[U], b[U])), np.finfo(np.float64).tiny)  # it may round to 0
    with np.errstate(over="ignore"):
        bound = np.log1p(np.maximum(theta - c, 0.0) / np.maximum(gap + tiny, tiny)) * settings.tau_m / u
    return bound * (1 - tiny)


def find_crossings(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, theta: np.ndarray, horizon: np.ndarray | float, settings: FlowSettings
) -> Search:
    """Return when each unit first reaches its threshold from below, if at most ``horizon`` from now.

    A unit that starts at or above its threshold emits only if it falls below before the window opens.
    """
    times, solves, evaluations = np.full(c.shape, np.inf), 0, 0
    for w0, w1 in windows(a, b, theta, horizon, settings):
        opens = np.where(np.isfinite(times), np.inf, w0)  # only the first crossing counts
        found = _search(a, b, c, theta, opens, np.minimum(w1, horizon), settings)
        times, solves = np.minimum(times, found.times), solves + found.solves
        evaluations += found.evaluations
    return Search(times, solves, evaluations)


def _search(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    theta: np.ndarray,
    w0: np.ndarray,
    hi: np.ndarray,
    settings: FlowSettings,
) -> Search:
    """Return the crossings in windows from ``w0`` to ``hi``, in which ``z > theta``."""
    times = np.full(c.shape, np.inf)
    bound = np.maximum(w0, lower_bound(a, b, c, theta, settings))
    candidates = np.flatnonzero((bound <= hi) & ((c < theta) | (w0 > 0)))
    evaluations = len(candidates)

    def take(i: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return a[:, i], b[:, i], c[i]

    def state(i: np.ndarray, time: np.ndarray) -> np.ndarray:
        return flow(*take(i), time[i], settings.take(i))

    candidates = candidates[state(candidates, hi) >= theta[candidates]]
    above = candidates[c[candidates] >= theta[candidates]]
    if len(above):
        still_above = above[state(above, w0) >= theta[above]]
        evaluations += len(above)
        candidates = np.setdiff1d(candidates, still_above)
    if len(candidates) == 0:
        return Search(times, 0, evaluations)
    roots, newton_evaluations = _newton(
        *take(candidates),
        theta[candidates],
        w0[candidates],
        hi[candidates],
        bound[candidates],
        settings.take(candidates),
    )
    times[candidates] = roots
    return Search(times, len(candidates), evaluations + newton_evaluations)


def _newton(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    theta: np.ndarray,
    lo: np.ndarray,
    hi: np.ndarray,
    bound: np.ndarray,
    settings: FlowSettings,
) -> tuple[np.ndarray, int]:
    """Solve ``c(t) = theta`` in ``[lo, hi]``, where the sign changes once, by Newton steps safeguarded by bisection."""
    u, z = settings.u(a[U]), settings.z(a[Z], a[U])
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.log((z - c) / (z - theta)) * settings.tau_m / u  # exact for constant a
    t = np.where(np.isfinite(t) & (t > lo) & (t < hi), t, np.where((bound > lo) & (bound < hi), bound, 0.5 * (lo + hi)))
    last, stalled = np.full(t.shape, np.inf), np.zeros(t.shape, dtype=int)
    root, active, evaluations = t.copy(), np.arange(len(t)), 0
    lo, hi = lo.copy(), hi.copy()
    for _ in range(200):
        i, part = active, settings.take(active)
        a_t = relax(a[:, i], b[:, i], t[i], part)
        c_t = flow(a[:, i], b[:, i], c[i], t[i], part)
        evaluations += len(i)
        miss, rise = c_t - theta[i], slope(a_t, c_t, part)
        lo[i], hi[i] = np.where(miss < 0, t[i], lo[i]), np.where(miss < 0, hi[i], t[i])
        stalled[i] = np.where(2 * abs(miss) > last[i], stalled[i] + 1, 0)
        last[i] = abs(miss)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = miss / rise
        proposal = t[i] - step
        inside = (proposal >= lo[i]) & (proposal <= hi[i])  # False for NaN
        # A tighter criterion would let Newton jitter at the rounding level for dozens of evaluations.
        done = (
            (abs(miss) <= 8e-16)
            | (inside & (abs(step) <= 2e-15 * part.tau_m))
            | (hi[i] - lo[i] <= 2 * np.spacing(hi[i]))
            | ((stalled[i] >= 2) & (abs(miss) <= 1e-12))
        )
        root[i] = np.where(inside & (abs(step) <= 1e-12 * part.tau_m), proposal, t[i])
        t[i] = np.where(inside & (stalled[i] < 2), proposal, 0.5 * (lo[i] + hi[i]))
        stalled[i] = np.where(stalled[i] >= 2, 0, stalled[i])
        active = i[~done]
        if len(active) == 0:
            break
    return root, evaluations
