"""The flow of units over one panel, batched in torch.

The formulas are those of :mod:`egru.continuous.reference.flow`, elementwise. States have any shape ``S`` that the panel
length ``h`` broadcasts to; values at the nodes have shape ``(nodes, *S)``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from egru.continuous.quadrature import gauss_legendre


class FlowSettings(NamedTuple):
    """Time constants, quadrature and tolerances.

    ``x``, ``w`` and ``A`` are the fields of :class:`egru.continuous.quadrature.Rule` as tensors. The crossing search
    stops if ``c`` is within ``state_tolerance`` of its threshold, or if a Newton step is shorter than
    ``step_tolerance`` times ``tau_m``. If Newton stalls, ``stall_tolerance`` is accepted.
    """

    tau_s: float
    tau_m: float
    x: Tensor
    w: Tensor
    A: Tensor
    state_tolerance: float
    step_tolerance: float
    stall_tolerance: float

    @classmethod
    def create(cls, tau_s: float, tau_m: float, nodes: int, like: Tensor) -> "FlowSettings":
        """Return the settings for the dtype and device of ``like``."""
        x, w, A = (torch.as_tensor(v).to(like) for v in gauss_legendre(nodes))
        tolerances = (8e-16, 2e-15, 1e-12) if like.dtype == torch.float64 else (1e-7, 1e-6, 1e-5)
        return cls(tau_s, tau_m, x, w, A, *tolerances)

    def integrate(self, values: Tensor) -> Tensor:
        """Integrate over a panel of length 1, from ``(nodes, *S)`` to ``S``."""
        return torch.tensordot(self.w, values, 1)

    def integrate_to_nodes(self, values: Tensor) -> Tensor:
        """Integrate from the start of a panel of length 1 to each node, from ``(nodes, *S)`` to ``(nodes, *S)``."""
        return torch.tensordot(self.A, values, 1)


class Nodes(NamedTuple):
    """Values at the nodes of one panel; see :class:`egru.continuous.reference.flow.Nodes`."""

    q: Tensor
    u: Tensor
    z: Tensor
    zdot: Tensor
    E: Tensor
    E1: Tensor


def panel_nodes(a_u: Tensor, b_u: Tensor, a_z: Tensor, b_z: Tensor, h: Tensor, settings: FlowSettings) -> Nodes:
    """Return the gates at the nodes of one panel of length ``h``."""
    q = torch.exp(settings.x.view(-1, *[1] * h.dim()) * (h / -settings.tau_s))
    u = torch.sigmoid(torch.addcmul(b_u, a_u - b_u, q))
    z = torch.tanh(torch.addcmul(b_z, a_z - b_z, q))
    zdot = (1 - z * z) * ((b_z - a_z) / settings.tau_s) * q
    rate = h / settings.tau_m
    return Nodes(q, u, z, zdot, rate * settings.integrate_to_nodes(u), rate * settings.integrate(u))


def end_state(c: Tensor, a_z: Tensor, b_z: Tensor, h: Tensor, nodes: Nodes, settings: FlowSettings) -> Tensor:
    """Return ``c`` at the end of the panel."""
    z1 = torch.tanh(b_z + (a_z - b_z) * torch.exp(h / -settings.tau_s))
    integral = settings.integrate(torch.exp(nodes.E - nodes.E1) * nodes.zdot)
    return z1 + torch.exp(-nodes.E1) * (c - torch.tanh(a_z)) - h * integral


def node_states(c: Tensor, a_z: Tensor, h: Tensor, nodes: Nodes, settings: FlowSettings) -> Tensor:
    """Return ``c`` at the nodes of the panel."""
    integral = settings.integrate_to_nodes(torch.exp(nodes.E) * nodes.zdot)
    return nodes.z + torch.exp(-nodes.E) * (c - torch.tanh(a_z) - h * integral)
