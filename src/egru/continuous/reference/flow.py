"""The flow of units between events, in NumPy.

Between events, units do not interact. ``a`` has a closed form. ``c`` is integrated over panels of Gauss-Legendre
quadrature: with ``E(t)`` the integral of ``u / tau_m`` from the start of the panel, integration by parts gives::

    c(t) = z(t) + exp(-E(t)) (c(0) - z(0)) - integral from 0 to t of exp(E(s) - E(t)) dz/ds ds

This form is exact where ``z`` is constant. Arrays have one entry per unit: ``a`` and ``b`` are ``(3, N)``, and ``c``,
``theta`` and time intervals are ``(N,)``. Time constants are numbers, or ``(N,)``; those of gates may be ``(3, N)``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from egru.continuous.problem import U, Z
from egru.continuous.quadrature import Rule

SATURATION = 38.0
"""At ``|a|`` above this, sigmoid and tanh are constant to rounding."""
MAX_EQUAL_PANELS = 1000
"""Up to this many panels of an interval have equal lengths."""


class FlowSettings(NamedTuple):
    """Time constants, quadrature and gates.

    ``linear`` units have ``u = 1`` and ``z = a_z``. If they have ``tau_a``, they are adaptive: ``z = a_z - a_u``.
    """

    tau_s: float | np.ndarray
    tau_m: float | np.ndarray
    rule: Rule
    panel: float
    linear: bool = False
    tau_a: float | np.ndarray | None = None

    def take(self, units: np.ndarray) -> "FlowSettings":
        """Return the settings of some units."""
        taus = (self.tau_s, self.tau_m, self.tau_a)
        tau_s, tau_m, tau_a = (tau[units] if isinstance(tau, np.ndarray) else tau for tau in taus)
        return self._replace(tau_s=tau_s, tau_m=tau_m, tau_a=tau_a)

    @property
    def gate_tau(self) -> float | np.ndarray:
        """The time constants of the activations: ``tau_s``, or one row per gate for adaptive units."""
        if self.tau_a is None:
            return self.tau_s
        return np.stack(np.broadcast_arrays(self.tau_a, self.tau_s, self.tau_s))

    @property
    def fastest_gate(self) -> float | np.ndarray:
        """The smallest time constant of the activations of each unit."""
        return self.tau_s if self.tau_a is None else np.minimum(self.tau_s, self.tau_a)

    def u(self, a: np.ndarray) -> np.ndarray:
        """Return the update gate: sigmoid, or 1 for linear units."""
        return np.ones_like(a) if self.linear else sigmoid(a)

    def z(self, a_z: np.ndarray, a_u: np.ndarray) -> np.ndarray:
        """Return the proposed state: tanh, or ``a_z`` for linear units, less the adaptation current ``a_u`` if any."""
        if self.tau_a is not None:
            return a_z - a_u
        return a_z if self.linear else np.tanh(a_z)

    def dz(self, z: np.ndarray) -> np.ndarray:
        """Return the derivative of ``z`` with respect to ``a_z``, given ``z``."""
        return np.ones_like(z) if self.linear else 1 - z * z

    def level(self, theta: np.ndarray) -> np.ndarray:
        """Return the activation above which ``z > theta``, which may be infinite."""
        if self.linear:
            return theta
        with np.errstate(divide="ignore"):
            return np.where(theta < 1, np.arctanh(np.minimum(theta, 1.0)), np.inf)


class Panel(NamedTuple):
    """A panel: ``a`` at its start and its end, the time at which it starts, and its length."""

    start: np.ndarray
    end: np.ndarray
    elapsed: np.ndarray
    h: np.ndarray


class Nodes(NamedTuple):
    """Values at the nodes of one panel of length ``h``, ``(nodes, N)``.

    ``q``, ``(3, nodes, N)``, is the decay of each gate, ``exp(-t / tau_s)``. ``E`` is the integral of ``u / tau_m``
    from the start of the panel. ``E1``, ``(N,)``, is the same integral over the whole panel.
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
    return b + (a - b) * np.exp(-np.asarray(dt) / settings.gate_tau)


def slope(a: np.ndarray, c: np.ndarray, settings: FlowSettings) -> np.ndarray:
    """Return ``dc/dt``."""
    return settings.u(a[U]) * (settings.z(a[Z], a[U]) - c) / settings.tau_m


def gate_speed(distance: np.ndarray) -> np.ndarray:
    """Return how fast gates change, in units of ``1 / tau_s``, if activations are this far from their biases.

    The longest panel is inversely proportional to it. Far from rest, activations may pass zero, where the gates bend,
    at full speed.
    """
    return 1 + 0.5 * distance + np.maximum(distance - 10, 0)


def time_saturated(a: np.ndarray, b: np.ndarray, settings: FlowSettings) -> np.ndarray:
    """Return how long gates with activations ``a`` stay saturated, 0 if they are not."""
    edge = np.copysign(SATURATION, a)
    with np.errstate(divide="ignore", invalid="ignore"):
        leaves = settings.tau_s * np.log((a - b) / (edge - b))
    return np.where(abs(a) <= SATURATION, 0.0, np.where(edge * b >= SATURATION**2, np.inf, leaves))


def longest_panel(a: np.ndarray, b: np.ndarray, settings: FlowSettings) -> np.ndarray:
    """Return the length of the next panel of each unit.

    Saturated gates are constant and do not limit it, but it ends where a gate leaves saturation.
    """
    if settings.linear:
        return np.full_like(a[Z], settings.panel / (1 / settings.fastest_gate + 1 / settings.tau_m))
    held_u, held_z = time_saturated(a[U], b[U], settings), time_saturated(a[Z], b[Z], settings)
    changes_u, changes_z = held_u == 0, held_z == 0
    distance = np.maximum(abs(a[U] - b[U]) * changes_u, abs(a[Z] - b[Z]) * changes_z)
    gate_rate = gate_speed(distance) / settings.tau_s * (changes_u | changes_z)
    longest = settings.panel / (gate_rate + 1 / settings.tau_m)
    longest = np.where(changes_u, longest, np.minimum(longest, held_u))
    return np.where(changes_z, longest, np.minimum(longest, held_z))


def panels(a: np.ndarray, b: np.ndarray, dt: np.ndarray | float, settings: FlowSettings) -> Iterator[Panel]:
    """Divide ``dt`` into panels. If it is a number, all units have the same panels.

    Up to ``MAX_EQUAL_PANELS`` have equal lengths, given by the activations at the start. Otherwise the lengths follow
    the activations.
    """
    dt = np.asarray(dt)
    distance = np.maximum(abs(a[U] - b[U]), abs(a[Z] - b[Z])) * (not settings.linear)
    rho = dt * (gate_speed(distance) / settings.fastest_gate + 1 / settings.tau_m)
    count = max(1.0, np.ceil(np.max(rho, initial=0.0) / settings.panel))
    elapsed = np.zeros_like(dt)
    panel = 0
    while panel < count if count <= MAX_EQUAL_PANELS else (elapsed < dt).any():
        if count <= MAX_EQUAL_PANELS:
            h = dt / count
        else:
            longest = longest_panel(a, b, settings)
            h = np.maximum(
                longest.min() if dt.ndim == 0 else longest, 2.0**-48 * (np.max(settings.tau_s, initial=0.0) + elapsed)
            )
            h = np.minimum(h, dt - elapsed)
        end = relax(a, b, h, settings)
        yield Panel(a, end, elapsed, h)
        a, elapsed, panel = end, elapsed + h, panel + 1


def panel_nodes(a: np.ndarray, b: np.ndarray, h: np.ndarray | float, settings: FlowSettings) -> Nodes:
    """Return the gates at the nodes of one panel of length ``h`` that starts with ``a``."""
    x, w, A = settings.rule
    h = np.broadcast_to(h, a.shape[1:])
    tau = np.broadcast_to(settings.gate_tau, a.shape)[:, None]
    q = np.exp(-np.multiply.outer(x, h) / tau)
    a_u, a_z = (b[k] + (a[k] - b[k]) * q[k] for k in (U, Z))
    u, z = settings.u(a_u), settings.z(a_z, a_u)
    zdot = settings.dz(z) * (b[Z] - a[Z]) * q[Z] / tau[Z]
    if settings.tau_a is not None:
        zdot = zdot - (b[U] - a[U]) * q[U] / tau[U]
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
    for start, end, _, h in panels(a, b, dt, settings):
        nodes = panel_nodes(start, b, h, settings)
        c = end_state(c, settings.z(start[Z], start[U]), settings.z(end[Z], end[U]), h, nodes, settings.rule)
    return c
