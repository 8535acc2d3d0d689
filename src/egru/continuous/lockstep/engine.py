"""Whole batches in torch, on CPU and GPU: each iteration is the next event of every sample, at its own time.

An iteration flows all samples over at most one panel, so that shapes do not depend on how long they wait; a sample
whose next event is further away does nothing at the end of it. The backward pass, in
:mod:`egru.continuous.lockstep.adjoint`, repeats the iterations in reverse from the states kept at their starts.
"""

import torch
from torch import Tensor

from egru.continuous.lockstep.adjoint import backward
from egru.continuous.lockstep.flow import crossing, end_state, node_states, nodes
from egru.continuous.lockstep.schedule import END, INPUT, INTERNAL, NOTHING, READOUT, schedule
from egru.continuous.lockstep.tape import Fired, Iteration, Network, Tape
from egru.continuous.problem import (
    TIE,
    Cotangents,
    Counters,
    Events,
    Gradients,
    Problem,
    RunningLoss,
    event_limit,
    limit_error,
)


class _Batch:
    """All samples on their way through time."""

    def __init__(self, problem: Problem, running_loss: RunningLoss | None) -> None:
        self.problem, self.running_loss, self.net = problem, running_loss, Network.of(problem)
        self.a, self.c = problem.a0.detach().clone(), problem.c0.detach().clone()
        self.o = torch.zeros_like(self.c)
        B, H = self.c.shape
        device = self.c.device
        self.samples = torch.arange(B, device=device)
        self.t = torch.zeros(B, dtype=torch.float64, device=device)
        self.schedule = schedule(problem)
        self.at = torch.zeros(B, dtype=torch.int64, device=device)
        self.above = self.c >= self.net.theta
        self.pending = self.above & (torch.tanh(self.a[:, 2]) > self.net.theta)
        """Units of the current group that have yet to fire; at first those that start above and may."""
        self.forced = self.pending.any(1)
        self.opening = self.forced.clone()
        """Whether the next event is the first of its group."""
        self.a_group = self.a.clone()
        R = len(problem.readout_times)
        self.c_read, self.o_read = self.c.new_zeros(B, R, H), self.c.new_zeros(B, R, H)
        self.integral = self.c.new_zeros(B)
        counts = torch.zeros(B, dtype=torch.int64, device=device)
        self.counters = Counters(counts, counts.clone(), counts.clone(), torch.full_like(self.integral, torch.inf))
        self.limit = event_limit(problem)
        self.below = torch.nextafter(self.net.theta, torch.zeros_like(self.net.theta))
        self.tie = TIE[self.c.dtype] * self.net.clock.tau_m
        self.tape = Tape([], self.a, self.c, self.o)

    def run(self) -> None:
        while not (self.at >= self.schedule.times.shape[1]).all():
            self.iterate()
        self.tape.a, self.tape.c, self.tape.o = self.a, self.c, self.o

    def iterate(self) -> None:
        """The next event of every sample."""
        net, length = self.net, self.schedule.times.shape[1]
        at = self.at.clamp(max=length - 1)[:, None]
        until = self.schedule.times.gather(1, at)[:, 0]
        wait = (until - self.t).to(self.c.dtype)
        distance = torch.maximum((self.a[:, 0] - net.b[0]).abs(), (self.a[:, 2] - net.b[2]).abs()).amax(1)
        longest = self.problem.options.panel / ((1 + 0.5 * distance) / net.clock.tau_s + 1 / net.clock.tau_m)
        held = self.pending.any(1) | (self.at >= length)
        arrives = (wait <= longest) & ~held
        h = torch.where(held, 0.0, torch.minimum(wait, longest))
        search = crossing(
            self.a, net.b, net.level, self.c, net.theta, torch.where(arrives & (h > 0), h + self.tie, h), net.clock
        )
        self.counters.root_solves += search.solves
        self.counters.flow_evaluations += search.evaluations
        first = search.times.amin(1)
        fires = torch.isfinite(first)
        dt = torch.where(fires, torch.minimum(first, h), h)
        iteration = Iteration(self.a, self.c, self.o, self.t, dt)
        start = self.t
        stop = torch.where(fires, torch.minimum(start + first.double(), until), torch.where(arrives, until, start + h))
        self.t = torch.where(held, start, stop)
        self.flow(dt, start)
        # No crossing was found up to here: what stands at its threshold got there by rounding, and crosses next.
        self.above = self.above & (self.c >= net.theta)
        self.c = torch.where(self.above, self.c, torch.minimum(self.c, self.below))
        self.pending = self.pending | (fires[:, None] & (search.times <= (first + self.tie)[:, None]))
        self.opening = self.opening | fires
        self.a_group = torch.where(fires[:, None, None], self.a, self.a_group)

        internal = self.pending.any(1)
        kind = torch.where(arrives, self.schedule.kinds.gather(1, at)[:, 0], NOTHING)
        kind = torch.where(internal, INTERNAL, kind)
        self.at = torch.where(kind == END, length, self.at + (kind < END))
        indices = self.schedule.indices.gather(1, at)[:, 0]
        self.a, self.c, self.o = self.a.clone(), self.c.clone(), self.o.clone()
        if internal.any():
            self.fire(internal.nonzero()[:, 0], iteration)
        rows = (kind == INPUT).nonzero()[:, 0]
        if len(rows):
            k = indices[rows]
            self.a[rows] += net.Ut[self.problem.input_channels[k]] * self.problem.input_values[k, None, None]
            iteration.input = (rows, k)
        rows = (kind == READOUT).nonzero()[:, 0]
        if len(rows):
            self.c_read[rows, indices[rows]], self.o_read[rows, indices[rows]] = self.c[rows], self.o[rows]
            iteration.readout = (rows, indices[rows])
        self.tape.iterations.append(iteration)

    def flow(self, dt: Tensor, start: Tensor) -> None:
        """Every sample over its own ``dt``, at most one panel."""
        net, h = self.net, dt[:, None]
        a_u, a_z = self.a[:, 0], self.a[:, 2]
        on = nodes(a_u, net.b[0], a_z, net.b[2], h, net.clock)
        if self.running_loss is not None:
            c = node_states(self.c, a_z, h, on, net.clock)
            t = start + net.clock.x[:, None] * dt
            with torch.no_grad():
                value = self.running_loss(c.flatten(0, 1), t.to(c.dtype).flatten(), self.samples.repeat(len(c)))
            self.integral += dt * net.clock.integrate(value.view(len(c), -1))
        moved = (h > 0).expand_as(self.c)
        self.c = torch.where(moved, end_state(self.c, a_z, net.b[2], h, on, net.clock), self.c)
        self.a = net.b + (self.a - net.b) * torch.exp(dt / -net.clock.tau_s)[:, None, None]
        self.o = self.o * torch.exp(h / -net.tau_o)
        self.counters.flow_evaluations += moved.sum(1)

    def fire(self, rows: Tensor, iteration: Iteration) -> None:
        """One internal event in each of ``rows``: the first unit that waits."""
        net = self.net
        n = self.pending[rows].to(torch.int8).argmax(1)
        self.counters.events[rows] += 1
        if bool((self.counters.events[rows] > self.limit).any()):
            sample = int(rows[self.counters.events[rows] > self.limit][0])
            raise limit_error(self.problem, sample, float(self.t[sample]))
        forced, a_group = self.forced[rows], self.a_group[rows]
        rise = torch.tanh(a_group[torch.arange(len(rows), device=rows.device), 2, n]) - net.theta[n]
        rise = torch.where(forced, torch.inf, rise)
        self.counters.min_slope[rows] = torch.minimum(self.counters.min_slope[rows], rise)
        y, scale = net.jump(n, a_group)
        self.a[rows] += net.Vt[n] * scale
        self.c[rows, n] = 0.0
        self.o[rows, n] += y
        self.above[rows, n] = False
        self.pending[rows, n] = False
        iteration.internal = Fired(
            rows, n, self.t[rows].to(self.c.dtype), a_group, self.opening[rows], forced, place=rows
        )
        self.opening[rows] = False
        self.forced[rows] &= self.pending[rows].any(1)


class LockstepEngine:
    """The batched engine."""

    name = "lockstep"

    def unsupported(self, problem: Problem, running_loss: RunningLoss | None = None) -> str | None:
        if problem.c0.dtype not in TIE:
            return f"it computes in float64 and float32, not in {problem.c0.dtype}"
        return None

    @torch.no_grad()
    def forward(self, problem: Problem, running_loss: RunningLoss | None = None) -> Events:
        batch = _Batch(problem, running_loss)
        batch.run()
        tape = batch.tape
        fired = [i.internal for i in tape.iterations if i.internal is not None]
        none = batch.at.new_zeros(0)
        order = torch.cat([none, *(f.rows for f in fired)]).argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        for f, where in zip(fired, place.split([len(f.rows) for f in fired]), strict=True):
            f.place = where
        offsets = torch.zeros(len(batch.c) + 1, dtype=torch.int64, device=order.device)
        offsets[1:] = batch.counters.events.cumsum(0)
        return Events(
            torch.cat([batch.c.new_zeros(0), *(f.times for f in fired)])[order],
            torch.cat([none, *(f.units for f in fired)])[order],
            offsets,
            batch.c_read,
            batch.o_read,
            batch.counters,
            tape,
            batch.a,
            None if running_loss is None else batch.integral,
        )

    def backward(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None = None
    ) -> Gradients:
        return backward(problem, events, cotangents, running_loss)
