"""The parameters of a problem in the layout of the lockstep engine."""

import dataclasses

import torch
from torch import Tensor

from egru.continuous.lockstep.flow import FlowSettings
from egru.continuous.problem import Problem, R


@dataclasses.dataclass(frozen=True)
class Network:
    """Weights by the unit or channel they come from, with zeros where there is no connection.

    Attributes:
        Vt: Recurrent weights ``(H, 3, H)``, ``[pre, gate, post]``; with delays ``(L, 3, H)``, ``[line, gate, post]``.
        Ut: Input weights ``(D, 3, H)``, ``[channel, gate, post]``.
        level: ``z > theta`` if ``a_z > level``: ``artanh(theta)``, infinite for ``theta >= 1``; ``theta`` if linear.
    """

    Vt: Tensor
    Ut: Tensor
    b: Tensor
    theta: Tensor
    level: Tensor
    tau_o: float | Tensor
    settings: FlowSettings
    problem: Problem
    gate_tau: float | Tensor
    """The time constants of the activations: ``tau_s``, or ``(3, H)`` for adaptive units."""

    @classmethod
    def from_problem(cls, problem: Problem) -> "Network":
        problem = problem.with_dense_weights()
        V, U, theta = problem.V.detach(), problem.U.detach(), problem.theta.detach()
        Vt = V.permute(2, 0, 1).contiguous()
        if not problem.options.self_connections and problem.line_offsets is None:
            diagonal = torch.arange(len(theta), device=theta.device)
            Vt[diagonal, :, diagonal] = 0.0
        linear = problem.options.linear
        taus = (problem.tau_s, problem.tau_m, problem.tau_o, problem.tau_a)
        tau_s, tau_m, tau_o, tau_a = (tau.detach() if tau.dim() else float(tau) for tau in taus)
        adaptation = tau_a if problem.options.adaptive else None
        settings = FlowSettings.create(tau_s, tau_m, problem.options.nodes, theta, linear, adaptation)
        level = theta if linear else torch.where(theta < 1, torch.atanh(theta.clamp(max=1)), torch.inf)
        Ut = U.permute(2, 0, 1).contiguous()
        gate_tau = settings.gate_tau(theta)
        return cls(Vt, Ut, problem.b.detach(), theta, level, tau_o, settings, problem, gate_tau)

    def amplitude(self, n: Tensor) -> Tensor:
        """Return the values that events of the units ``n`` carry."""
        theta = self.theta[n]
        return theta if self.problem.options.amplitude == "theta" else torch.ones_like(theta)

    def gate(self, a_r: Tensor) -> Tensor:
        """Return the reset gate."""
        return torch.ones_like(a_r) if self.settings.linear else torch.sigmoid(a_r)

    def rho_z(self, n: Tensor, a_group: Tensor) -> Tensor:
        """Return the factors of ``V_z`` at events of the units ``n``: ``(rows, H)``, or ``(rows, 1)`` if shared."""
        a_r = a_group[:, R]
        return self.gate(a_r if self.problem.options.reset_side == "post" else a_r.gather(1, n[:, None]))

    def jump(self, n: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return the amplitudes ``(rows,)`` and the factors ``rho_x y`` of ``V``, ``(rows, 3, H)``, given ``rho_z``."""
        y = self.amplitude(n)
        one = torch.ones(len(n), 2, len(self.theta), dtype=y.dtype, device=y.device)
        return y, torch.cat([one, r.expand(len(n), len(self.theta))[:, None]], 1) * y[:, None, None]
