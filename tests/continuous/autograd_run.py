"""A whole run in differentiable torch, to check the adjoint against autograd.

It shares no code with the engines and integrates ``c`` in another form. Only the sequence of events is taken from an
engine. Each event time becomes a function of the parameters by one Newton step from its known value, which has the
derivative of the implicit function. Amplitudes are ``c_n`` just before the event.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egru.continuous.problem import DIFFERENTIABLE, Events, Problem, RunningLoss


def rule(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Gauss-Legendre rule on [0, 1]; the integration matrix is computed in the Chebyshev basis."""
    x, w = np.polynomial.legendre.leggauss(n)
    powers = np.arange(n)
    basis = np.polynomial.chebyshev.chebvander(x, n - 1)
    integrals = np.stack(
        [np.polynomial.chebyshev.chebval(x, np.polynomial.chebyshev.chebint(np.eye(n)[k], lbnd=-1)) for k in powers],
        axis=1,
    )
    A = integrals @ np.linalg.inv(basis) / 2
    return torch.tensor((x + 1) / 2), torch.tensor(w / 2), torch.tensor(A)


@dataclasses.dataclass
class _Run:
    p: Problem
    leaves: dict[str, Tensor]
    sample: int
    running_loss: RunningLoss | None

    def __post_init__(self) -> None:
        self.rule = rule(14)
        self.t = torch.zeros(())
        self.a, self.c = self.leaves["a0"][self.sample], self.leaves["c0"][self.sample]
        self.o = torch.zeros_like(self.c)
        self.integral = torch.zeros(())
        self.sent: list[tuple[Tensor, Tensor, Tensor]] = []
        self.linear, self.adaptive = self.p.options.cell in ("lif", "alif"), self.p.options.cell == "alif"
        tau_s, tau_a = self.leaves["tau_s"], self.leaves["tau_a"]
        self.gate_tau = tau_s.expand_as(self.c)[None]
        if self.adaptive:
            self.gate_tau = torch.stack([tau.expand_as(self.c) for tau in (tau_a, tau_s, tau_s)])

    def gates(self, a_u: Tensor, a_z: Tensor) -> tuple[Tensor, Tensor]:
        if self.linear:
            return torch.ones_like(a_u), a_z - a_u if self.adaptive else a_z
        return torch.sigmoid(a_u), torch.tanh(a_z)

    def flow(self, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``a, c, o`` at ``time`` and the integral of the running loss; c = e^-E (c0 + integral of e^E u z)."""
        x, w, A = self.rule
        L, dt = self.leaves, time - self.t
        tau_s, tau_m, b = self.gate_tau, L["tau_m"], L["b"]
        reach = (self.a - b).abs().max() / 2
        count = max(1, int(torch.ceil(dt * ((1 + reach) / tau_s + 1 / tau_m) / 0.7).max()))
        h, a, c, total = dt / count, self.a, self.c, torch.zeros(())
        for k in range(count):
            q = torch.exp(-x[:, None, None] * h / tau_s)
            nodes = b + (a - b) * q
            u, z = self.gates(nodes[:, 0], nodes[:, 2])
            E, E1 = h / tau_m * (A @ u), h / tau_m * (w @ u)
            drive = u * z * torch.exp(E) / tau_m
            if self.running_loss is not None:
                states = torch.exp(-E) * (c + h * (A @ drive))
                at = self.t + (k + x) * h
                total = total + h * (w @ self.running_loss(states, at, torch.full((len(x),), self.sample)))
            c = torch.exp(-E1) * (c + h * (w @ drive))
            a = b + (a - b) * torch.exp(-h / tau_s)
        return a, c, self.o * torch.exp(-dt / L["tau_o"]), total

    def advance(self, time: Tensor) -> None:
        a, c, o, total = self.flow(time)
        self.a, self.c, self.o, self.t, self.integral = a, c, o, time, self.integral + total

    def event_time(self, n: int, known: Tensor) -> Tensor:
        a, c, _, _ = self.flow(known)
        u, z = self.gates(a[0, n], a[2, n])
        tau_m = self.leaves["tau_m"]
        slope = u * (z - c[n]) / (tau_m[n] if tau_m.dim() else tau_m)
        return known - (c[n] - self.leaves["theta"][n]) / slope.detach()

    def emit(self, n: int, forced: bool) -> Tensor:
        options, L = self.p.options, self.leaves
        H = len(self.c)
        is_emitter = torch.eye(H)[n]
        y = torch.ones(()) if options.amplitude == "one" else L["theta"][n] if forced else self.c[n]
        r = (
            torch.ones(())
            if self.linear
            else torch.sigmoid(self.a[1] if options.reset_side == "post" else self.a[1, n])
        )
        one = torch.ones(H)
        if self.p.line_offsets is None:
            jump = L["V"][:, :, n] * torch.stack([one, one, r * one]) * y
            self.a = self.a + (jump if options.self_connections else jump * (1 - is_emitter))
        if self.adaptive:
            self.a = self.a + torch.eye(3)[0][:, None] * is_emitter * L["beta"]
        self.sent.append((self.t, y, r))
        self.c, self.o = self.c * (1 - is_emitter), self.o + is_emitter * y
        return y

    def deliver(self, event: int, line: int) -> None:
        """Let the given event of the sample arrive at the receivers of a line."""
        time, y, r = self.sent[event]
        self.advance(time + self.leaves["delays"][line])
        if self.p.options.reset_side == "post" and not self.linear:
            r = torch.sigmoid(self.a[1])
        one = torch.ones(len(self.c))
        self.a = self.a + self.leaves["V"][:, :, line] * torch.stack([one, one, r * one]) * y

    def apply_input(self, k: int) -> None:
        channel = int(self.p.input_channels[k])
        self.a = self.a + self.leaves["U"][:, :, channel] * self.leaves["input_values"][k]


def differentiable(
    problem: Problem, events: Events, running_loss: RunningLoss | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the outputs of the run as functions of the leaf tensors, and the leaves."""
    leaves = {name: getattr(problem, name).detach().clone().requires_grad_() for name in DIFFERENTIABLE}
    collected: dict[str, list[Any]] = {k: [] for k in ("times", "amplitudes", "c_read", "o_read", "a_last", "integral")}
    for sample in range(len(problem.c0)):
        run = _Run(problem, leaves, sample, running_loss)
        start, stop = problem.input_offsets[sample], problem.input_offsets[sample + 1]
        event_range = range(int(events.offsets[sample]), int(events.offsets[sample + 1]))
        schedule = [(float(events.times[k]), 0, k) for k in event_range]
        schedule += [(float(problem.input_times[k]), 2, k) for k in range(int(start), int(stop))]
        schedule += [(float(t), 3, k) for k, t in enumerate(problem.readout_times)]
        if problem.line_offsets is not None:
            for k in event_range:
                n = int(events.units[k])
                for line in range(*problem.line_offsets[n : n + 2].tolist()):
                    time = float(events.times[k] + problem.delays[line])
                    if time <= problem.horizon:
                        schedule.append((time, 1, (k - event_range.start) * len(problem.delays) + line))
        c_read, o_read = [], []
        for time, kind, k in sorted(schedule):
            if kind == 0:
                n = int(events.units[k])
                forced = time == 0
                s = torch.zeros(()) if forced else run.event_time(n, events.times[k])
                run.advance(s)
                collected["times"].append(s)
                collected["amplitudes"].append(run.emit(n, forced))
            elif kind == 1:
                run.deliver(*divmod(k, len(problem.delays)))
            elif kind == 2:
                run.advance(leaves["input_times"][k])
                run.apply_input(k)
            else:
                run.advance(torch.tensor(time))
                c_read.append(run.c)
                o_read.append(run.o)
        run.advance(torch.tensor(problem.horizon))
        collected["c_read"].append(torch.stack(c_read))
        collected["o_read"].append(torch.stack(o_read))
        collected["a_last"].append(run.a)
        collected["integral"].append(run.integral)
    outputs = {k: torch.stack(v) if v else torch.zeros(0) for k, v in collected.items()}
    return outputs, leaves
