"""What the two passes of the lock-step engine share: the network laid out for it, and the record of its iterations."""

import dataclasses

import torch
from torch import Tensor

from egru.continuous.lockstep.flow import Clock
from egru.continuous.problem import Problem

Rows = tuple[Tensor, Tensor]
"""Samples, and what of each: the input event or the readout."""


@dataclasses.dataclass
class Fired:
    """One internal event in each of some samples."""

    rows: Tensor
    units: Tensor
    times: Tensor
    a_group: Tensor
    """``a`` before the group of simultaneous events each belongs to, ``(rows, 3, H)``."""
    first: Tensor
    """Whether it is the first of its group."""
    forced: Tensor
    place: Tensor
    """Where these events are in the list of all, once that is known."""


@dataclasses.dataclass
class Iteration:
    """State of all samples at its start, time, how far each flows, and then what happens to which."""

    a: Tensor
    c: Tensor
    o: Tensor
    t: Tensor
    dt: Tensor
    internal: Fired | None = None
    input: Rows | None = None
    readout: Rows | None = None


@dataclasses.dataclass
class Tape:
    """All iterations, and the state after the last."""

    iterations: list[Iteration]
    a: Tensor
    c: Tensor
    o: Tensor


@dataclasses.dataclass(frozen=True)
class Network:
    """Weights by the unit or channel they come from, ``(H, 3, H)`` and ``(D, 3, H)``, and the rest as it is."""

    Vt: Tensor
    Ut: Tensor
    b: Tensor
    theta: Tensor
    level: Tensor
    """``artanh(theta)``: ``z > theta`` where ``a_z`` is above it."""
    tau_o: float
    clock: Clock
    problem: Problem

    @classmethod
    def of(cls, problem: Problem) -> "Network":
        problem = problem.connected()
        V, U, theta = problem.V.detach(), problem.U.detach(), problem.theta.detach()
        Vt = V.permute(2, 0, 1).contiguous()
        if not problem.options.self_connections:
            own = torch.arange(len(theta), device=theta.device)
            Vt[own, :, own] = 0.0
        clock = Clock.of(float(problem.tau_s), float(problem.tau_m), problem.options.nodes, theta)
        level = torch.where(theta < 1, torch.atanh(theta.clamp(max=1)), torch.inf)
        Ut = U.permute(2, 0, 1).contiguous()
        return cls(Vt, Ut, problem.b.detach(), theta, level, float(problem.tau_o), clock, problem)

    def amplitude(self, n: Tensor) -> Tensor:
        theta = self.theta[n]
        return theta if self.problem.options.amplitude == "theta" else torch.ones_like(theta)

    def reset(self, n: Tensor, a_group: Tensor) -> Tensor:
        """Reset gates that scale ``V_z`` when ``n`` emit, ``(rows, H)`` or ``(rows, 1)``."""
        a_r = a_group[:, 1]
        return torch.sigmoid(a_r if self.problem.options.reset_side == "post" else a_r.gather(1, n[:, None]))

    def jump(self, n: Tensor, a_group: Tensor) -> tuple[Tensor, Tensor]:
        """Amplitudes ``(rows,)``, and what ``V`` is multiplied with, ``(rows, 3, H)``."""
        y, r = self.amplitude(n), self.reset(n, a_group)
        one = torch.ones(len(n), 2, len(self.theta), dtype=y.dtype, device=y.device)
        return y, torch.cat([one, r.expand(len(n), len(self.theta))[:, None]], 1) * y[:, None, None]
