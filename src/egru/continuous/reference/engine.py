"""The forward pass of the reference engine.

At every event all units are advanced to the time of the event; nothing is lazy. The backward pass is in
:mod:`egru.continuous.reference.adjoint`.
"""

import heapq
import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from egru.continuous.limits import event_limit, limit_error, resolution_error
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
from egru.continuous.reference.adjoint import backward
from egru.continuous.reference.crossing import find_crossings
from egru.continuous.reference.flow import end_state, node_states, panel_nodes, panels
from egru.continuous.reference.network import Network, to_array
from egru.continuous.reference.running_loss import evaluate
from egru.continuous.reference.tape import Step


class _Simulation:
    """The forward pass of one sample."""

    def __init__(self, net: Network, sample: int, running_loss: RunningLoss | None) -> None:
        self.net, self.sample, self.running_loss = net, sample, running_loss
        problem = net.problem
        self.t, self.a, self.c = 0.0, to_array(problem.a0[sample]).copy(), to_array(problem.c0[sample]).copy()
        self.o = np.zeros_like(self.c)
        self.steps: list[Step] = []
        self.solves, self.evaluations, self.min_slope = 0, 0, math.inf
        self.integral = torch.zeros((), dtype=torch.float64)
        self.event_count, self.limit = 0, event_limit(problem)
        self.above = self.c >= net.theta
        self.schedule: list[tuple[float, int, int, Any]] = []
        self.horizon = float(problem.horizons[sample])
        self.emitted = np.full_like(self.c, -1.0)
        """The time of the last event of each unit."""

    def run(self) -> None:
        problem = self.net.problem
        if self.above.any():  # only with above_threshold="fire": other problems have been rejected
            rises = self.net.settings.z(self.a[Z], self.a[U]) > self.net.theta
            self.emit(np.flatnonzero(self.above & rises), forced=True)
        start, stop = (int(k) for k in problem.input_offsets[self.sample : self.sample + 2])
        inputs = list(zip(range(start, stop), problem.input_times[start:stop].tolist(), strict=True))
        readouts = list(enumerate(problem.readouts[self.sample].tolist()))
        # The second entry orders what happens at the same time. Deliveries, of kind 0, are added by `emit`.
        self.schedule += [(t, 1, k, None) for k, t in inputs] + [(t, 2, k, None) for k, t in readouts]
        self.schedule.append((self.horizon, 3, 0, None))
        heapq.heapify(self.schedule)
        while True:
            if self.emit_before(self.schedule[0][0]):
                continue  # the events may have been scheduled to arrive first
            _, kind, index, a_group = heapq.heappop(self.schedule)
            match kind:
                case 0:
                    self.deliver(index, a_group)
                case 1:
                    self.apply_input(index)
                case 2:
                    self.record("readout", index)
                case _:
                    self.record("end", 0)
                    return

    def emit_before(self, time: float) -> bool:
        """Process the next group of internal events up to ``time``. If there is none, advance to ``time``."""
        net = self.net
        tie = TIE[torch.float64] * np.min(net.settings.tau_m)
        if self.t >= time:
            return False
        search = find_crossings(self.a, net.b, self.c, net.theta, time - self.t + tie, net.settings)
        self.solves, self.evaluations = self.solves + search.solves, self.evaluations + search.evaluations
        first = search.times.min(initial=math.inf)
        if math.isinf(first):
            self.advance(time)
            return False
        self.advance(min(self.t + first, time))
        self.emit(np.flatnonzero(search.times <= first + tie))
        return True

    def advance(self, time: float) -> None:
        """Let all units flow to ``time``."""
        net, dt = self.net, time - self.t
        if dt <= 0:
            return
        settings = net.settings
        for start, end, elapsed, h in panels(self.a, net.b, dt, settings):
            nodes = panel_nodes(start, net.b, h, settings)
            z0, z1 = settings.z(start[Z], start[U]), settings.z(end[Z], end[U])
            if self.running_loss is not None:
                states = node_states(self.c, z0, h, nodes, settings.rule)
                density = evaluate(self.running_loss, states, self.t + elapsed + settings.rule.x * h, self.sample)
                with torch.set_grad_enabled(density.requires_grad):
                    self.integral = self.integral + torch.as_tensor(h * settings.rule.w) @ density
            self.c, self.a = end_state(self.c, z0, z1, h, nodes, settings.rule), end
        self.evaluations += len(self.c)
        self.o = self.o * np.exp(-dt / net.tau_o)
        self.t = time
        self.above &= self.c >= net.theta
        # No crossing was found up to here. A state at its threshold got there by rounding and crosses later.
        self.c = np.where(self.above, self.c, np.minimum(self.c, np.nextafter(net.theta, 0)))

    def emit(self, group: np.ndarray, forced: bool = False) -> None:
        """Emit simultaneous events of the units in ``group``."""
        net, a_group = self.net, self.a.copy()
        for n in group.tolist():
            self.event_count += 1
            if self.event_count > self.limit:
                raise limit_error(net.problem, self.sample, self.t)
            if self.emitted[n] == self.t:
                raise resolution_error(self.sample, n, self.t)
            self.emitted[n] = self.t
            if not forced:
                self.c[n] = net.theta[n]
                rise = float(net.settings.z(a_group[Z, n], a_group[U, n]) - net.theta[n])
                self.min_slope = min(self.min_slope, rise)
            before = self.state()
            y = net.amplitude(n)
            self.c[n], self.o[n], self.above[n] = 0.0, self.o[n] + y, False
            self.a[U, n] += net.beta[n]
            first, event = n == group[0], self.event_count - 1
            if net.lines is not None:
                for line in range(*net.lines[n : n + 2].tolist()):
                    if (time := self.t + net.delays[line]) <= self.horizon:
                        heapq.heappush(self.schedule, (time, 0, event * len(net.delays) + line, a_group))
                self.steps.append(Step("internal", n, self.t, *before, *self.state(), a_group, first, forced, event))
                continue
            self.a[U] += net.V[U, :, n] * y
            self.a[R] += net.V[R, :, n] * y
            self.a[Z] += net.V[Z, :, n] * (net.rho_z(n, a_group) * y)
            self.steps.append(Step("internal", n, self.t, *before, *self.state(), a_group, first, forced, event))

    def deliver(self, index: int, a_group: np.ndarray) -> None:
        """Let an event reach the receivers of one line; ``a_group`` is ``a`` at the time of the event."""
        net, before = self.net, self.state()
        assert net.line_units is not None
        event, line = divmod(index, len(net.delays))
        n = int(net.line_units[line])
        a_gate = before[0] if net.problem.options.reset_side == "post" else a_group
        y = net.amplitude(n)
        self.a[U] += net.V[U, :, line] * y
        self.a[R] += net.V[R, :, line] * y
        self.a[Z] += net.V[Z, :, line] * (net.rho_z(n, a_gate) * y)
        self.steps.append(Step("delivery", line, self.t, *before, *self.state(), a_gate, event=event))

    def apply_input(self, k: int) -> None:
        problem, before = self.net.problem, self.state()
        self.a = self.a + self.net.U[:, :, int(problem.input_channels[k])] * float(problem.input_values[k])
        self.steps.append(Step("input", k, self.t, *before, *self.state()))

    def record(self, kind: Literal["readout", "end"], index: int) -> None:
        self.steps.append(Step(kind, index, self.t, *self.state(), *self.state()))

    def state(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.a.copy(), self.c.copy(), self.o.copy()


class ReferenceEngine:
    """The readable engine. It computes in float64 and rounds the results to the dtype of the problem."""

    name: EngineName = "reference"

    def unsupported(self, problem: Problem, running_loss: RunningLoss | None = None) -> str | None:
        if problem.options.checkpoint_every is not None:
            return "it does not support checkpoint_every"
        return None

    def forward(self, problem: Problem, running_loss: RunningLoss | None = None) -> Events:
        net = Network.from_problem(problem)
        samples = [_Simulation(net, s, running_loss) for s in range(len(problem.c0))]
        for sample in samples:
            sample.run()
        emitted = [[step for step in sample.steps if step.kind == "internal"] for sample in samples]
        events = [step for steps in emitted for step in steps]
        reads = [[step for step in sample.steps if step.kind == "readout"] for sample in samples]
        shape = (len(samples), problem.readouts.shape[1], len(net.theta))

        def to_floats(values: Any) -> Tensor:
            return torch.as_tensor(np.array(values, dtype=np.float64)).to(problem.c0)

        def to_ints(values: Any) -> Tensor:
            return torch.as_tensor(np.array(values, dtype=np.int64)).to(problem.c0.device)

        with torch.enable_grad():  # records only what requires gradients
            integral = torch.cat([torch.zeros(0), *(sample.integral[None] for sample in samples)]).to(problem.c0)
        return Events(
            times=to_floats([step.time for step in events]),
            units=to_ints([step.index for step in events]),
            offsets=to_ints(np.cumsum([0] + [len(steps) for steps in emitted])),
            c_read=to_floats([[step.c_plus for step in steps] for steps in reads]).reshape(shape),
            o_read=to_floats([[step.o_plus for step in steps] for steps in reads]).reshape(shape),
            counters=Counters(
                events=to_ints([sample.event_count for sample in samples]),
                root_solves=to_ints([sample.solves for sample in samples]),
                flow_evaluations=to_ints([sample.evaluations for sample in samples]),
                min_slope=to_floats([sample.min_slope for sample in samples]),
            ),
            tape=[sample.steps for sample in samples],
            a_last=to_floats([sample.a for sample in samples]),
            integral=None if running_loss is None else integral,
        )

    def backward(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None = None
    ) -> Gradients:
        return backward(problem, events, cotangents, running_loss)
