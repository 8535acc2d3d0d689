"""The search for the next threshold crossing of each unit within one panel, batched in torch.

The method is that of :mod:`egru.continuous.reference.crossing`, with Newton steps for the windows of adaptive units.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from egru.continuous.lockstep.flow import FlowSettings, end_state, panel_nodes, z_after
from egru.continuous.problem import U, Z


class Units(NamedTuple):
    """The state of some units and the biases that their flow depends on, one entry per unit."""

    a_u: Tensor
    b_u: Tensor
    a_z: Tensor
    b_z: Tensor
    c: Tensor

    def take(self, which: Tensor) -> "Units":
        """Return some of the units."""
        return Units(*(x[which] for x in self))

    def state_after(self, h: Tensor, settings: FlowSettings) -> Tensor:
        """Return ``c`` after one panel of length ``h``."""
        nodes = panel_nodes(self.a_u, self.b_u, self.a_z, self.b_z, h, settings)
        return end_state(self.c, settings.z(self.a_z, self.a_u), self.z_after(h, settings), h, nodes, settings)

    def z_after(self, h: Tensor, settings: FlowSettings) -> Tensor:
        """Return ``z`` after ``h``."""
        return z_after(self.a_u, self.b_u, self.a_z, self.b_z, h, settings)


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
    if settings.tau_a is None:
        now, later = a_z > level, b_z > level
        change = settings.tau_s * torch.log((a_z - b_z) / (level - b_z))  # NaN only where it is not used
        w0 = torch.where(now, 0.0, torch.where(later, change, torch.inf))
        hi = torch.minimum(torch.where(later, torch.inf, torch.where(now, change, 0.0)), horizon[:, None])
    else:  # the windows of the candidates are found below
        w0, hi = torch.zeros_like(c), horizon[:, None].expand_as(c)
    tiny = 4 * torch.finfo(c.dtype).eps
    gap = (settings.z(torch.maximum(a_z, b_z), torch.minimum(a_u, b_u)) - theta + tiny).clamp(min=tiny)
    u = settings.u(torch.maximum(a_u, b_u)).clamp(min=torch.finfo(c.dtype).tiny)  # it may round to 0
    bound = torch.log1p((theta - c).clamp(min=0) / gap) / u
    bound = torch.maximum(w0, bound * (settings.tau_m * (1 - tiny)))
    candidates = (bound <= hi) & (horizon > 0)[:, None]
    if settings.tau_a is None:
        candidates &= (c < theta) | (w0 > 0)

    times = torch.full_like(c, torch.inf)
    solves = torch.zeros(len(c), dtype=torch.int64, device=c.device)
    evaluations = solves.clone()
    row, unit = candidates.nonzero(as_tuple=True)
    if len(row) == 0:
        return Search(times, solves, evaluations)
    units = Units(a_u[row, unit], b_u[unit], a_z[row, unit], b_z[unit], c[row, unit])
    spans = [(w0[row, unit], hi[row, unit])]
    if settings.tau_a is not None:
        spans = _windows(units, theta[unit], hi[row, unit], settings.take(unit))
    for start, stop in spans:
        i, j, part = row, unit, units
        if settings.tau_a is not None:
            use = ((start <= stop) & torch.isinf(times[row, unit])).nonzero()[:, 0]  # only the first crossing counts
            i, j, part, start, stop = row[use], unit[use], units.take(use), start[use], stop[use]
        threshold = theta[j]
        evaluations.index_add_(0, i, torch.ones_like(i))
        reaches = part.state_after(stop, settings.take(j)) >= threshold
        above = part.c >= threshold
        if above.any():  # these must fall below before the window opens
            reaches &= ~above | ((start > 0) & (part.state_after(start, settings.take(j)) < threshold))
        if not reaches.any():
            continue
        i, j, part = i[reaches], j[reaches], part.take(reaches)
        roots, cost = _newton(part, theta[j], start[reaches], stop[reaches], bound[i, j], settings.take(j))
        times[i, j] = roots
        solves.index_add_(0, i, torch.ones_like(i))
        evaluations.index_add_(0, i, cost.to(torch.int64))
    return Search(times, solves, evaluations)


def _windows(units: Units, theta: Tensor, end: Tensor, settings: FlowSettings) -> list[tuple[Tensor, Tensor]]:
    """Return the intervals up to ``end`` in which ``z > theta``; see ``windows`` of the reference engine."""
    assert settings.tau_a is not None
    rate_u, rate_z = (units.a_u - units.b_u) / settings.tau_a, (units.a_z - units.b_z) / settings.tau_s
    turn = torch.log(rate_z / rate_u) / (1 / settings.tau_s - 1 / settings.tau_a)
    start, middle = torch.zeros_like(end), torch.minimum(turn.nan_to_num(nan=0.0, posinf=torch.inf).clamp(min=0.0), end)
    inside = [units.z_after(t, settings) > theta for t in (start, middle, end)]
    now, between, then = inside
    before, after = (
        _z_root(units, theta, *interval, settings) if bool((left != right).any()) else middle
        for interval, left, right in (((start, middle), now, between), ((middle, end), between, then))
    )
    opens = torch.where(now, 0.0, torch.where(between, before, torch.where(then, after, torch.inf)))
    closes = torch.where(now & ~between, before, torch.where(between & ~then, after, end))
    again = torch.where(now & ~between & then, after, torch.inf)
    return [(opens, closes), (again, end)] if bool(torch.isfinite(again).any()) else [(opens, closes)]


def _z_root(units: Units, theta: Tensor, lo: Tensor, hi: Tensor, settings: FlowSettings) -> Tensor:
    """Return where ``z`` crosses ``theta`` in ``[lo, hi]``, in which it is monotone; any point if it does not."""
    assert settings.tau_a is not None
    rate_u, rate_z = (units.a_u - units.b_u) / settings.tau_a, (units.a_z - units.b_z) / settings.tau_s
    sign, t, eps = units.z_after(lo, settings) > theta, 0.5 * (lo + hi), torch.finfo(theta.dtype).eps
    for _ in range(200):
        miss = units.z_after(t, settings) - theta
        same = (miss > 0) == sign
        lo, hi = torch.where(same, t, lo), torch.where(same, hi, t)
        slope = rate_u * torch.exp(t / -settings.tau_a) - rate_z * torch.exp(t / -settings.tau_s)
        step = miss / slope
        proposal = t - step
        inside = (proposal > lo) & (proposal < hi)  # False for NaN
        if bool(((inside & (step.abs() <= 4 * eps * t)) | (hi - lo <= 4 * eps * hi)).all()):
            break
        t = torch.where(inside, proposal, 0.5 * (lo + hi))
    return t


def _newton(
    units: Units, theta: Tensor, lo: Tensor, hi: Tensor, bound: Tensor, settings: FlowSettings
) -> tuple[Tensor, Tensor]:
    """Return the roots of ``c(t) = theta`` in ``[lo, hi]`` and the number of evaluations of each."""
    a_u, b_u, a_z, _, c = units
    u, z = settings.u(a_u), settings.z(a_z, a_u)
    t = torch.log((z - c) / (z - theta)) * (settings.tau_m / u)
    t = torch.where((t > lo) & (t < hi), t, torch.where((bound > lo) & (bound < hi), bound, 0.5 * (lo + hi)))
    root, last = t.clone(), torch.full_like(t, torch.inf)
    stalled, cost = torch.zeros_like(t), torch.zeros_like(t)
    active = torch.ones_like(t, dtype=torch.bool)
    for _ in range(200):
        state = units.state_after(t, settings)
        miss = state - theta
        update = settings.u(b_u + (a_u - b_u) * torch.exp(t / -settings.tau_u))
        rise = update * (units.z_after(t, settings) - state) / settings.tau_m
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
