"""The search for the next threshold crossing of each unit, in NumPy.

Between events ``a_z`` is monotone, so ``z > theta`` holds in one interval of time, known in closed form. Where
``c = theta``, ``c`` rises exactly if ``z > theta``. So a unit crosses its threshold upwards only inside this window, at
most once, and one evaluation of ``c`` at the end of the window decides whether it does. No crossing can be missed.

Arrays have one entry per unit, as in :mod:`egru.continuous.reference.flow`. Times are relative to the given state.
"""

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


def lower_bound(a: np.ndarray, b: np.ndarray, c: np.ndarray, theta: np.ndarray, settings: FlowSettings) -> np.ndarray:
    """Return a time before which the unit does not cross, from the largest ``u`` and ``z`` to come; exact at rest."""
    tiny = 4 * np.finfo(np.float64).eps
    gap = settings.z(np.maximum(a[Z], b[Z])) - theta
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
    times = np.full(c.shape, np.inf)
    w0, w1 = window(a, b, theta, settings)
    hi = np.minimum(w1, horizon)
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
    u, z = settings.u(a[U]), settings.z(a[Z])
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
