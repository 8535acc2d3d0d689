"""The flow of units between events, in NumPy.

Between events, units do not interact. ``a`` has a closed form. ``c`` is integrated over panels of Gauss-Legendre
quadrature: with ``E(t)`` the integral of ``u / tau_m`` from the start of the panel, integration by parts gives::

    c(t) = z(t) + exp(-E(t)) (c(0) - z(0)) - integral from 0 to t of exp(E(s) - E(t)) dz/ds ds

This form is exact where ``z`` is constant. Arrays have one entry per unit: ``a`` and ``b`` are ``(3, N)``, and ``c``,
``theta`` and time intervals are ``(N,)``.
"""

from typing import NamedTuple

import numpy as np

from egru.continuous.problem import U, Z
from egru.continuous.quadrature import Rule


class FlowSettings(NamedTuple):
    """Time constants and quadrature: the constants of the flow that all units share."""

    tau_s: float
    tau_m: float
    rule: Rule
    panel: float


class Nodes(NamedTuple):
    """Values at the nodes of one panel of length ``h``, ``(nodes, N)``.

    ``q`` is ``exp(-t / tau_s)`` and ``E`` the integral of ``u / tau_m`` from the start of the panel. ``E1``, ``(N,)``,
    is the same integral over the whole panel.
    """

    q: np.ndarray
    u: np.ndarray
    z: np.ndarray
    zdot: np.ndarray
    E: np.ndarray
    E1: np.ndarray


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def relax(a: np.ndarray, b: np.ndarray, dt: np.ndarray | float, settings: FlowSettings) -> np.ndarray:
    """Return ``a`` after ``dt``, in closed form."""
    return b + (a - b) * np.exp(-np.asarray(dt) / settings.tau_s)


def slope(a: np.ndarray, c: np.ndarray, settings: FlowSettings) -> np.ndarray:
    """Return ``dc/dt``."""
    return sigmoid(a[U]) * (np.tanh(a[Z]) - c) / settings.tau_m


def panel_count(a: np.ndarray, b: np.ndarray, dt: np.ndarray | float, settings: FlowSettings) -> int:
    """Return the number of equal panels that ``dt`` is split into, the same for all units."""
    distance = np.maximum(abs(a[U] - b[U]), abs(a[Z] - b[Z]))
    rho = dt * ((1 + 0.5 * distance) / settings.tau_s + 1 / settings.tau_m)
    return max(1, int(np.ceil(np.max(rho, initial=0.0) / settings.panel)))


def panel_nodes(a: np.ndarray, b: np.ndarray, h: np.ndarray | float, settings: FlowSettings) -> Nodes:
    """Return the gates at the nodes of one panel of length ``h`` that starts with ``a``."""
    x, w, A = settings.rule
    h = np.broadcast_to(h, a.shape[1:])
    q = np.exp(-np.multiply.outer(x, h) / settings.tau_s)
    u = sigmoid(b[U] + (a[U] - b[U]) * q)
    z = np.tanh(b[Z] + (a[Z] - b[Z]) * q)
    zdot = (1 - z * z) * (b[Z] - a[Z]) * q / settings.tau_s
    return Nodes(q, u, z, zdot, h / settings.tau_m * (A @ u), h / settings.tau_m * (w @ u))


def end_state(
    c: np.ndarray, z0: np.ndarray, z1: np.ndarray, h: np.ndarray | float, nodes: Nodes, rule: Rule
) -> np.ndarray:
    """Return ``c`` at the end of the panel, where ``z`` goes from ``z0`` to ``z1``."""
    return z1 + np.exp(-nodes.E1) * (c - z0) - h * (rule.w @ (np.exp(nodes.E - nodes.E1) * nodes.zdot))


def node_states(c: np.ndarray, z0: np.ndarray, h: np.ndarray | float, nodes: Nodes, rule: Rule) -> np.ndarray:
    """Return ``c`` at the nodes of the panel, ``(nodes, N)``."""
    return nodes.z + np.exp(-nodes.E) * (c - z0 - h * (rule.A @ (np.exp(nodes.E) * nodes.zdot)))


def flow(a: np.ndarray, b: np.ndarray, c: np.ndarray, dt: np.ndarray | float, settings: FlowSettings) -> np.ndarray:
    """Return ``c`` after ``dt`` without events."""
    count = panel_count(a, b, dt, settings)
    h = np.asarray(dt) / count
    for _ in range(count):
        end = relax(a, b, h, settings)
        c = end_state(c, np.tanh(a[Z]), np.tanh(end[Z]), h, panel_nodes(a, b, h, settings), settings.rule)
        a = end
    return c
