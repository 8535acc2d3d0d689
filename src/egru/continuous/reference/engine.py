"""The continuous-time model in numpy: float64, one sample at a time, written to be read.

All units are brought to the time of every event; nothing is lazy. The backward pass is in
:mod:`egru.continuous.reference.adjoint`.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from egru.continuous.reference.adjoint import backward
from egru.continuous.reference.flow import R, U, Z, crossing, end_state, node_states, nodes, panels, relax
from egru.continuous.reference.tape import Network, Step, array, evaluate


class _Sample:
    """One sample on its way through time."""

    def __init__(self, net: Network, sample: int, running_loss: RunningLoss | None) -> None:
        self.net, self.sample, self.running_loss = net, sample, running_loss
        problem = net.problem
        self.t, self.a, self.c = 0.0, array(problem.a0[sample]).copy(), array(problem.c0[sample]).copy()
        self.o = np.zeros_like(self.c)
        self.steps: list[Step] = []
        self.integral, self.solves, self.evaluations, self.min_slope = 0.0, 0, 0, math.inf
        self.emitted, self.limit = 0, event_limit(problem)
        self.above = self.c >= net.theta

    def run(self) -> None:
        problem = self.net.problem
        if self.above.any():  # the caller has refused these unless they may fire
            self.fire(np.flatnonzero(self.above & (np.tanh(self.a[Z]) > self.net.theta)), forced=True)
        start, stop = (int(k) for k in problem.input_offsets[self.sample : self.sample + 2])
        inputs = list(zip(range(start, stop), problem.input_times[start:stop].tolist(), strict=True))
        readouts = list(enumerate(problem.readout_times.tolist()))
        fixed = [(t, 0, k) for k, t in inputs] + [(t, 1, k) for k, t in readouts] + [(problem.horizon, 2, 0)]
        for time, kind, index in sorted(fixed):
            self.emit_until(time)
            match kind:
                case 0:
                    self.input(index)
                case 1:
                    self.record("readout", index)
                case _:
                    self.record("end", 0)

    def emit_until(self, time: float) -> None:
        """All internal events up to ``time``, then on to ``time``."""
        net = self.net
        tie = TIE[torch.float64] * net.clock.tau_m
        while self.t < time:
            search = crossing(self.a, net.b, self.c, net.theta, time - self.t + tie, net.clock)
            self.solves, self.evaluations = self.solves + search.solves, self.evaluations + search.evaluations
            first = search.times.min(initial=math.inf)
            if math.isinf(first):
                break
            self.advance(min(self.t + first, time))
            self.fire(np.flatnonzero(search.times <= first + tie))
        self.advance(time)

    def advance(self, time: float) -> None:
        """Everything flows to ``time``."""
        net, dt = self.net, time - self.t
        if dt <= 0:
            return
        clock = net.clock
        count = panels(self.a, net.b, dt, clock)
        h = dt / count
        for _ in range(count):
            on, end = nodes(self.a, net.b, h, clock), relax(self.a, net.b, h, clock)
            z0, z1 = np.tanh(self.a[Z]), np.tanh(end[Z])
            if self.running_loss is not None:
                density = evaluate(
                    self.running_loss,
                    node_states(self.c, z0, h, on, clock.rule),
                    self.t + clock.rule.x * h,
                    self.sample,
                )
                self.integral += h * float(clock.rule.w @ density)
            self.c = end_state(self.c, z0, z1, h, on, clock.rule)
            self.a, self.t = end, self.t + h
        self.evaluations += len(self.c)
        self.o = self.o * math.exp(-dt / net.tau_o)
        self.t = time
        self.above &= self.c >= net.theta
        # No crossing was found up to here: what stands at its threshold got there by rounding, and crosses next.
        self.c = np.where(self.above, self.c, np.minimum(self.c, np.nextafter(net.theta, 0)))

    def fire(self, group: np.ndarray, forced: bool = False) -> None:
        """The events of one instant."""
        net, a_group = self.net, self.a.copy()
        for n in group.tolist():
            self.emitted += 1
            if self.emitted > self.limit:
                raise limit_error(net.problem, self.sample, self.t)
            if not forced:
                self.c[n] = net.theta[n]
                self.min_slope = min(self.min_slope, float(np.tanh(a_group[Z, n]) - net.theta[n]))
            before = self.state()
            y = net.amplitude(n)
            self.a[U] += net.V[U, :, n] * y
            self.a[R] += net.V[R, :, n] * y
            self.a[Z] += net.V[Z, :, n] * (net.rho(n, a_group) * y)
            self.c[n], self.o[n], self.above[n] = 0.0, self.o[n] + y, False
            first = n == group[0]
            self.steps.append(Step("internal", n, self.t, *before, *self.state(), a_group, first, forced))

    def input(self, k: int) -> None:
        problem, before = self.net.problem, self.state()
        self.a = self.a + self.net.U[:, :, int(problem.input_channels[k])] * float(problem.input_values[k])
        self.steps.append(Step("input", k, self.t, *before, *self.state()))

    def record(self, kind: str, index: int) -> None:
        self.steps.append(Step(kind, index, self.t, *self.state(), *self.state()))

    def state(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.a.copy(), self.c.copy(), self.o.copy()


class ReferenceEngine:
    """The readable engine; computes in float64 whatever the type of the problem."""

    name = "reference"

    def unsupported(self, problem: Problem, running_loss: RunningLoss | None = None) -> str | None:
        return None

    def forward(self, problem: Problem, running_loss: RunningLoss | None = None) -> Events:
        net = Network.of(problem)
        samples = [_Sample(net, s, running_loss) for s in range(len(problem.c0))]
        for sample in samples:
            sample.run()
        emitted = [[step for step in sample.steps if step.kind == "internal"] for sample in samples]
        events = [step for steps in emitted for step in steps]
        reads = [[step for step in sample.steps if step.kind == "readout"] for sample in samples]
        shape = (len(samples), len(problem.readout_times), len(net.theta))

        def back(values: Any) -> Tensor:
            return torch.as_tensor(np.array(values, dtype=np.float64)).to(problem.c0)

        def whole(values: Any) -> Tensor:
            return torch.as_tensor(np.array(values, dtype=np.int64)).to(problem.c0.device)

        return Events(
            times=back([step.time for step in events]),
            units=whole([step.index for step in events]),
            offsets=whole(np.cumsum([0] + [len(steps) for steps in emitted])),
            c_read=back([[step.c_plus for step in steps] for steps in reads]).reshape(shape),
            o_read=back([[step.o_plus for step in steps] for steps in reads]).reshape(shape),
            counters=Counters(
                events=whole([sample.emitted for sample in samples]),
                root_solves=whole([sample.solves for sample in samples]),
                flow_evaluations=whole([sample.evaluations for sample in samples]),
                min_slope=back([sample.min_slope for sample in samples]),
            ),
            tape=[sample.steps for sample in samples],
            a_last=back([sample.a for sample in samples]),
            integral=None if running_loss is None else back([sample.integral for sample in samples]),
        )

    def backward(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None = None
    ) -> Gradients:
        return backward(problem, events, cotangents, running_loss)
