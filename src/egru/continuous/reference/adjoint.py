r"""The exact gradient of the reference engine: the adjoint, backward through the recorded steps.

``p_c = dL/dc`` and ``p_a = dL/da`` of what lies later in time obey, between events and backward::

    dp_c/dt = u p_c / tau_m - l_c         dp_a/dt = p_a / tau_s - gamma p_c
    gamma_u = u(1-u)(z-c) / tau_m         gamma_z = u(1-z^2) / tau_m         gamma_r = 0

with ``l`` the density of an integral loss. At an event of unit ``n``, with ``Q`` the derivative of the loss by its time
alone, ``p_c[n]`` becomes ``-Q / (dc_n/dt)`` just before it.
"""

import math

import numpy as np
import torch
from torch import Tensor

from egru.continuous.problem import Cotangents, Events, Gradients, Problem, RunningLoss, only
from egru.continuous.reference.flow import R, U, Z, end_state, node_states, nodes, panels, relax, sigmoid, slope
from egru.continuous.reference.tape import Network, Step, array, derivative, evaluate


class _Sums:
    """The gradients, as they add up over samples."""

    def __init__(self, net: Network, batch: int, inputs: int) -> None:
        H = len(net.theta)
        self.V, self.U, self.b = np.zeros_like(net.V), np.zeros_like(net.U), np.zeros_like(net.b)
        self.theta = np.zeros(H)
        self.tau_s = self.tau_m = self.tau_o = 0.0
        self.a0, self.c0 = np.zeros((batch, 3, H)), np.zeros((batch, H))
        self.input_times, self.input_values = np.zeros(inputs), np.zeros(inputs)
        self.floored = np.zeros(batch, dtype=np.int64)


class _Adjoint:
    """One sample on its way back."""

    def __init__(self, net: Network, sums: _Sums, sample: int, loss: RunningLoss | None, weight: float) -> None:
        self.net, self.sums, self.sample, self.loss, self.weight = net, sums, sample, loss, weight
        H = len(net.theta)
        self.p_a, self.p_c, self.p_o = np.zeros((3, H)), np.zeros(H), np.zeros(H)
        self.fired = np.zeros(H, dtype=bool)
        """Members of the current group that have been passed, on the way back."""
        self.waiting = np.zeros(H)
        """What the reset gates of the group will add to ``p_a[R]`` before it."""

    def pull_back(self, start: Step | None, end: Step) -> None:
        """From just before ``end`` to just after ``start``; None is time 0."""
        net, clock = self.net, self.net.clock
        if start is None:
            t, a, c, o = 0.0, array(net.problem.a0[self.sample]), array(net.problem.c0[self.sample]), None
        else:
            t, a, c, o = start.time, start.a_plus, start.c_plus, start.o_plus
        dt = end.time - t
        if dt <= 0:
            return
        decay = math.exp(-dt / net.tau_o)
        if o is not None:
            self.sums.tau_o += float(self.p_o @ o) * decay * dt / net.tau_o**2
        self.p_o = self.p_o * decay
        count = panels(a, net.b, dt, clock)
        h = dt / count
        states = []
        for k in range(count):
            states.append((a, c, t + k * h))
            on, later = nodes(a, net.b, h, clock), relax(a, net.b, h, clock)
            c = end_state(c, np.tanh(a[Z]), np.tanh(later[Z]), h, on, clock.rule)
            a = later
        for a, c, t in reversed(states):
            self.panel(a, c, t, h)

    def panel(self, a: np.ndarray, c0: np.ndarray, t0: float, h: float) -> None:
        """One panel that starts at ``a, c0, t0``."""
        net, sums = self.net, self.sums
        tau_s, tau_m, (x, w, A), _ = net.clock
        on = nodes(a, net.b, h, net.clock)
        q, u, z, E = on.q, on.u, on.z, on.E
        c = node_states(c0, np.tanh(a[Z]), h, on, net.clock.rule)
        p_c = np.exp(E - on.E1) * self.p_c
        first = np.exp(-on.E1) * self.p_c
        if self.loss is not None:
            f = self.weight * np.exp(-E) * derivative(self.loss, c, t0 + x * h, self.sample)
            p_c += np.exp(E) * h * (w @ f - A @ f)
            first += h * (w @ f)
        gamma = np.stack([u * (1 - u) * (z - c) * p_c, np.zeros_like(u), u * (1 - z * z) * p_c]) / tau_m
        late, t = math.exp(-h / tau_s), x[:, None] * h
        sums.b += h * np.einsum("i,iH,xiH->xH", w, 1 - q, gamma) + (1 - late) * self.p_a
        sums.tau_m -= h * float(np.einsum("i,iH->", w, p_c * u * (z - c))) / tau_m**2
        moved = h * np.einsum("i,iH,xiH->xH", w, q * t, gamma) + late * h * self.p_a
        sums.tau_s += float(((a - net.b) * moved).sum()) / tau_s**2
        self.p_a = late * self.p_a + h * np.einsum("i,iH,xiH->xH", w, q, gamma)
        self.p_c = first

    def internal(self, step: Step, by_time: float, by_amplitude: float) -> None:
        """Across an event of unit ``n``, given the loss's own derivatives by its time and amplitude."""
        net, sums, n, options = self.net, self.sums, step.index, self.net.problem.options
        tau_s, tau_m = net.clock.tau_s, net.clock.tau_m
        assert step.a_group is not None
        y, V = net.amplitude(n), net.V[:, :, n]
        # Reset gates: of the emitter, the same for all receivers, or of each receiver.
        r = np.broadcast_to(net.rho(n, step.a_group), V[Z].shape)
        pull = net.b[R] - step.a_group[R]
        rdot = r * (1 - r) * (pull if options.reset_side == "post" else pull[n]) / tau_s
        received = V * self.p_a
        bend = self.p_c * (slope(step.a_minus, step.c_minus, net.clock) - slope(step.a_plus, step.c_plus, net.clock))
        bend[self.fired] = 0
        bend[n] = -self.p_c[n] * slope(step.a_plus, step.c_plus, net.clock)[n]
        Q = (
            bend.sum()
            + y * ((received[U] + received[R] + r * received[Z]).sum() / tau_s + (rdot * received[Z]).sum())
            + y / net.tau_o * self.p_o[n]
            + by_time
        )
        if self.loss is not None:
            density = evaluate(self.loss, np.stack([step.c_minus, step.c_plus]), np.full(2, step.time), self.sample)
            Q += self.weight * (density[0] - density[1])
        if step.forced:
            before = 0.0
        else:
            rise = float(np.tanh(step.a_group[Z, n]) - net.theta[n])
            sums.floored[self.sample] += rise < options.grazing_floor
            before = -Q / (float(sigmoid(step.a_group[U, n])) * max(rise, options.grazing_floor) / tau_m)
            sums.theta[n] -= before
        if options.amplitude == "theta":
            sums.theta[n] += (received[U] + received[R] + r * received[Z]).sum() + self.p_o[n] + by_amplitude
        scale = np.stack([np.ones_like(r), np.ones_like(r), r]) * y
        if not options.self_connections:
            scale[:, n] = 0
        sums.V[:, :, n] += scale * self.p_a
        through = y * r * (1 - r) * received[Z]
        if options.reset_side == "post":
            self.waiting += through
        else:
            self.waiting[n] += through.sum()
        self.p_c[n] = before
        self.fired[n] = True
        if step.first:
            self.p_a[R] += self.waiting
            self.waiting[:], self.fired[:] = 0, False

    def input(self, step: Step) -> None:
        net, sums, k = self.net, self.sums, step.index
        i, x = int(net.problem.input_channels[k]), float(net.problem.input_values[k])
        sums.U[:, :, i] += x * self.p_a
        through = float((net.U[:, :, i] * self.p_a).sum())
        sums.input_values[k] = through
        bend = slope(step.a_minus, step.c_minus, net.clock) - slope(step.a_plus, step.c_plus, net.clock)
        sums.input_times[k] = float(self.p_c @ bend) + x * through / net.clock.tau_s


def backward(problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None) -> Gradients:
    """Gradients of all samples, summed where parameters are shared."""
    net = Network.of(problem)
    sums = _Sums(net, len(problem.c0), len(problem.input_times))
    by_time, by_amplitude = array(cotangents.times), array(cotangents.amplitudes)
    by_c, by_o = array(cotangents.c_read), array(cotangents.o_read)
    for sample, steps in enumerate(events.tape):
        weight = 0.0 if cotangents.integral is None else float(cotangents.integral[sample])
        adjoint = _Adjoint(net, sums, sample, running_loss, weight)
        if cotangents.a_last is not None:
            adjoint.p_a = array(cotangents.a_last[sample]).copy()
        event = int(events.offsets[sample + 1])
        for k in reversed(range(len(steps))):
            step = steps[k]
            match step.kind:
                case "internal":
                    event -= 1
                    adjoint.internal(step, by_time[event], by_amplitude[event])
                case "input":
                    adjoint.input(step)
                case "readout":
                    adjoint.p_c = adjoint.p_c + by_c[sample, step.index]
                    adjoint.p_o = adjoint.p_o + by_o[sample, step.index]
            adjoint.pull_back(steps[k - 1] if k else None, step)
        sums.a0[sample], sums.c0[sample] = adjoint.p_a, adjoint.p_c

    def back(value: np.ndarray | float) -> Tensor:
        return torch.as_tensor(np.asarray(value, dtype=np.float64)).to(problem.c0)

    return Gradients(
        only(problem.mask, back(sums.V)), only(problem.input_mask, back(sums.U)), back(sums.b), back(sums.theta),
        back(sums.tau_s), back(sums.tau_m), back(sums.tau_o),
        back(sums.a0), back(sums.c0), back(sums.input_times), back(sums.input_values),
        torch.as_tensor(sums.floored).to(problem.c0.device),
    )  # fmt: skip
