"""Check E of docs/concepts/continuous.md: odeint_event of torchdiffeq converges to the reference."""

import itertools

import pytest
import torch
from torch import Tensor

from egru.continuous import engines
from egru.continuous.problem import Problem
from tests.continuous.figures import reached
from tests.continuous.networks import cotangents, network

torchdiffeq = pytest.importorskip("torchdiffeq", reason="compares with torchdiffeq")


def simulate(problem: Problem, tolerance: float, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return event times and the final ``c``. Thresholds are part of the state: event functions have no gradients."""
    V, U, b = leaves["V"], leaves["U"], leaves["b"]
    tau_s, tau_m = leaves["tau_s"], leaves["tau_m"]
    H = len(problem.theta)

    def field(t, state):
        a, c, theta = state
        change = torch.sigmoid(a[0]) * (torch.tanh(a[2]) - c) / tau_m
        return (b - a) / tau_s, change, torch.zeros_like(theta)

    options = {"method": "dopri5", "rtol": tolerance, "atol": tolerance}
    state = (problem.a0[0], problem.c0[0], leaves["theta"])
    t = torch.zeros(())
    stops = [(float(t), k) for k, t in enumerate(problem.input_times)] + [(problem.horizon, -1)]
    times = []
    for stop, k in stops:
        end = torch.tensor(stop)
        while float(t.detach()) < stop:

            def reaches(at, state, stop=stop):
                return torch.cat([state[2] - state[1], (stop - at).reshape(1)]).min()

            s, states = torchdiffeq.odeint_event(field, state, t, event_fn=reaches, **options)
            a, c, theta = (x[-1] for x in states)
            gap = (theta - c).detach()
            if abs(stop - float(s.detach())) < float(gap.min()):  # no unit emits before the stop
                state = tuple(x[-1] for x in torchdiffeq.odeint(field, state, torch.stack([t, end]), **options))
                t = end
                break
            n, t = int(gap.argmin()), s
            times.append(s)
            r, one = torch.sigmoid(a[1, n]), torch.ones(())
            is_emitter = torch.eye(H)[n]
            jump = V[:, :, n] * torch.stack([one, one, r])[:, None] * theta[n] * (1 - is_emitter)
            state = (a + jump, c * (1 - is_emitter), theta)
        if k >= 0:
            a, c, theta = state
            state = (a + U[:, :, int(problem.input_channels[k])] * problem.input_values[k], c, theta)
    return torch.stack(times), state[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_odeint_event_converges_to_the_reference():
    tolerances = (1e-7, 1e-10, 1e-12)
    problem = network(41, batch=1, hidden=3, horizon=3.0, inputs=2, drive=0.8)
    engine = engines.get("reference")
    events = engine.forward(problem)
    assert len(events.times) >= 2
    weights = cotangents(events)
    weights.o_read.zero_()
    weights.amplitudes.zero_()
    weights.c_read[:, :-1] = 0
    weights.a_last = None
    exact = engine.backward(problem, events, weights)
    errors = []
    for tolerance in tolerances:
        leaves = {n: getattr(problem, n).clone().requires_grad_() for n in ("V", "U", "b", "theta", "tau_s", "tau_m")}
        times, c = simulate(problem, tolerance, leaves)
        assert len(times) == len(events.times)
        loss = (weights.times * times).sum() + (weights.c_read[0, -1] * c).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        errors.append(
            max(
                float((g - getattr(exact, n)).abs().max() / getattr(exact, n).abs().max())
                for n, g in zip(leaves, grads, strict=True)
            )
        )
    reached("E", "reference", errors[-1])
    assert errors[0] < 1e3 * tolerances[0]
    assert all(later < earlier / 20 for earlier, later in itertools.pairwise(errors)), errors
