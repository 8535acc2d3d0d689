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
    ``u = 1`` and ``z = a_z``. If they have ``tau_a``, they are adaptive: ``z = a_z - a_u``. Time constants are numbers,
    or tensors with one entry per unit.
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
    tau_a: float | Tensor | None = None

    @classmethod
    def create(
        cls,
        tau_s: float | Tensor,
        tau_m: float | Tensor,
        nodes: int,
        like: Tensor,
        linear: bool,
        tau_a: float | Tensor | None = None,
    ) -> "FlowSettings":
        """Return the settings for the dtype and device of ``like``."""
        x, w, A = (torch.as_tensor(v).to(like) for v in gauss_legendre(nodes))
        tolerances = (8e-16, 2e-15, 1e-12) if like.dtype == torch.float64 else (1e-7, 1e-6, 1e-5)
        return cls(tau_s, tau_m, x, w, A, *tolerances, linear, tau_a)

    def take(self, units: Tensor) -> "FlowSettings":
        """Return the settings of some units."""
        tau_a = None if self.tau_a is None else of_units(self.tau_a, units)
        return self._replace(tau_s=of_units(self.tau_s, units), tau_m=of_units(self.tau_m, units), tau_a=tau_a)

    @property
    def tau_u(self) -> float | Tensor:
        """The time constant of ``a_u``."""
        return self.tau_s if self.tau_a is None else self.tau_a

    def gate_tau(self, like: Tensor) -> float | Tensor:
        """Return the time constants of the activations: ``tau_s``, or ``(3, H)`` for adaptive units."""
        if self.tau_a is None:
            return self.tau_s
        row = like.new_zeros(like.shape[-1])
        return torch.stack([row + tau for tau in (self.tau_a, self.tau_s, self.tau_s)])

    def u(self, a: Tensor) -> Tensor:
        """Return the update gate: sigmoid, or 1 for linear units."""
        return torch.ones_like(a) if self.linear else torch.sigmoid(a)

    def z(self, a_z: Tensor, a_u: Tensor) -> Tensor:
        """Return the proposed state: tanh, or ``a_z`` for linear units, less the adaptation current ``a_u`` if any."""
        if self.tau_a is not None:
            return a_z - a_u
        return a_z if self.linear else torch.tanh(a_z)

    def dz(self, z: Tensor) -> Tensor:
        """Return the derivative of ``z`` with respect to ``a_z``, given ``z``."""
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
    """Values at the nodes of one panel; see :class:`egru.continuous.reference.flow.Nodes`.

    ``q`` is the decay of gates r and z, ``q_u`` that of gate u.
    """

    q: Tensor
    q_u: Tensor
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
        fastest = settings.tau_s
        if settings.tau_a is not None:
            fastest = torch.minimum(torch.as_tensor(settings.tau_a), torch.as_tensor(settings.tau_s)).to(a_u)
        return panel / (_gate_speed(distance) / fastest + 1 / settings.tau_m)
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
    x = settings.x.view(-1, *[1] * h.dim())
    q = torch.exp(x * (h / -settings.tau_s))
    q_u = q if settings.tau_a is None else torch.exp(x * (h / -settings.tau_a))
    at_nodes = torch.addcmul(b_u, a_u - b_u, q_u)
    u, z = settings.u(at_nodes), settings.z(torch.addcmul(b_z, a_z - b_z, q), at_nodes)
    zdot = settings.dz(z) * ((b_z - a_z) / settings.tau_s) * q
    if settings.tau_a is not None:
        zdot = zdot - ((b_u - a_u) / settings.tau_a) * q_u
    rate = h / settings.tau_m
    return Nodes(q, q_u, u, z, zdot, rate * settings.integrate_to_nodes(u), rate * settings.integrate(u))


def z_after(a_u: Tensor, b_u: Tensor, a_z: Tensor, b_z: Tensor, h: Tensor, settings: FlowSettings) -> Tensor:
    """Return ``z`` after ``h``."""
    if settings.tau_a is not None:
        a_u = b_u + (a_u - b_u) * torch.exp(h / -settings.tau_a)
    return settings.z(b_z + (a_z - b_z) * torch.exp(h / -settings.tau_s), a_u)


def end_state(c: Tensor, z0: Tensor, z1: Tensor, h: Tensor, nodes: Nodes, settings: FlowSettings) -> Tensor:
    """Return ``c`` at the end of the panel, where ``z`` goes from ``z0`` to ``z1``."""
    integral = settings.integrate(torch.exp(nodes.E - nodes.E1) * nodes.zdot)
    return z1 + torch.exp(-nodes.E1) * (c - z0) - h * integral


def node_states(c: Tensor, z0: Tensor, h: Tensor, nodes: Nodes, settings: FlowSettings) -> Tensor:
    """Return ``c`` at the nodes of the panel."""
    integral = settings.integrate_to_nodes(torch.exp(nodes.E) * nodes.zdot)
    return nodes.z + torch.exp(-nodes.E) * (c - z0 - h * integral)
