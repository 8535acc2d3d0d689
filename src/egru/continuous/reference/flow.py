"""Between events every unit is on its own: the flow of ``c`` and the search for its next threshold crossing, in numpy.

Arrays hold one entry per unit: ``a`` and ``b`` are ``(3, N)`` in the order u, r, z; ``c``, ``theta`` and times, which
are relative to the state given, ``(N,)``.
"""

from typing import NamedTuple

import numpy as np

from egru.continuous.quadrature import Rule

U, R, Z = range(3)


class Clock(NamedTuple):
    """Time constants and the quadrature: everything about the flow that is the same for all units."""

    tau_s: float
    tau_m: float
    rule: Rule
    panel: float


class Nodes(NamedTuple):
    """One panel of length ``h``: values at its nodes, ``(nodes, N)``, and ``E1``, ``(N,)``, at its end.

    ``q`` is ``exp(-t / tau_s)`` and ``E`` the integral of ``u / tau_m`` from the start of the panel.
    """

    q: np.ndarray
    u: np.ndarray
    z: np.ndarray
    zdot: np.ndarray
    E: np.ndarray
    E1: np.ndarray


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def relax(a: np.ndarray, b: np.ndarray, dt: np.ndarray | float, clock: Clock) -> np.ndarray:
    """``a`` after ``dt``, exactly."""
    return b + (a - b) * np.exp(-np.asarray(dt) / clock.tau_s)


def slope(a: np.ndarray, c: np.ndarray, clock: Clock) -> np.ndarray:
    """``dc/dt``."""
    return sigmoid(a[U]) * (np.tanh(a[Z]) - c) / clock.tau_m


def panels(a: np.ndarray, b: np.ndarray, dt: np.ndarray | float, clock: Clock) -> int:
    """Into how many equal panels ``dt`` is split, the same number for all units."""
    distance = np.maximum(abs(a[U] - b[U]), abs(a[Z] - b[Z]))
    rho = dt * ((1 + 0.5 * distance) / clock.tau_s + 1 / clock.tau_m)
    return max(1, int(np.ceil(np.max(rho, initial=0.0) / clock.panel)))


def nodes(a: np.ndarray, b: np.ndarray, h: np.ndarray | float, clock: Clock) -> Nodes:
    """The activations and gates at the nodes of one panel that starts with ``a``."""
    x, w, A = clock.rule
    h = np.broadcast_to(h, a.shape[1:])
    q = np.exp(-np.multiply.outer(x, h) / clock.tau_s)
    u = sigmoid(b[U] + (a[U] - b[U]) * q)
    z = np.tanh(b[Z] + (a[Z] - b[Z]) * q)
    zdot = (1 - z * z) * (b[Z] - a[Z]) * q / clock.tau_s
    return Nodes(q, u, z, zdot, h / clock.tau_m * (A @ u), h / clock.tau_m * (w @ u))


def end_state(c: np.ndarray, z0: np.ndarray, z1: np.ndarray, h: np.ndarray | float, on: Nodes, rule: Rule):
    """``c`` at the end of the panel. Integrating ``z``'s derivative makes this exact where ``z`` is constant."""
    return z1 + np.exp(-on.E1) * (c - z0) - h * (rule.w @ (np.exp(on.E - on.E1) * on.zdot))


def node_states(c: np.ndarray, z0: np.ndarray, h: np.ndarray | float, on: Nodes, rule: Rule):
    """``c`` at the nodes of the panel, ``(nodes, N)``."""
    return on.z + np.exp(-on.E) * (c - z0 - h * (rule.A @ (np.exp(on.E) * on.zdot)))


def flow(a: np.ndarray, b: np.ndarray, c: np.ndarray, dt: np.ndarray | float, clock: Clock) -> np.ndarray:
    """``c`` after ``dt`` without events."""
    count = panels(a, b, dt, clock)
    h = np.asarray(dt) / count
    for _ in range(count):
        end = relax(a, b, h, clock)
        c = end_state(c, np.tanh(a[Z]), np.tanh(end[Z]), h, nodes(a, b, h, clock), clock.rule)
        a = end
    return c


def window(a: np.ndarray, b: np.ndarray, theta: np.ndarray, clock: Clock) -> tuple[np.ndarray, np.ndarray]:
    """When ``z > theta``, an interval ``(w0, w1)`` because ``z`` is monotone; ``w0 = inf`` where it never is.

    At ``c = theta``, ``c`` rises exactly where ``z > theta``. So a unit crosses its threshold upwards only inside the
    window, never downwards there, and at most once.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        level = np.where(theta < 1, np.arctanh(np.minimum(theta, 1.0)), np.inf)
        now, later = a[Z] > level, b[Z] > level
        change = clock.tau_s * np.log((a[Z] - b[Z]) / (level - b[Z]))
    w0 = np.where(now, 0.0, np.where(later, change, np.inf))
    w1 = np.where(later, np.inf, np.where(now, change, 0.0))
    return w0, w1


def lower_bound(a: np.ndarray, b: np.ndarray, c: np.ndarray, theta: np.ndarray, clock: Clock) -> np.ndarray:
    """A time before which no unit crosses, from the largest ``u`` and ``z`` there can be; exact at rest."""
    tiny = 4 * np.finfo(np.float64).eps
    gap = np.tanh(np.maximum(a[Z], b[Z])) - theta
    rate = sigmoid(np.maximum(a[U], b[U])) / clock.tau_m
    bound = np.log1p(np.maximum(theta - c, 0.0) / np.maximum(gap + tiny, tiny)) / rate
    return bound * (1 - tiny)


class Search(NamedTuple):
    """Crossing times, ``inf`` where there is none before the horizon, and what the search cost."""

    times: np.ndarray
    solves: int
    evaluations: int


def crossing(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, theta: np.ndarray, horizon: np.ndarray | float, clock: Clock
) -> Search:
    """When each unit first reaches its threshold from below, at most ``horizon`` from now.

    A unit that starts at or above its threshold must first fall below it before the window opens.
    """
    times = np.full(c.shape, np.inf)
    w0, w1 = window(a, b, theta, clock)
    hi = np.minimum(w1, horizon)
    bound = np.maximum(w0, lower_bound(a, b, c, theta, clock))
    live = np.flatnonzero((bound <= hi) & ((c < theta) | (w0 > 0)))
    evaluations = len(live)

    def take(i: np.ndarray):
        return a[:, i], b[:, i], c[i]

    live = live[flow(*take(live), hi[live], clock) >= theta[live]]
    above = live[c[live] >= theta[live]]
    if len(above):
        stay = above[flow(*take(above), w0[above], clock) >= theta[above]]
        evaluations += len(above)
        live = np.setdiff1d(live, stay)
    if len(live) == 0:
        return Search(times, 0, evaluations)
    found, newton = _newton(*take(live), theta[live], w0[live], hi[live], bound[live], clock)
    times[live] = found
    return Search(times, len(live), evaluations + newton)


def _newton(a, b, c, theta, lo, hi, bound, clock: Clock) -> tuple[np.ndarray, int]:
    """Roots of ``c(t) = theta`` in ``[lo, hi]``, where the sign changes once: Newton, and halving where it stalls."""
    u, z = sigmoid(a[U]), np.tanh(a[Z])
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.log((z - c) / (z - theta)) * clock.tau_m / u  # exact if a stood still
    t = np.where(np.isfinite(t) & (t > lo) & (t < hi), t, np.where((bound > lo) & (bound < hi), bound, 0.5 * (lo + hi)))
    last, stalled = np.full(t.shape, np.inf), np.zeros(t.shape, dtype=int)
    root, active, evaluations = t.copy(), np.arange(len(t)), 0
    lo, hi = lo.copy(), hi.copy()
    for _ in range(200):
        i = active
        now = relax(a[:, i], b[:, i], t[i], clock)
        state = flow(a[:, i], b[:, i], c[i], t[i], clock)
        evaluations += len(i)
        miss, rise = state - theta[i], slope(now, state, clock)
        lo[i], hi[i] = np.where(miss < 0, t[i], lo[i]), np.where(miss < 0, hi[i], t[i])
        stalled[i] = np.where(2 * abs(miss) > last[i], stalled[i] + 1, 0)
        last[i] = abs(miss)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = miss / rise
        goal = t[i] - step
        inside = (goal >= lo[i]) & (goal <= hi[i])  # False for NaN
        done = (
            (abs(miss) <= 8e-16)
            | (inside & (abs(step) <= 2e-15 * clock.tau_m))
            | (hi[i] - lo[i] <= 2 * np.spacing(hi[i]))
            | ((stalled[i] >= 2) & (abs(miss) <= 1e-12))
        )
        root[i] = np.where(inside & (abs(step) <= 1e-12 * clock.tau_m), goal, t[i])
        t[i] = np.where(inside & (stalled[i] < 2), goal, 0.5 * (lo[i] + hi[i]))
        stalled[i] = np.where(stalled[i] >= 2, 0, stalled[i])
        active = i[~done]
        if len(active) == 0:
            break
    return root, evaluations
