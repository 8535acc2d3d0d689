"""One panel of the flow in torch, for whole batches: :mod:`egru.continuous.reference.flow`, elementwise.

States have any shape ``S`` that ``h``, the length of the panel, broadcasts to; values at nodes have shape
``(nodes, *S)``. A gate's activation and its bias travel as one pair.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from egru.continuous.quadrature import gauss_legendre


class Clock(NamedTuple):
    """Time constants, the quadrature as tensors, and the tolerances of the type computed in."""

    tau_s: float
    tau_m: float
    x: Tensor
    w: Tensor
    A: Tensor
    near: float
    """A state this close to its threshold is at it."""
    step: float
    """A Newton step this small, in units of ``tau_m``, is the last."""
    settle: float
    """Where Newton stalls this close, it is as good as it gets."""

    @classmethod
    def of(cls, tau_s: float, tau_m: float, nodes: int, like: Tensor) -> "Clock":
        x, w, A = (torch.as_tensor(v).to(like) for v in gauss_legendre(nodes))
        fine = like.dtype == torch.float64
        tolerances = (8e-16, 2e-15, 1e-12) if fine else (1e-7, 1e-6, 1e-5)
        return cls(tau_s, tau_m, x, w, A, *tolerances)

    def integrate(self, values: Tensor) -> Tensor:
        """Over the panel of length 1: ``(nodes, *S)`` to ``S``."""
        return torch.tensordot(self.w, values, 1)

    def integrate_to_nodes(self, values: Tensor) -> Tensor:
        """Up to each node: ``(nodes, *S)`` to ``(nodes, *S)``."""
        return torch.tensordot(self.A, values, 1)


class Nodes(NamedTuple):
    """Values at the nodes; ``E`` is the integral of ``u / tau_m`` so far and ``E1`` that over the whole panel."""

    q: Tensor
    u: Tensor
    z: Tensor
    zdot: Tensor
    E: Tensor
    E1: Tensor


def nodes(a_u: Tensor, b_u: Tensor, a_z: Tensor, b_z: Tensor, h: Tensor, clock: Clock) -> Nodes:
    q = torch.exp(clock.x.view(-1, *[1] * h.dim()) * (h / -clock.tau_s))
    u = torch.sigmoid(torch.addcmul(b_u, a_u - b_u, q))
    z = torch.tanh(torch.addcmul(b_z, a_z - b_z, q))
    zdot = (1 - z * z) * ((b_z - a_z) / clock.tau_s) * q
    rate = h / clock.tau_m
    return Nodes(q, u, z, zdot, rate * clock.integrate_to_nodes(u), rate * clock.integrate(u))


def end_state(c: Tensor, a_z: Tensor, b_z: Tensor, h: Tensor, on: Nodes, clock: Clock) -> Tensor:
    """``c`` at the end of the panel."""
    end = torch.tanh(b_z + (a_z - b_z) * torch.exp(h / -clock.tau_s))
    return end + torch.exp(-on.E1) * (c - torch.tanh(a_z)) - h * clock.integrate(torch.exp(on.E - on.E1) * on.zdot)


def node_states(c: Tensor, a_z: Tensor, h: Tensor, on: Nodes, clock: Clock) -> Tensor:
    """``c`` at the nodes."""
    return on.z + torch.exp(-on.E) * (c - torch.tanh(a_z) - h * clock.integrate_to_nodes(torch.exp(on.E) * on.zdot))


class Units(NamedTuple):
    """What the flow of ``c`` depends on, one entry per unit."""

    a_u: Tensor
    b_u: Tensor
    a_z: Tensor
    b_z: Tensor
    c: Tensor

    def after(self, h: Tensor, clock: Clock) -> Tensor:
        """``c`` after ``h``, one panel."""
        return end_state(self.c, self.a_z, self.b_z, h, nodes(self.a_u, self.b_u, self.a_z, self.b_z, h, clock), clock)


class Search(NamedTuple):
    """Crossing times ``(B, H)``, ``inf`` where there is none, and per sample the number of solves and evaluations."""

    times: Tensor
    solves: Tensor
    evaluations: Tensor


def crossing(a: Tensor, b: Tensor, level: Tensor, c: Tensor, theta: Tensor, horizon: Tensor, clock: Clock) -> Search:
    """When each unit first reaches its threshold from below, at most ``horizon``, ``(B,)``, from now: one panel.

    ``a`` is ``(B, 3, H)``, ``b`` ``(3, H)``, ``c`` ``(B, H)``; ``level`` is ``artanh(theta)``, infinite from 1 on. The
    steps are those of :func:`egru.continuous.flow.crossing`.
    """
    a_u, a_z, b_u, b_z = a[:, 0], a[:, 2], b[0], b[2]
    now, later = a_z > level, b_z > level
    change = clock.tau_s * torch.log((a_z - b_z) / (level - b_z))  # NaN only where it is not used
    w0 = torch.where(now, 0.0, torch.where(later, change, torch.inf))
    hi = torch.minimum(torch.where(later, torch.inf, torch.where(now, change, 0.0)), horizon[:, None])
    tiny = 4 * torch.finfo(c.dtype).eps
    gap = (torch.tanh(torch.maximum(a_z, b_z)) - theta + tiny).clamp(min=tiny)
    bound = torch.log1p((theta - c).clamp(min=0) / gap) / torch.sigmoid(torch.maximum(a_u, b_u))
    bound = torch.maximum(w0, bound * (clock.tau_m * (1 - tiny)))
    live = (bound <= hi) & (horizon > 0)[:, None] & ((c < theta) | (w0 > 0))

    times = torch.full_like(c, torch.inf)
    zero = torch.zeros(len(c), dtype=torch.int64, device=c.device)
    row, unit = live.nonzero(as_tuple=True)
    if len(row) == 0:
        return Search(times, zero, zero)
    evaluations = zero.index_add(0, row, torch.ones_like(row))

    def units() -> Units:
        return Units(a_u[row, unit], b_u[unit], a_z[row, unit], b_z[unit], c[row, unit])

    some, level_c, start, stop = units(), theta[unit], w0[row, unit], hi[row, unit]
    reaches = some.after(stop, clock) >= level_c
    above = some.c >= level_c
    if above.any():  # must have fallen below when the window opens
        reaches &= ~above | (some.after(start, clock) < level_c)
    row, unit = row[reaches], unit[reaches]
    if len(row) == 0:
        return Search(times, zero, evaluations)
    times[row, unit], cost = _newton(units(), theta[unit], w0[row, unit], hi[row, unit], bound[row, unit], clock)
    return Search(
        times, zero.index_add(0, row, torch.ones_like(row)), evaluations.index_add(0, row, cost.to(torch.int64))
    )


def _newton(some: Units, theta: Tensor, lo: Tensor, hi: Tensor, bound: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
    """Roots of ``c(t) = theta`` in ``[lo, hi]``, and evaluations: Newton, and halving where it stalls."""
    a_u, b_u, a_z, b_z, c = some
    u, z = torch.sigmoid(a_u), torch.tanh(a_z)
    t = torch.log((z - c) / (z - theta)) * (clock.tau_m / u)
    t = torch.where((t > lo) & (t < hi), t, torch.where((bound > lo) & (bound < hi), bound, 0.5 * (lo + hi)))
    root, last = t.clone(), torch.full_like(t, torch.inf)
    stalled, cost = torch.zeros_like(t), torch.zeros_like(t)
    live = torch.ones_like(t, dtype=torch.bool)
    for _ in range(200):
        q = torch.exp(t / -clock.tau_s)
        state = some.after(t, clock)
        miss = state - theta
        rise = torch.sigmoid(b_u + (a_u - b_u) * q) * (torch.tanh(b_z + (a_z - b_z) * q) - state) / clock.tau_m
        cost += live
        below = miss < 0
        lo, hi = torch.where(below, t, lo), torch.where(below, hi, t)
        stalled = torch.where(2 * miss.abs() > last, stalled + 1, 0)
        last = miss.abs()
        step = miss / rise
        goal = t - step
        inside = (goal >= lo) & (goal <= hi)
        done = (
            (last <= clock.near)
            | (inside & (step.abs() <= clock.step * clock.tau_m))
            | (hi - lo <= 2 * torch.finfo(t.dtype).eps * hi)
            | ((stalled >= 2) & (last <= clock.settle))
        )
        better = torch.where(inside & (step.abs() <= max(1e-12, clock.step) * clock.tau_m), goal, t)
        root = torch.where(live, better, root)
        t = torch.where(inside & (stalled < 2), goal, 0.5 * (lo + hi))
        stalled = torch.where(stalled >= 2, 0.0, stalled)
        live &= ~done
        if not live.any():
            break
    return root, cost
