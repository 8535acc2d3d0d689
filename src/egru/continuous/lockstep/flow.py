"""The flow of units over one panel, batched in torch.

The formulas are those of :mod:`egru.continuous.reference.flow`, elementwise. States have any shape ``S`` that the panel
length ``h`` broadcasts to; values at the nodes have shape ``(nodes, *S)``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.flow import SATURATION


class FlowSettings(NamedTuple):
    """Time constants, quadrature and tolerances.

    ``x``, ``w`` and ``A`` are the fields of :class:`egru.continuous.quadrature.Rule` as tensors. The crossing search
    stops if ``c`` is within ``state_tolerance`` of its threshold, or if a Newton step is shorter than
    ``step_tolerance`` times ``tau_m``. If Newton stalls, ``stall_tolerance`` is accepted. ``linear`` units have
    ``u = 1`` and ``z = a_z``. Time constants are numbers, or tensors with one entry per unit.
    """

    tau_s: float | Tensor
    tau_m: float | Tensor
    x: Tensor
    w: Tensor
    A: Tensor
    state_tolerance: float
    step_tolerance: float
    stall_tolerance: float
    linear: bool

    @classmethod
    def create(
        cls, tau_s: float | Tensor, tau_m: float | Tensor, nodes: int, like: Tensor, linear: bool
    ) -> "FlowSettings":
        """Return the settings for the dtype and device of ``like``."""
        x, w, A = (torch.as_tensor(v).to(like) for v in gauss_legendre(nodes))
        tolerances = (8e-16, 2e-15, 1e-12) if like.dtype == torch.float64 else (1e-7, 1e-6, 1e-5)
        return cls(tau_s, tau_m, x, w, A, *tolerances, linear)

    def take(self, units: Tensor) -> "FlowSettings":
        """Return the settings of some units."""
        return self._replace(tau_s=of_units(self.tau_s, units), tau_m=of_units(self.tau_m, units))

    def u(self, a: Tensor) -> Tensor:
        """Return the update gate: sigmoid, or 1 for linear units."""
        return torch.ones_like(a) if self.linear else torch.sigmoid(a)

    def z(self, a: Tensor) -> Tensor:
        """Return the proposed state: tanh, or ``a`` itself for linear units."""
        return a if self.linear else torch.tanh(a)

    def dz(self, z: Tensor) -> Tensor:
        """Return the derivative of ``z`` with respect to ``a``, given ``z``."""
        return torch.ones_like(z) if self.linear else 1 - z * z

    def integrate(self, values: Tensor) -> Tensor:
        """Integrate over a panel of length 1, from ``(nodes, *S)`` to ``S``."""
        return torch.tensordot(self.w, values, 1)

    def integrate_to_nodes(self, values: Tensor) -> Tensor:
        """Integrate from the start of a panel of length 1 to each node, from ``(nodes, *S)`` to ``(nodes, *S)``."""
        return torch.tensordot(self.A, values, 1)


def of_units(tau: float | Tensor, units: Tensor) -> float | Tensor:
    """Return the time constants of some units."""
    return tau[units] if isinstance(tau, Tensor) else tau


class Nodes(NamedTuple):
    """Values at the nodes of one panel; see :class:`egru.continuous.reference.flow.Nodes`."""

    q: Tensor
    u: Tensor
    z: Tensor
    zdot: Tensor
    E: Tensor
    E1: Tensor


def _gate_speed(distance: Tensor) -> Tensor:
    # Close to rest the gates hardly change, and the error of a panel is proportional to the distance.
    near_rest = torch.where(distance < 1e-4, 0.5, torch.ones_like(distance))
    near_rest = torch.where(distance < 1e-6, 1 / 3, near_rest)
    return near_rest + 0.5 * distance + (distance - 10).clamp(min=0)


def is_at_rest(a_u: Tensor, b_u: Tensor, a_z: Tensor, b_z: Tensor) -> Tensor:
    """Return whether activations equal their biases to rounding, so that the gates are constant."""
    eps = torch.finfo(a_u.dtype).eps
    return ((a_u - b_u).abs() <= eps * (0.1 + 2 * b_u.abs())) & ((a_z - b_z).abs() <= eps * (0.1 + 2 * b_z.abs()))


def _time_saturated(a: Tensor, b: Tensor, settings: FlowSettings) -> Tensor:
    edge = torch.copysign(torch.full_like(a, SATURATION), a)
    leaves = settings.tau_s * torch.log((a - b) / (edge - b))  # NaN only where it is not used
    return torch.where(a.abs() <= SATURATION, 0.0, torch.where(edge * b >= SATURATION**2, torch.inf, leaves))


def longest_panel(a_u: Tensor, b_u: Tensor, a_z: Tensor, b_z: Tensor, panel: float, settings: FlowSettings) -> Tensor:
    """Return the length of the next panel of each unit; see :func:`egru.continuous.reference.flow.longest_panel`."""
    if settings.linear or not bool((torch.maximum(a_u.abs(), a_z.abs()) > SATURATION).any()):
        distance = torch.maximum((a_u - b_u).abs(), (a_z - b_z).abs())
        distance = distance.clamp(max=1e-3) if settings.linear else distance
        return panel / (_gate_speed(distance) / settings.tau_s + 1 / settings.tau_m)
    held_u, held_z = _time_saturated(a_u, b_u, settings), _time_saturated(a_z, b_z, settings)
    changes_u, changes_z = held_u == 0, held_z == 0
    distance = torch.maximum((a_u - b_u).abs() * changes_u, (a_z - b_z).abs() * changes_z)
    gate_rate = _gate_speed(distance) / settings.tau_s * (changes_u | changes_z)
    longest = panel / (gate_rate + 1 / settings.tau_m)
    longest = torch.where(changes_u, longest, torch.minimum(longest, held_u))
    longest = torch.where(changes_z, longest, torch.minimum(longest, held_z))
    # Rounding must not stop the clock.
    return longest.clamp(min=8 * torch.finfo(longest.dtype).eps * settings.tau_s)


def panel_nodes(a_u: Tensor, b_u: Tensor, a_z: Tensor, b_z: Tensor, h: Tensor, settings: FlowSettings) -> Nodes:
    """Return the gates at the nodes of one panel of length ``h``."""
    q = torch.exp(settings.x.view(-1, *[1] * h.dim()) * (h / -settings.tau_s))
    u = settings.u(torch.addcmul(b_u, a_u - b_u, q))
    z = settings.z(torch.addcmul(b_z, a_z - b_z, q))
    zdot = settings.dz(z) * ((b_z - a_z) / settings.tau_s) * q
    rate = h / settings.tau_m
    return Nodes(q, u, z, zdot, rate * settings.integrate_to_nodes(u), rate * settings.integrate(u))


def end_state(c: Tensor, a_z: Tensor, b_z: Tensor, h: Tensor, nodes: Nodes, settings: FlowSettings) -> Tensor:
    """Return ``c`` at the end of the panel."""
    z1 = settings.z(b_z + (a_z - b_z) * torch.exp(h / -settings.tau_s))
    integral = settings.integrate(torch.exp(nodes.E - nodes.E1) * nodes.zdot)
    return z1 + torch.exp(-nodes.E1) * (c - settings.z(a_z)) - h * integral


def node_states(c: Tensor, a_z: Tensor, h: Tensor, nodes: Nodes, settings: FlowSettings) -> Tensor:
    """Return ``c`` at the nodes of the panel."""
    integral = settings.integrate_to_nodes(torch.exp(nodes.E) * nodes.zdot)
    return nodes.z + torch.exp(-nodes.E) * (c - settings.z(a_z) - h * integral)
