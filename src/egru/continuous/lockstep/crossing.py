"""The search for the next threshold crossing of each unit within one panel, batched in torch.

The method is that of :mod:`egru.continuous.reference.crossing`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from egru.continuous.lockstep.flow import FlowSettings, end_state, panel_nodes
from egru.continuous.problem import U, Z


class Units(NamedTuple):
    """The state of some units and the biases that their flow depends on, one entry per unit."""

    a_u: Tensor
    b_u: Tensor
    a_z: Tensor
    b_z: Tensor
    c: Tensor

    def state_after(self, h: Tensor, settings: FlowSettings) -> Tensor:
        """Return ``c`` after one panel of length ``h``."""
        nodes = panel_nodes(self.a_u, self.b_u, self.a_z, self.b_z, h, settings)
        return end_state(self.c, self.a_z, self.b_z, h, nodes, settings)


class Search(NamedTuple):
    """Crossing times ``(B, H)``, ``inf`` for units without one, and the cost of the search per sample ``(B,)``."""

    times: Tensor
    solves: Tensor
    evaluations: Tensor


def find_crossings(
    a: Tensor, b: Tensor, level: Tensor, c: Tensor, theta: Tensor, horizon: Tensor, settings: FlowSettings
) -> Search:
    """Return when each unit first reaches its threshold from below, if at most ``horizon`` from now.

    Args:
        a: Activations ``(B, 3, H)``.
        b: Biases ``(3, H)``.
        level: ``artanh(theta)``, ``(H,)``, infinite for ``theta >= 1``.
        c: States ``(B, H)``.
        theta: Thresholds ``(H,)``.
        horizon: One time per sample ``(B,)``, at most one panel.
        settings: Constants of the flow.
    """
    a_u, a_z, b_u, b_z = a[:, U], a[:, Z], b[U], b[Z]
    now, later = a_z > level, b_z > level
    change = settings.tau_s * torch.log((a_z - b_z) / (level - b_z))  # NaN only where it is not used
    w0 = torch.where(now, 0.0, torch.where(later, change, torch.inf))
    hi = torch.minimum(torch.where(later, torch.inf, torch.where(now, change, 0.0)), horizon[:, None])
    tiny = 4 * torch.finfo(c.dtype).eps
    gap = (settings.z(torch.maximum(a_z, b_z)) - theta + tiny).clamp(min=tiny)
    u = settings.u(torch.maximum(a_u, b_u)).clamp(min=torch.finfo(c.dtype).tiny)  # it may round to 0
    bound = torch.log1p((theta - c).clamp(min=0) / gap) / u
    bound = torch.maximum(w0, bound * (settings.tau_m * (1 - tiny)))
    candidates = (bound <= hi) & (horizon > 0)[:, None] & ((c < theta) | (w0 > 0))

    times = torch.full_like(c, torch.inf)
    zero = torch.zeros(len(c), dtype=torch.int64, device=c.device)
    row, unit = candidates.nonzero(as_tuple=True)
    if len(row) == 0:
        return Search(times, zero, zero)
    evaluations = zero.index_add(0, row, torch.ones_like(row))

    def take() -> Units:
        return Units(a_u[row, unit], b_u[unit], a_z[row, unit], b_z[unit], c[row, unit])

    units, threshold, start, stop = take(), theta[unit], w0[row, unit], hi[row, unit]
    part = settings.take(unit)
    reaches = units.state_after(stop, part) >= threshold
    above = units.c >= threshold
    if above.any():  # these must fall below before the window opens
        reaches &= ~above | (units.state_after(start, part) < threshold)
    row, unit = row[reaches], unit[reaches]
    if len(row) == 0:
        return Search(times, zero, evaluations)
    part = settings.take(unit)
    times[row, unit], cost = _newton(take(), theta[unit], w0[row, unit], hi[row, unit], bound[row, unit], part)
    return Search(
        times, zero.index_add(0, row, torch.ones_like(row)), evaluations.index_add(0, row, cost.to(torch.int64))
    )


def _newton(
    units: Units, theta: Tensor, lo: Tensor, hi: Tensor, bound: Tensor, settings: FlowSettings
) -> tuple[Tensor, Tensor]:
    """Return the roots of ``c(t) = theta`` in ``[lo, hi]`` and the number of evaluations of each."""
    a_u, b_u, a_z, b_z, c = units
    u, z = settings.u(a_u), settings.z(a_z)
    t = torch.log((z - c) / (z - theta)) * (settings.tau_m / u)
    t = torch.where((t > lo) & (t < hi), t, torch.where((bound > lo) & (bound < hi), bound, 0.5 * (lo + hi)))
    root, last = t.clone(), torch.full_like(t, torch.inf)
    stalled, cost = torch.zeros_like(t), torch.zeros_like(t)
    active = torch.ones_like(t, dtype=torch.bool)
    for _ in range(200):
        q = torch.exp(t / -settings.tau_s)
        state = units.state_after(t, settings)
        miss = state - theta
        rise = settings.u(b_u + (a_u - b_u) * q) * (settings.z(b_z + (a_z - b_z) * q) - state) / settings.tau_m
        cost += active
        below = miss < 0
        lo, hi = torch.where(below, t, lo), torch.where(below, hi, t)
        stalled = torch.where(2 * miss.abs() > last, stalled + 1, 0)
        last = miss.abs()
        step = miss / rise
        proposal = t - step
        inside = (proposal >= lo) & (proposal <= hi)
        done = (
            (last <= settings.state_tolerance)
            | (inside & (step.abs() <= settings.step_tolerance * settings.tau_m))
            | (hi - lo <= 2 * torch.finfo(t.dtype).eps * hi)
            | ((stalled >= 2) & (last <= settings.stall_tolerance))
        )
        accept_step = inside & (step.abs() <= max(1e-12, settings.step_tolerance) * settings.tau_m)
        root = torch.where(active, torch.where(accept_step, proposal, t), root)
        t = torch.where(inside & (stalled < 2), proposal, 0.5 * (lo + hi))
        stalled = torch.where(stalled >= 2, 0.0, stalled)
        active &= ~done
        if not active.any():
            break
    return root, cost
