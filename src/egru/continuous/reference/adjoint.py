r"""The backward pass of the reference engine: the exact gradient by the adjoint method.

``p_c = dL/dc`` and ``p_a = dL/da`` are the derivatives of the part of the loss that lies later in time. The paper's
multipliers (section 4.2) are ``lambda_c = -p_c / tau_m`` and ``lambda_a = -p_a / tau_s``. Between events, backward in
time::

    dp_c/dt = u p_c / tau_m - l_c         dp_a/dt = p_a / tau_s - gamma p_c         dp_o/dt = p_o / tau_o
    gamma_u = u(1-u)(z-c) / tau_m         gamma_z = u(1-z^2) / tau_m                gamma_r = 0

where ``l_c`` is the derivative of the running loss ``l``. At an event of unit ``n`` with amplitude ``y``, ``-`` means
just before and ``+`` just after, and ``S_x`` is the sum over ``m`` of ``V_x[m, n] p_a+[x, m]``. ``Q`` is the total
derivative of the loss with respect to the time of the event, and ``dL/ds`` the explicit one::

    Q = -p_c+[n] dc_n/dt+  +  sum over m != n of p_c+[m] (dc_m/dt-  -  dc_m/dt+)
        + y ((S_u + S_r + r S_z) / tau_s + dr/dt S_z)  +  y p_o+[n] / tau_o  +  l-  -  l+  +  dL/ds
    p_c-[n] = -Q / (dc_n/dt-)             p_a-[r, n] = p_a+[r, n] + y r (1 - r) S_z
    dL/dtheta_n += Q / (dc_n/dt-) + S_u + S_r + r S_z + p_o+[n] + dL/dy
    dL/dV_x[m, n] += rho_x y p_a+[x, m]

Adaptive units have ``tau_a`` in place of ``tau_s`` in the terms of gate u, and ``gamma_u = -1 / tau_m``. Their own jump
adds ``beta_n p_a+[u, n] / tau_a`` to ``Q``, and ``dL/dbeta_n += p_a+[u, n]``.
"""

import numpy as np
import torch
from torch import Tensor

from egru.continuous.problem import Cotangents, Events, Gradients, Problem, R, RunningLoss, U, Z
from egru.continuous.reference.flow import end_state, node_states, panel_nodes, panels, slope
from egru.continuous.reference.network import Network, to_array
from egru.continuous.reference.running_loss import evaluate, state_gradient
from egru.continuous.reference.tape import Step, Tape


class _GradientSums:
    """Gradients, summed over samples."""

    def __init__(self, net: Network, batch: int, inputs: int) -> None:
        H = len(net.theta)
        self.V, self.U, self.b = np.zeros_like(net.V), np.zeros_like(net.U), np.zeros_like(net.b)
        self.theta = np.zeros(H)
        self.tau_s, self.tau_m, self.tau_o = np.zeros(H), np.zeros(H), np.zeros(H)
        self.a0, self.c0 = np.zeros((batch, 3, H)), np.zeros((batch, H))
        self.input_times, self.input_values = np.zeros(inputs), np.zeros(inputs)
        self.delays, self.beta, self.tau_a = np.zeros_like(net.delays), np.zeros(H), np.zeros(H)
        self.floored = np.zeros(batch, dtype=np.int64)


class _Adjoint:
    """The backward pass of one sample."""

    def __init__(self, net: Network, sums: _GradientSums, sample: int, loss: RunningLoss | None, weight: float) -> None:
        self.net, self.sums, self.sample, self.loss, self.weight = net, sums, sample, loss, weight
        H = len(net.theta)
        self.p_a, self.p_c, self.p_o = np.zeros((3, H)), np.zeros(H), np.zeros(H)
        self.delivered: dict[int, np.ndarray] = {}
        """What the deliveries of each event have summed: by time, over the gates, and for gate z."""
        self.passed = np.zeros(H, dtype=bool)
        """Members of the current group of simultaneous events that have been processed."""
        self.pending_p_r = np.zeros(H)
        """What the reset gates of the current group add to ``p_a[R]`` before the group."""

    def pull_back(self, start: Step | None, end: Step) -> None:
        """Propagate from just before ``end`` to just after ``start``, or to time 0 if ``start`` is None."""
        net, settings = self.net, self.net.settings
        if start is None:
            t, o = 0.0, None
            a, c = to_array(net.problem.a0[self.sample]), to_array(net.problem.c0[self.sample])
        else:
            t, a, c, o = start.time, start.a_plus, start.c_plus, start.o_plus
        dt = end.time - t
        if dt <= 0:
            return
        decay = np.exp(-dt / net.tau_o)
        if o is not None:
            self.sums.tau_o += self.p_o * o * decay * dt / net.tau_o**2
        self.p_o = self.p_o * decay
        states = []
        for panel in panels(a, net.b, dt, settings):
            states.append((panel, c))
            nodes = panel_nodes(panel.start, net.b, panel.h, settings)
            z0, z1 = (settings.z(a[Z], a[U]) for a in (panel.start, panel.end))
            c = end_state(c, z0, z1, panel.h, nodes, settings.rule)
        for panel, c in reversed(states):
            self.pull_back_panel(panel.start, c, t + float(panel.elapsed), float(panel.h))

    def pull_back_panel(self, a: np.ndarray, c0: np.ndarray, t0: float, h: float) -> None:
        """Propagate over one panel of length ``h`` that starts at time ``t0`` with the state ``a``, ``c0``."""
        net, sums = self.net, self.sums
        settings = net.settings
        tau_m, (x, w, A) = settings.tau_m, settings.rule
        gate_tau = np.broadcast_to(settings.gate_tau, a.shape)
        q, u, z, _, E, E1 = nodes = panel_nodes(a, net.b, h, settings)
        c = node_states(c0, settings.z(a[Z], a[U]), h, nodes, settings.rule)
        p_c = np.exp(E - E1) * self.p_c
        p_c_start = np.exp(-E1) * self.p_c
        if self.loss is not None:
            f = self.weight * np.exp(-E) * state_gradient(self.loss, c, t0 + x * h, self.sample)
            p_c += np.exp(E) * h * (w @ f - A @ f)
            p_c_start += h * (w @ f)
        by_u = u * (1 - u) * (z - c) if settings.tau_a is None else -u
        gamma = np.stack([by_u * p_c, np.zeros_like(u), u * settings.dz(z) * p_c]) / tau_m
        decay, t = np.exp(-h / gate_tau), x[:, None] * h
        sums.b += h * np.einsum("i,xiH,xiH->xH", w, 1 - q, gamma) + (1 - decay) * self.p_a
        sums.tau_m -= h * np.einsum("i,iH->H", w, p_c * u * (z - c)) / tau_m**2
        weighted = h * np.einsum("i,xiH,xiH->xH", w, q * t, gamma) + decay * h * self.p_a
        by_tau = (a - net.b) * weighted / gate_tau**2
        if settings.tau_a is not None:
            sums.tau_a += by_tau[U]
            by_tau = by_tau[[R, Z]]
        sums.tau_s += by_tau.sum(0)
        self.p_a = decay * self.p_a + h * np.einsum("i,xiH,xiH->xH", w, q, gamma)
        self.p_c = p_c_start

    def internal(self, step: Step, by_time: float, by_amplitude: float) -> None:
        """Propagate across an event, given the explicit gradients with respect to its time and amplitude."""
        net, sums, n, options = self.net, self.sums, step.index, self.net.problem.options
        tau_s, tau_m = net.tau_s, net.tau_m
        assert step.a_group is not None
        y = net.amplitude(n)
        # With delays, the event reaches its receivers later; see `delivery`.
        V = net.V[:, :, n] if net.lines is None else np.zeros_like(net.V[:, :, 0])
        sent_by_time, sent, sent_z = self.delivered.pop(step.event, np.zeros(3))
        # One reset gate per receiver; with reset_side="pre" all are that of the emitter.
        r = np.broadcast_to(net.rho_z(n, step.a_group), V[Z].shape)
        distance = net.b[R] - step.a_group[R]
        distance = distance / tau_s
        rdot = r * (1 - r) * (distance if options.reset_side == "post" else distance[n])
        received = V * self.p_a
        slope_minus = slope(step.a_minus, step.c_minus, net.settings)
        slope_plus = slope(step.a_plus, step.c_plus, net.settings)
        slope_terms = self.p_c * (slope_minus - slope_plus)
        slope_terms[self.passed] = 0
        slope_terms[n] = -self.p_c[n] * slope_plus[n]
        Q = (
            slope_terms.sum()
            + y * (received[U] / net.tau_a + (received[R] + r * received[Z]) / tau_s + rdot * received[Z]).sum()
            + net.beta[n] / net.tau_a[n] * self.p_a[U, n]
            + y / net.tau_o[n] * self.p_o[n]
            + by_time
            + sent_by_time
            + y * rdot[n] * sent_z
        )
        if self.loss is not None:
            density = evaluate(self.loss, np.stack([step.c_minus, step.c_plus]), np.full(2, step.time), self.sample)
            Q += self.weight * float((density[0] - density[1]).detach())
        if step.forced:
            p_c_minus = 0.0
        else:
            rise = float(net.settings.z(step.a_group[Z, n], step.a_group[U, n]) - net.theta[n])
            sums.floored[self.sample] += rise < options.grazing_floor
            p_c_minus = -Q / (float(net.settings.u(step.a_group[U, n])) * max(rise, options.grazing_floor) / tau_m[n])
            sums.theta[n] -= p_c_minus
        sums.beta[n] += self.p_a[U, n]
        if options.amplitude == "theta":
            sums.theta[n] += (received[U] + received[R] + r * received[Z]).sum() + sent + self.p_o[n] + by_amplitude
        scale = np.stack([np.ones_like(r), np.ones_like(r), r]) * y
        if not options.self_connections:
            scale[:, n] = 0
        if net.lines is None:
            sums.V[:, :, n] += scale * self.p_a
        self.pending_p_r[n] += y * r[n] * (1 - r[n]) * sent_z
        through_gate = y * r * (1 - r) * received[Z]
        if options.reset_side == "post":
            self.pending_p_r += through_gate
        else:
            self.pending_p_r[n] += through_gate.sum()
        self.p_c[n] = p_c_minus
        self.passed[n] = True
        if step.first:
            self.p_a[R] += self.pending_p_r
            self.pending_p_r[:], self.passed[:] = 0, False

    def delivery(self, step: Step) -> None:
        """Propagate across the arrival of an event, and keep its share of the derivatives of the emission."""
        net, sums, line, tau_s = self.net, self.sums, step.index, self.net.tau_s
        assert net.line_units is not None
        assert step.a_group is not None
        n, post = int(net.line_units[line]), net.problem.options.reset_side == "post"
        y, V = net.amplitude(n), net.V[:, :, line]
        r = np.broadcast_to(net.rho_z(n, step.a_group), V[Z].shape)
        rdot = r * (1 - r) * (net.b[R] - step.a_group[R]) / tau_s * post
        received = V * self.p_a
        gated = received[U] + received[R] + r * received[Z]
        slope_jump = slope(step.a_minus, step.c_minus, net.settings) - slope(step.a_plus, step.c_plus, net.settings)
        paced = received[U] / net.tau_a + (received[R] + r * received[Z]) / tau_s
        by_time = self.p_c @ slope_jump + y * (paced + rdot * received[Z]).sum()
        sums.delays[line] += by_time
        share = np.array([by_time, gated.sum(), 0.0 if post else received[Z].sum()])
        self.delivered[step.event] = self.delivered.get(step.event, np.zeros(3)) + share
        sums.V[:, :, line] += np.stack([np.ones_like(r), np.ones_like(r), r]) * y * self.p_a
        if post:
            self.p_a[R] += y * r * (1 - r) * received[Z]

    def input(self, step: Step) -> None:
        """Accumulate the gradients of an input event. The adjoint does not jump there."""
        net, sums, k = self.net, self.sums, step.index
        i, x = int(net.problem.input_channels[k]), float(net.problem.input_values[k])
        sums.U[:, :, i] += x * self.p_a
        through = net.U[:, :, i] * self.p_a
        sums.input_values[k] = through.sum()
        slope_jump = slope(step.a_minus, step.c_minus, net.settings) - slope(step.a_plus, step.c_plus, net.settings)
        sums.input_times[k] = self.p_c @ slope_jump + x * (through / net.settings.gate_tau).sum()


def backward(problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None) -> Gradients:
    """Return the gradients; those of parameters are summed over samples."""
    net = Network.from_problem(problem)
    sums = _GradientSums(net, len(problem.c0), len(problem.input_times))
    by_time, by_amplitude = to_array(cotangents.times), to_array(cotangents.amplitudes)
    by_c, by_o = to_array(cotangents.c_read), to_array(cotangents.o_read)
    tape: Tape = events.tape
    for sample, steps in enumerate(tape):
        weight = 0.0 if cotangents.integral is None else float(cotangents.integral[sample])
        adjoint = _Adjoint(net, sums, sample, running_loss, weight)
        if cotangents.a_last is not None:
            adjoint.p_a = to_array(cotangents.a_last[sample]).copy()
        event = int(events.offsets[sample + 1])
        for k in reversed(range(len(steps))):
            step = steps[k]
            match step.kind:
                case "internal":
                    event -= 1
                    adjoint.internal(step, by_time[event], by_amplitude[event])
                case "delivery":
                    adjoint.delivery(step)
                case "input":
                    adjoint.input(step)
                case "readout":
                    adjoint.p_c = adjoint.p_c + by_c[sample, step.index]
                    adjoint.p_o = adjoint.p_o + by_o[sample, step.index]
            adjoint.pull_back(steps[k - 1] if k else None, step)
        sums.a0[sample], sums.c0[sample] = adjoint.p_a, adjoint.p_c

    def to_tensor(value: np.ndarray | float) -> Tensor:
        return torch.as_tensor(np.asarray(value, dtype=np.float64)).to(problem.c0)

    grad_V, grad_U = problem.weight_gradients(to_tensor(sums.V), to_tensor(sums.U))
    return Gradients(
        V=grad_V,
        U=grad_U,
        b=to_tensor(sums.b),
        theta=to_tensor(sums.theta),
        tau_s=problem.sum_shared("tau_s", to_tensor(sums.tau_s)),
        tau_m=problem.sum_shared("tau_m", to_tensor(sums.tau_m)),
        tau_o=problem.sum_shared("tau_o", to_tensor(sums.tau_o)),
        a0=to_tensor(sums.a0),
        c0=to_tensor(sums.c0),
        input_times=to_tensor(sums.input_times),
        input_values=to_tensor(sums.input_values),
        delays=to_tensor(sums.delays),
        beta=to_tensor(sums.beta[: len(problem.beta)]),
        tau_a=problem.sum_shared("tau_a", to_tensor(sums.tau_a)),
        floored=torch.as_tensor(sums.floored).to(problem.c0.device),
    )
