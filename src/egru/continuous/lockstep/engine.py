"""The forward pass of the lockstep engine.

Each iteration advances every sample to its next event, but by at most one panel. So the shapes of the tensors do not
depend on the length of the intervals, and a sample whose next event is further away only flows. A sample at rest, whose
activations equal their biases to rounding, has a closed form and advances to its next event whatever the distance. With
a running loss, samples at rest advance by panels too, but their length is that of the state, whatever ``tau_s`` is. The
backward pass, in :mod:`egru.continuous.lockstep.adjoint`, goes through the iterations in reverse, from the states
recorded at their starts.
"""

import torch
from torch import Tensor

from egru.continuous.limits import event_limit, limit_error, resolution_error
from egru.continuous.lockstep.adjoint import backward
from egru.continuous.lockstep.arrivals import Arrivals
from egru.continuous.lockstep.crossing import find_crossings
from egru.continuous.lockstep.flow import end_state, is_at_rest, longest_panel, node_states, panel_nodes, z_after
from egru.continuous.lockstep.network import Network
from egru.continuous.lockstep.schedule import DELIVERY, END, INPUT, INTERNAL, NOTHING, READOUT, make_schedule
from egru.continuous.lockstep.tape import Deliveries, Emissions, Iteration, Tape
from egru.continuous.options import EngineName
from egru.continuous.problem import (
    TIE,
    Cotangents,
    Counters,
    Events,
    Gradients,
    Problem,
    R,
    RunningLoss,
    U,
    Z,
)


class _Batch:
    """The forward pass of a batch."""

    def __init__(self, problem: Problem, running_loss: RunningLoss | None) -> None:
        self.problem, self.running_loss, self.net = problem, running_loss, Network.from_problem(problem)
        self.a, self.c = problem.a0.detach().clone(), problem.c0.detach().clone()
        self.o = torch.zeros_like(self.c)
        B, H = self.c.shape
        device = self.c.device
        self.samples = torch.arange(B, device=device)
        self.t = torch.zeros(B, dtype=torch.float64, device=device)
        self.schedule = make_schedule(problem)
        self.next_entry = torch.zeros(B, dtype=torch.int64, device=device)
        self.above = self.c >= self.net.theta
        self.pending = self.above & (self.net.settings.z(self.a[:, Z], self.a[:, U]) > self.net.theta)
        """Units of the current group that have yet to emit; at the start, those above threshold with ``z > theta``."""
        self.forced = self.pending.any(1)
        self.starts_group = self.forced.clone()
        """Whether the next internal event is the first of its group."""
        self.a_group = self.a.clone()
        shape = (B, problem.readouts.shape[1], H)
        self.c_read, self.o_read = self.c.new_zeros(shape), self.c.new_zeros(shape)
        self.integral = self.c.new_zeros(B)
        counts = torch.zeros(B, dtype=torch.int64, device=device)
        self.counters = Counters(counts, counts.clone(), counts.clone(), torch.full_like(self.integral, torch.inf))
        self.limit = event_limit(problem)
        self.arrivals = None if problem.line_offsets is None else Arrivals(problem)
        self.emitted = torch.full_like(self.c, -1.0, dtype=torch.float64)
        """The time of the last event of each unit."""
        self.below = torch.nextafter(self.net.theta, torch.zeros_like(self.net.theta))
        fastest = float(problem.tau_m.min())
        self.tie = TIE[self.c.dtype] * fastest
        self.longest_rest = torch.inf if running_loss is None else problem.options.panel * fastest
        self.tape = Tape([], self.a, self.c, self.o)

    def run(self) -> None:
        while not (self.next_entry >= self.schedule.times.shape[1]).all():
            self.iterate()
        self.tape.a, self.tape.c, self.tape.o = self.a, self.c, self.o

    def iterate(self) -> None:
        """Advance every sample to its next event, by at most one panel."""
        net, length = self.net, self.schedule.times.shape[1]
        entry = self.next_entry.clamp(max=length - 1)[:, None]
        until = self.schedule.times.gather(1, entry)[:, 0]
        delivers = place = None
        if self.arrivals is not None:
            arrival, place = self.arrivals.next()
            delivers = arrival <= until
            until = torch.minimum(until, arrival)
        wait = (until - self.t).to(self.c.dtype)
        panel = self.problem.options.panel
        longest = longest_panel(self.a[:, U], net.b[U], self.a[:, Z], net.b[Z], panel, net.settings).amin(1)
        rests = is_at_rest(self.a[:, U], net.b[U], self.a[:, Z], net.b[Z]).all(1)
        longest = torch.where(rests, self.longest_rest, longest)
        self.a[:, [U, Z]] = torch.where(rests[:, None, None], net.b[[U, Z]], self.a[:, [U, Z]])
        paused = self.pending.any(1) | (self.next_entry >= length)
        arrives = (wait <= longest) & ~paused
        h = torch.where(paused, 0.0, torch.minimum(wait, longest))
        search = find_crossings(
            self.a, net.b, net.level, self.c, net.theta, torch.where(arrives & (h > 0), h + self.tie, h), net.settings
        )
        self.counters.root_solves += search.solves
        self.counters.flow_evaluations += search.evaluations
        first = search.times.amin(1)
        emits = torch.isfinite(first)
        dt = torch.where(emits, torch.minimum(first, h), h)
        iteration = Iteration(self.a, self.c, self.o, self.t, dt, rests)
        start = self.t
        stop = torch.where(emits, torch.minimum(start + first.double(), until), torch.where(arrives, until, start + h))
        self.t = torch.where(paused, start, stop)
        self.flow(dt, start)
        # No crossing was found up to here. A state at its threshold got there by rounding and crosses later.
        self.above = self.above & (self.c >= net.theta)
        self.c = torch.where(self.above, self.c, torch.minimum(self.c, self.below))
        self.pending = self.pending | (emits[:, None] & (search.times <= (first + self.tie)[:, None]))
        self.starts_group = self.starts_group | emits
        self.a_group = torch.where(emits[:, None, None], self.a, self.a_group)

        internal = self.pending.any(1)
        kind = torch.where(arrives, self.schedule.kinds.gather(1, entry)[:, 0], NOTHING)
        if delivers is not None:
            kind = torch.where(arrives & delivers, DELIVERY, kind)
        kind = torch.where(internal, INTERNAL, kind)
        self.next_entry = torch.where(kind == END, length, self.next_entry + (kind < END))
        indices = self.schedule.indices.gather(1, entry)[:, 0]
        self.a, self.c, self.o = self.a.clone(), self.c.clone(), self.o.clone()
        if place is not None and len(rows := (kind == DELIVERY).nonzero()[:, 0]):
            self.deliver(rows, place[rows], iteration)
        if internal.any():
            self.emit(internal.nonzero()[:, 0], iteration)
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
        """Let every sample flow for its ``dt``, at most one panel."""
        net, h = self.net, dt[:, None]
        gates = self.a[:, U], net.b[U], self.a[:, Z], net.b[Z]
        nodes, z0 = panel_nodes(*gates, h, net.settings), net.settings.z(self.a[:, Z], self.a[:, U])
        if self.running_loss is not None:
            c = node_states(self.c, z0, h, nodes, net.settings)
            t = start + net.settings.x[:, None] * dt
            value = self.running_loss(c.flatten(0, 1), t.to(c.dtype).flatten(), self.samples.repeat(len(c)))
            with torch.set_grad_enabled(value.requires_grad):
                self.integral = self.integral + dt * net.settings.integrate(value.view(len(c), -1))
        moved = (h > 0).expand_as(self.c)
        z1 = z_after(*gates, h, net.settings)
        self.c = torch.where(moved, end_state(self.c, z0, z1, h, nodes, net.settings), self.c)
        self.a = net.b + (self.a - net.b) * torch.exp(dt[:, None, None] / -net.gate_tau)
        self.o = self.o * torch.exp(h / -net.tau_o)
        self.counters.flow_evaluations += moved.sum(1)

    def emit(self, rows: Tensor, iteration: Iteration) -> None:
        """Emit one internal event in each of ``rows``: that of the first pending unit."""
        net = self.net
        n = self.pending[rows].to(torch.int8).argmax(1)
        self.counters.events[rows] += 1
        if bool((self.counters.events[rows] > self.limit).any()):
            sample = int(rows[self.counters.events[rows] > self.limit][0])
            raise limit_error(self.problem, sample, float(self.t[sample]))
        repeated = self.emitted[rows, n] == self.t[rows]
        if bool(repeated.any()):
            k = int(repeated.nonzero()[0])
            raise resolution_error(int(rows[k]), int(n[k]), float(self.t[rows[k]]))
        self.emitted[rows, n] = self.t[rows]
        forced, a_group = self.forced[rows], self.a_group[rows]
        i = torch.arange(len(rows), device=rows.device)
        rise = net.settings.z(a_group[i, Z, n], a_group[i, U, n]) - net.theta[n]
        rise = torch.where(forced, torch.inf, rise)
        self.counters.min_slope[rows] = torch.minimum(self.counters.min_slope[rows], rise)
        y, scale = net.jump(n, net.rho_z(n, a_group))
        if self.arrivals is None:
            self.a[rows] += net.Vt[n] * scale
        else:
            self.arrivals.send(rows, n, self.t[rows], self.counters.events[rows] - 1, a_group[i, R, n])
        if self.problem.options.adaptive:
            self.a[rows, U, n] += self.problem.beta[n]
        self.c[rows, n] = 0.0
        self.o[rows, n] += y
        self.above[rows, n] = False
        self.pending[rows, n] = False
        iteration.internal = Emissions(
            rows, n, self.t[rows].to(self.c.dtype), a_group, self.starts_group[rows], forced, positions=rows
        )
        self.starts_group[rows] = False
        self.forced[rows] &= self.pending[rows].any(1)

    def deliver(self, rows: Tensor, place: Tensor, iteration: Iteration) -> None:
        """Let one delayed event in each of ``rows`` reach the receivers of its line."""
        assert self.arrivals is not None
        net = self.net
        lines, events, a_r = self.arrivals.take(rows, place)
        gate = self.a[rows, R] if self.problem.options.reset_side == "post" else a_r[:, None]
        _, scale = net.jump(self.arrivals.line_units[lines], net.gate(gate))
        self.a[rows] += net.Vt[lines] * scale
        iteration.delivery = Deliveries(rows, lines, events, gate)


class LockstepEngine:
    """The batched engine. It computes in the dtype of the problem, float64 or float32."""

    name: EngineName = "lockstep"

    def unsupported(self, problem: Problem, running_loss: RunningLoss | None = None) -> str | None:
        if problem.options.checkpoint_every is not None:
            return "it does not support checkpoint_every"
        if problem.c0.dtype not in TIE:
            return f"it supports float64 and float32, got {problem.c0.dtype}"
        return None

    @torch.no_grad()
    def forward(self, problem: Problem, running_loss: RunningLoss | None = None) -> Events:
        batch = _Batch(problem, running_loss)
        batch.run()
        tape = batch.tape
        emissions = [i.internal for i in tape.iterations if i.internal is not None]
        none = batch.next_entry.new_zeros(0)
        order = torch.cat([none, *(e.rows for e in emissions)]).argsort(stable=True)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(len(order), device=order.device)
        for e, part in zip(emissions, positions.split([len(e.rows) for e in emissions]), strict=True):
            e.positions = part
        offsets = torch.zeros(len(batch.c) + 1, dtype=torch.int64, device=order.device)
        offsets[1:] = batch.counters.events.cumsum(0)
        return Events(
            times=torch.cat([batch.c.new_zeros(0), *(e.times for e in emissions)])[order],
            units=torch.cat([none, *(e.units for e in emissions)])[order],
            offsets=offsets,
            c_read=batch.c_read,
            o_read=batch.o_read,
            counters=batch.counters,
            tape=tape,
            a_last=batch.a,
            integral=None if running_loss is None else batch.integral,
        )

    def backward(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None = None
    ) -> Gradients:
        return backward(problem, events, cotangents, running_loss)
