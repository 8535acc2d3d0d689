"""The backward pass of the lockstep engine: the adjoint of :mod:`egru.continuous.reference.adjoint`, batched."""

import torch
from torch import Tensor

from egru.continuous.lockstep.flow import node_states, of_units, panel_nodes
from egru.continuous.lockstep.network import Network
from egru.continuous.lockstep.tape import Deliveries, Emissions, Iteration, Tape
from egru.continuous.problem import Cotangents, Events, Gradients, Problem, R, RunningLoss, U, Z


class _Adjoint:
    """The backward pass of a batch."""

    def __init__(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None
    ) -> None:
        self.problem, self.cotangents, self.loss = problem, cotangents, running_loss
        self.net = Network.from_problem(problem)
        net, like = self.net, problem.c0.detach()
        self.p_c, self.p_o = torch.zeros_like(like), torch.zeros_like(like)
        self.p_a = torch.zeros_like(problem.a0) if cotangents.a_last is None else cotangents.a_last.clone()
        if cotangents.integral is None:
            self.loss = None
        self.passed = torch.zeros_like(like, dtype=torch.bool)
        """Members of the current group of simultaneous events that have been processed."""
        self.pending_p_r = torch.zeros_like(like)
        """What the reset gates of the current group add to the adjoint of ``a_r`` before the group."""
        self.samples = torch.arange(len(like), device=like.device)
        self.offsets, self.delays = events.offsets, torch.zeros_like(problem.delays)
        self.beta, self.tau_a = torch.zeros_like(net.theta), torch.zeros_like(net.theta)
        self.delivered: Tensor | None = None
        """What the deliveries of each event have summed: by time, over the gates, for gate z. ``(B, events, 3)``."""
        if problem.line_offsets is not None:
            self.delivered = like.new_zeros(len(like), int(events.offsets.diff().max()), 3)
        self.Vt, self.Ut, self.b, self.theta = (torch.zeros_like(x) for x in (net.Vt, net.Ut, net.b, net.theta))
        self.tau_s, self.tau_m, self.tau_o = (torch.zeros_like(net.theta) for _ in range(3))
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
            if iteration.delivery is not None:
                self.delivery(iteration, iteration.delivery, *after)
            if iteration.internal is not None:
                self.internal(iteration, iteration.internal, *after)
            self.pull_back(iteration)
            after = iteration.a, iteration.c

    def activations_before(self, iteration: Iteration, rows: Tensor) -> Tensor:
        """Return ``a`` of ``rows`` at the end of the flow, just before the events of the iteration."""
        q = torch.exp(iteration.dt[rows, None, None] / -self.net.gate_tau)
        return self.net.b + (iteration.a[rows] - self.net.b) * q

    def slope(self, a: Tensor, c: Tensor) -> Tensor:
        settings = self.net.settings
        return settings.u(a[:, U]) * (settings.z(a[:, Z], a[:, U]) - c) / settings.tau_m

    def input(self, iteration: Iteration, rows: Tensor, k: Tensor, a: Tensor, c: Tensor) -> None:
        """Accumulate the gradients of input events ``k``; ``a`` and ``c`` are the state after them."""
        channel, x, p_a = self.problem.input_channels[k], self.problem.input_values[k], self.p_a[rows]
        self.Ut.index_add_(0, channel, x[:, None, None] * p_a)
        through = self.net.Ut[channel] * p_a
        self.input_values[k] = through.sum((1, 2))
        slope_jump = self.slope(self.activations_before(iteration, rows), c[rows]) - self.slope(a[rows], c[rows])
        self.input_times[k] = (self.p_c[rows] * slope_jump).sum(1) + x * (through / self.net.gate_tau).sum((1, 2))

    def internal(self, iteration: Iteration, emissions: Emissions, a: Tensor, c: Tensor) -> None:
        """Propagate across one event in each of some rows; ``a`` and ``c`` are the state after it."""
        net, options, tau_s = self.net, self.problem.options, self.net.settings.tau_s
        rows, n, a_group, forced = emissions.rows, emissions.units, emissions.a_group, emissions.forced
        positions = emissions.positions
        p_a, p_c, p_o, i = self.p_a[rows], self.p_c[rows], self.p_o[rows, n], torch.arange(len(rows), device=n.device)
        y, scale = net.jump(n, net.rho_z(n, a_group))
        r = scale[:, Z] / y[:, None]
        distance = (net.b[R] - a_group[:, R]) / tau_s
        rdot = r * (1 - r) * (distance if options.reset_side == "post" else distance[i, n][:, None])
        # With delays, the events reach their receivers later; see `delivery`.
        sent = p_a.new_zeros(len(rows), 3)
        if self.delivered is None:
            received = net.Vt[n] * p_a
        else:
            received = torch.zeros_like(p_a)
            sent = self.delivered[rows, positions - self.offsets[rows]]
        of_z = received[:, R] + r * received[:, Z]
        gated = received[:, U] + of_z

        c_plus = c[rows]
        c_minus = c_plus.clone()
        c_minus[i, n] = torch.where(forced, iteration.c[rows, n], net.theta[n])
        slope_plus = self.slope(a[rows], c_plus)
        slope_terms = p_c * (self.slope(self.activations_before(iteration, rows), c_minus) - slope_plus)
        slope_terms[self.passed[rows]] = 0.0
        slope_terms[i, n] = -p_c[i, n] * slope_plus[i, n]
        paced = received[:, U] / net.settings.tau_u + of_z / tau_s
        Q = slope_terms.sum(1) + y * (paced + rdot * received[:, Z]).sum(1)
        if options.adaptive:
            p_u = p_a[i, U, n]
            Q = Q + self.problem.beta[n] / of_units(net.settings.tau_u, n) * p_u
            self.beta.index_add_(0, n, p_u)
        Q = Q + y / of_units(net.tau_o, n) * p_o + self.cotangents.times[positions]
        Q = Q + sent[:, 0] + y * rdot[i, n] * sent[:, 2]
        if self.loss is not None and self.cotangents.integral is not None:
            with torch.no_grad():
                t = (iteration.t + iteration.dt)[rows].to(c.dtype)
                jump = self.loss(c_minus, t, rows) - self.loss(c_plus, t, rows)
            Q = Q + self.cotangents.integral[rows] * jump

        rise = net.settings.z(a_group[i, Z, n], a_group[i, U, n]) - net.theta[n]
        floored = (rise < options.grazing_floor) & ~forced
        self.floored[rows] += floored
        rate = (
            net.settings.u(a_group[i, U, n]) * rise.clamp(min=options.grazing_floor) / of_units(net.settings.tau_m, n)
        )
        p_c_minus = torch.where(forced, 0.0, -Q / rate)
        theta = -p_c_minus
        if options.amplitude == "theta":
            theta = theta + gated.sum(1) + sent[:, 1] + p_o + self.cotangents.amplitudes[positions]
        self.theta.index_add_(0, n, theta)
        if self.delivered is None:
            pushed = scale * p_a
            if not options.self_connections:
                pushed[i, :, n] = 0.0
            self.Vt.index_add_(0, n, pushed)
        self.pending_p_r[rows, n] += y * r[i, n] * (1 - r[i, n]) * sent[:, 2]
        through_gate = y[:, None] * r * (1 - r) * received[:, Z]
        if options.reset_side == "post":
            self.pending_p_r[rows] += through_gate
        else:
            self.pending_p_r[rows, n] += through_gate.sum(1)
        self.p_c[rows, n] = p_c_minus
        self.passed[rows, n] = True
        complete = rows[emissions.first]  # the first event of a group is the last one here
        self.p_a[complete, R] += self.pending_p_r[complete]
        self.pending_p_r[complete], self.passed[complete] = 0.0, False

    def delivery(self, iteration: Iteration, deliveries: Deliveries, a: Tensor, c: Tensor) -> None:
        """Propagate across arrivals of delayed events; ``a`` and ``c`` are the state after them."""
        assert self.delivered is not None
        net, tau_s, post = self.net, self.net.settings.tau_s, self.problem.options.reset_side == "post"
        rows, lines, gate = deliveries.rows, deliveries.lines, deliveries.gate
        p_a = self.p_a[rows]
        y, scale = net.jump(self.problem.line_units[lines], net.gate(gate))
        r = scale[:, Z] / y[:, None]
        received = net.Vt[lines] * p_a
        of_z = received[:, R] + r * received[:, Z]
        gated = received[:, U] + of_z
        paced = received[:, U] / net.settings.tau_u + of_z / tau_s
        slope_jump = self.slope(self.activations_before(iteration, rows), c[rows]) - self.slope(a[rows], c[rows])
        by_time = (self.p_c[rows] * slope_jump).sum(1) + y * paced.sum(1)
        z = received[:, Z].sum(1)
        if post:
            change = r * (1 - r) * received[:, Z]
            by_time = by_time + y * (change * (net.b[R] - gate) / tau_s).sum(1)
            self.p_a[rows, R] += y[:, None] * change
            z = torch.zeros_like(z)
        self.delays.index_add_(0, lines, by_time)
        self.delivered[rows, deliveries.events] += torch.stack([by_time, gated.sum(1), z], 1)
        self.Vt.index_add_(0, lines, scale * p_a)

    def pull_back(self, iteration: Iteration) -> None:
        """Propagate from the end of the flow of an iteration to its start."""
        net, settings = self.net, self.net.settings
        whole, a, c0 = iteration.dt[:, None], iteration.a, iteration.c
        decay = torch.exp(whole / -net.tau_o)
        self.tau_o += (self.p_o * iteration.o * decay * whole).sum(0) / net.tau_o**2
        self.p_o = self.p_o * decay
        dt = iteration.dt
        if bool(iteration.rests.any()):
            self.pull_back_rest(iteration)
            dt = torch.where(iteration.rests, 0.0, dt)
        h, tau_m = dt[:, None], settings.tau_m

        nodes = panel_nodes(a[:, U], net.b[U], a[:, Z], net.b[Z], h, settings)
        u, z, E = nodes.u, nodes.z, nodes.E
        c = node_states(c0, settings.z(a[:, Z], a[:, U]), h, nodes, settings)
        p_c = torch.exp(E - nodes.E1) * self.p_c
        p_c_start = torch.exp(-nodes.E1) * self.p_c
        if self.loss is not None:
            f = torch.exp(-E) * self.running_loss_gradient(c, iteration)
            whole = h * settings.integrate(f)
            p_c = p_c + torch.exp(E) * (whole - h * settings.integrate_to_nodes(f))
            p_c_start = p_c_start + whole
        drive = (z - c) * u * p_c / tau_m
        by_z = u * settings.dz(z) * p_c / tau_m
        by_u = (1 - u) * drive if settings.tau_a is None else -by_z
        gamma = torch.stack([by_u, by_z], 2) * h[:, None]  # gates u and z
        a_decay = torch.exp(dt[:, None, None] / -net.gate_tau)
        gates = [U, Z]
        q = nodes.q[:, :, None]
        if settings.tau_a is not None:
            q = torch.stack(torch.broadcast_tensors(nodes.q_u, nodes.q), 2)
        weighted = q * gamma
        inner = settings.integrate(weighted)
        times = settings.x.view(-1, 1, 1, 1) * h[None, :, None]
        tau_s_terms = a_decay * dt[:, None, None] * self.p_a
        tau_s_terms[:, gates] += settings.integrate(weighted * times)
        self.add_gate_tau((a - net.b) * tau_s_terms)
        self.tau_m -= (h * settings.integrate(drive)).sum(0) / tau_m
        self.b += ((1 - a_decay) * self.p_a).sum(0)
        self.b[gates] += (settings.integrate(gamma) - inner).sum(0)
        self.p_a = a_decay * self.p_a
        self.p_a[:, gates] += inner
        self.p_c = p_c_start

    def add_gate_tau(self, terms: Tensor) -> None:
        """Add to the gradients of the time constants of the activations, given ``(B, 3, H)`` times their squares."""
        rows = terms.sum(0) / self.net.gate_tau**2
        if self.net.settings.tau_a is not None:
            self.tau_a += rows[U]
            rows = rows[[R, Z]]
        self.tau_s += rows.sum(0)

    def pull_back_rest(self, iteration: Iteration) -> None:
        """Propagate over the flow of samples at rest. With a running loss, its nodes are point losses."""
        net, settings, a, c = self.net, self.net.settings, iteration.a, iteration.c
        h = torch.where(iteration.rests, iteration.dt, 0.0)[:, None]
        if self.loss is None:
            self.pull_back_constant(a, c, h)
            return
        nodes = panel_nodes(a[:, U], net.b[U], a[:, Z], net.b[Z], h, settings)
        states = node_states(c, settings.z(a[:, Z], a[:, U]), h, nodes, settings)
        gradient = self.running_loss_gradient(states, iteration)
        points = [0.0, *settings.x.tolist(), 1.0]
        for i in reversed(range(len(points) - 1)):  # from node i - 1 to node i, from the last to the first
            start = net.b + (a - net.b) * torch.exp(points[i] * h[:, None] / -net.gate_tau)
            self.pull_back_constant(start, states[i - 1] if i else c, (points[i + 1] - points[i]) * h)
            if i:
                self.p_c = self.p_c + settings.w[i - 1] * h * gradient[i - 1]

    def pull_back_constant(self, a: Tensor, c: Tensor, dt: Tensor) -> None:
        """Propagate over ``dt``, ``(B, 1)``, from the state ``a``, ``c``, with constant ``u`` and ``z``."""
        net, settings, tau_s, tau_m = self.net, self.net.settings, self.net.settings.tau_s, self.net.settings.tau_m
        u, z = settings.u(net.b[U]), settings.z(net.b[Z], net.b[U])
        k = u / tau_m
        kept, q = torch.exp(-k * dt), torch.exp(dt / -tau_s)
        held = (z - c) * kept * self.p_c  # (z - c) p_c is constant
        u_rate, z_rate = u * (1 - u) / tau_m * held, k * settings.dz(z) * self.p_c

        def late(tau: float | Tensor) -> Tensor:  # the integral of exp(-k (dt - t)) exp(-t / tau)
            near = (1 / tau - k) * dt
            return dt * torch.where(near > 0, kept * _mean_decay(near), torch.exp(dt / -tau) * _mean_decay(-near))

        z_sum, z_late = z_rate * dt * _mean_decay(k * dt), z_rate * late(tau_s)
        if settings.tau_a is None:
            u_sum, u_late = u_rate * dt, u_rate * (1 - q) * tau_s
        else:
            u_sum, u_late = -z_sum, -z_rate * late(settings.tau_a)
        q_a = torch.exp(dt[:, None] / -net.gate_tau)
        self.add_gate_tau((a - net.b) * q_a * dt[:, None] * self.p_a)
        self.tau_m -= (held * k * dt).sum(0) / tau_m
        self.b += ((1 - q_a) * self.p_a).sum(0)
        self.b[U] += (u_sum - u_late).sum(0)
        self.b[Z] += (z_sum - z_late).sum(0)
        self.p_a = q_a * self.p_a
        self.p_a[:, U] += u_late
        self.p_a[:, Z] += z_late
        self.p_c = kept * self.p_c

    def running_loss_gradient(self, c: Tensor, iteration: Iteration) -> Tensor:
        """Return the gradient of the running loss with respect to ``c`` at the nodes, times that of the integral."""
        assert self.loss is not None
        assert self.cotangents.integral is not None
        t = (iteration.t + self.net.settings.x[:, None] * iteration.dt).to(c.dtype)
        with torch.enable_grad():
            state = c.detach().flatten(0, 1).requires_grad_()
            value = self.loss(state, t.flatten(), self.samples.repeat(len(c)))
            total = value.sum() + 0 * state.sum()  # a running loss need not depend on c
            (gradient,) = torch.autograd.grad(total, state)
        return gradient.view_as(c) * self.cotangents.integral[:, None]


def _mean_decay(x: Tensor) -> Tensor:
    """Return the mean of ``exp(-s)`` for ``s`` from 0 to ``x``, which is not negative where it is used."""
    return torch.where(x > 0, -torch.expm1(-x.clamp(min=0)) / x, 1.0)


@torch.no_grad()
def backward(problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None) -> Gradients:
    """Return the gradients; those of parameters are summed over samples."""
    adjoint = _Adjoint(problem, events, cotangents, running_loss)
    adjoint.run(events.tape)
    grad_V, grad_U = problem.weight_gradients(*(x.permute(1, 2, 0).contiguous() for x in (adjoint.Vt, adjoint.Ut)))
    return Gradients(
        V=grad_V,
        U=grad_U,
        b=adjoint.b,
        theta=adjoint.theta,
        tau_s=problem.sum_shared("tau_s", adjoint.tau_s),
        tau_m=problem.sum_shared("tau_m", adjoint.tau_m),
        tau_o=problem.sum_shared("tau_o", adjoint.tau_o),
        a0=adjoint.p_a,
        c0=adjoint.p_c,
        input_times=adjoint.input_times,
        input_values=adjoint.input_values,
        delays=adjoint.delays,
        beta=adjoint.beta[: len(problem.beta)],
        tau_a=problem.sum_shared("tau_a", adjoint.tau_a),
        floored=adjoint.floored,
    )
