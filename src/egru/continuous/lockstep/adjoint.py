"""The exact gradient of the lock-step engine: the adjoint of :mod:`egru.continuous.reference.adjoint`, batched."""

import torch
from torch import Tensor

from egru.continuous.lockstep.flow import node_states, nodes
from egru.continuous.lockstep.tape import Fired, Iteration, Network, Tape
from egru.continuous.problem import Cotangents, Events, Gradients, Problem, RunningLoss, only


class _Adjoint:
    """All samples on their way back."""

    def __init__(self, problem: Problem, cotangents: Cotangents, running_loss: RunningLoss | None) -> None:
        self.problem, self.cotangents, self.loss, self.net = problem, cotangents, running_loss, Network.of(problem)
        net, like = self.net, problem.c0.detach()
        self.p_c, self.p_o = torch.zeros_like(like), torch.zeros_like(like)
        self.p_a = torch.zeros_like(problem.a0) if cotangents.a_last is None else cotangents.a_last.clone()
        if cotangents.integral is None:
            self.loss = None
        self.fired = torch.zeros_like(like, dtype=torch.bool)
        """Members of the current group that have been passed, on the way back."""
        self.waiting = torch.zeros_like(like)
        """What the reset gates of the group will add to the adjoint of ``a_r`` before it."""
        self.samples = torch.arange(len(like), device=like.device)
        self.Vt, self.Ut, self.b, self.theta = (torch.zeros_like(x) for x in (net.Vt, net.Ut, net.b, net.theta))
        self.tau_s, self.tau_m, self.tau_o = like.new_zeros(()), like.new_zeros(()), like.new_zeros(())
        self.input_times, self.input_values = (torch.zeros_like(problem.input_times) for _ in range(2))
        self.floored = torch.zeros(len(like), dtype=torch.int64, device=like.device)

    def run(self, tape: Tape) -> None:
        after = tape.a, tape.c
        for iteration in reversed(tape.iterations):
            if iteration.readout is not None:
                rows, index = iteration.readout
                self.p_c[rows] += self.cotangents.c_read[rows, index]
                self.p_o[rows] += self.cotangents.o_read[rows, index]
            if iteration.input is not None:
                self.input(iteration, *iteration.input, *after)
            if iteration.internal is not None:
                self.internal(iteration, iteration.internal, *after)
            self.pull_back(iteration)
            after = iteration.a, iteration.c

    def before(self, iteration: Iteration, rows: Tensor) -> Tensor:
        """``a`` of ``rows`` just before what happens."""
        q = torch.exp(iteration.dt[rows] / -self.net.clock.tau_s)[:, None, None]
        return self.net.b + (iteration.a[rows] - self.net.b) * q

    def slope(self, a: Tensor, c: Tensor) -> Tensor:
        return torch.sigmoid(a[:, 0]) * (torch.tanh(a[:, 2]) - c) / self.net.clock.tau_m

    def input(self, iteration: Iteration, rows: Tensor, k: Tensor, a: Tensor, c: Tensor) -> None:
        channel, x, p_a = self.problem.input_channels[k], self.problem.input_values[k], self.p_a[rows]
        self.Ut.index_add_(0, channel, x[:, None, None] * p_a)
        through = (self.net.Ut[channel] * p_a).sum((1, 2))
        self.input_values[k] = through
        change = self.slope(self.before(iteration, rows), c[rows]) - self.slope(a[rows], c[rows])
        self.input_times[k] = (self.p_c[rows] * change).sum(1) + x * through / self.net.clock.tau_s

    def internal(self, iteration: Iteration, fired: Fired, a: Tensor, c: Tensor) -> None:
        """Across one event in each of some rows; ``a, c`` is the state after it."""
        net, options, tau_s = self.net, self.problem.options, self.net.clock.tau_s
        rows, n, a_group, forced, place = fired.rows, fired.units, fired.a_group, fired.forced, fired.place
        p_a, p_c, p_o, i = self.p_a[rows], self.p_c[rows], self.p_o[rows, n], torch.arange(len(rows), device=n.device)
        y, scale = net.jump(n, a_group)
        r = scale[:, 2] / y[:, None]
        pull = net.b[1] - a_group[:, 1]
        rdot = r * (1 - r) * (pull if options.reset_side == "post" else pull[i, n][:, None]) / tau_s
        received = net.Vt[n] * p_a
        gated = received[:, 0] + received[:, 1] + r * received[:, 2]

        c_plus = c[rows]
        c_minus = c_plus.clone()
        c_minus[i, n] = torch.where(forced, iteration.c[rows, n], net.theta[n])
        rise_plus = self.slope(a[rows], c_plus)
        bend = p_c * (self.slope(self.before(iteration, rows), c_minus) - rise_plus)
        bend[self.fired[rows]] = 0.0
        bend[i, n] = -p_c[i, n] * rise_plus[i, n]
        Q = bend.sum(1) + y * (gated.sum(1) / tau_s + (rdot * received[:, 2]).sum(1))
        Q = Q + y / net.tau_o * p_o + self.cotangents.times[place]
        if self.loss is not None and self.cotangents.integral is not None:
            with torch.no_grad():
                t = (iteration.t + iteration.dt)[rows].to(c.dtype)
                jump = self.loss(c_minus, t, rows) - self.loss(c_plus, t, rows)
            Q = Q + self.cotangents.integral[rows] * jump

        rise = torch.tanh(a_group[i, 2, n]) - net.theta[n]
        floored = (rise < options.grazing_floor) & ~forced
        self.floored[rows] += floored
        rate = torch.sigmoid(a_group[i, 0, n]) * rise.clamp(min=options.grazing_floor) / net.clock.tau_m
        before = torch.where(forced, 0.0, -Q / rate)
        theta = -before
        if options.amplitude == "theta":
            theta = theta + gated.sum(1) + p_o + self.cotangents.amplitudes[place]
        self.theta.index_add_(0, n, theta)
        sent = scale * p_a
        if not options.self_connections:
            sent[i, :, n] = 0.0
        self.Vt.index_add_(0, n, sent)
        through = y[:, None] * r * (1 - r) * received[:, 2]
        if options.reset_side == "post":
            self.waiting[rows] += through
        else:
            self.waiting[rows, n] += through.sum(1)
        self.p_c[rows, n] = before
        self.fired[rows, n] = True
        left = rows[fired.first]
        self.p_a[left, 1] += self.waiting[left]
        self.waiting[left], self.fired[left] = 0.0, False

    def pull_back(self, iteration: Iteration) -> None:
        """From the end of the flow to its start."""
        net, clock = self.net, self.net.clock
        dt, a, c0 = iteration.dt, iteration.a, iteration.c
        h, tau_s, tau_m = dt[:, None], clock.tau_s, clock.tau_m
        decay = torch.exp(h / -net.tau_o)
        self.tau_o += (self.p_o * iteration.o * decay * h).sum() / net.tau_o**2
        self.p_o = self.p_o * decay

        on = nodes(a[:, 0], net.b[0], a[:, 2], net.b[2], h, clock)
        q, u, z, E = on.q, on.u, on.z, on.E
        c = node_states(c0, a[:, 2], h, on, clock)
        p_c = torch.exp(E - on.E1) * self.p_c
        first = torch.exp(-on.E1) * self.p_c
        if self.loss is not None:
            f = torch.exp(-E) * self.density_slope(c, iteration)
            whole = h * clock.integrate(f)
            p_c = p_c + torch.exp(E) * (whole - h * clock.integrate_to_nodes(f))
            first = first + whole
        drive = (z - c) * u * p_c / tau_m
        gamma = torch.stack([(1 - u) * drive, u * (1 - z * z) * p_c / tau_m], 2) * h[:, None]  # gates u and z
        late = torch.exp(dt / -tau_s)[:, None, None]
        q, gates = q[:, :, None], [0, 2]
        weighted = q * gamma
        inner = clock.integrate(weighted)
        times = clock.x.view(-1, 1, 1, 1) * h[None, :, None]
        moved = late * dt[:, None, None] * self.p_a
        moved[:, gates] += clock.integrate(weighted * times)
        self.tau_s += ((a - net.b) * moved).sum() / tau_s**2
        self.tau_m -= (h * clock.integrate(drive)).sum() / tau_m
        self.b += ((1 - late) * self.p_a).sum(0)
        self.b[gates] += (clock.integrate(gamma) - inner).sum(0)
        self.p_a = late * self.p_a
        self.p_a[:, gates] += inner
        self.p_c = first

    def density_slope(self, c: Tensor, iteration: Iteration) -> Tensor:
        """The running loss's derivative at the nodes, times what the loss asks of the integral."""
        assert self.loss is not None
        assert self.cotangents.integral is not None
        t = (iteration.t + self.net.clock.x[:, None] * iteration.dt).to(c.dtype)
        with torch.enable_grad():
            state = c.detach().flatten(0, 1).requires_grad_()
            value = self.loss(state, t.flatten(), self.samples.repeat(len(c)))
            (gradient,) = torch.autograd.grad(value.sum(), state)
        return gradient.view_as(c) * self.cotangents.integral[:, None]


@torch.no_grad()
def backward(problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None) -> Gradients:
    """Gradients of all samples, summed where parameters are shared."""
    adjoint = _Adjoint(problem, cotangents, running_loss)
    adjoint.run(events.tape)
    return Gradients(
        only(problem.mask, adjoint.Vt.permute(1, 2, 0).contiguous()),
        only(problem.input_mask, adjoint.Ut.permute(1, 2, 0).contiguous()),
        adjoint.b,
        adjoint.theta,
        adjoint.tau_s,
        adjoint.tau_m,
        adjoint.tau_o,
        adjoint.p_a,
        adjoint.p_c,
        adjoint.input_times,
        adjoint.input_values,
        adjoint.floored,
    )
