"""Leaky integrate-and-fire neurons: the same engines with constant gates, and the published gradient of EventProp."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from egru import Threshold
from egru.continuous import ContinuousLIF, ContinuousStack, EventLimitError, InputEvents, calibrate_activity, engines
from egru.continuous.options import Options
from egru.continuous.problem import Engine, Problem
from tests.continuous.networks import EXACT, cotangents, density, network, run, worst_gradient
from tests.continuous.test_engines import autograd

LIF = dataclasses.replace(EXACT, cell="lif", amplitude="one")


def lif_network(seed: int, options: Options = LIF, **sizes: Any) -> Problem:
    """Return a random problem. Its recurrent weights are weak, because nothing else bounds the activity."""
    problem = network(seed, options, **sizes)
    return dataclasses.replace(problem, V=problem.V * 0.1)


@pytest.fixture(params=engines.names())
def engine(request) -> Engine:
    return engines.get(request.param)


@pytest.mark.parametrize("options", [{}, {"self_connections": True}, {"amplitude": "theta"}], ids=str)
def test_gradient_matches_autograd(engine, options):
    problem = lif_network(4, dataclasses.replace(LIF, **options), hidden=4)
    events = engine.forward(problem, density)
    assert 20 < len(events.times) < 300
    weights = cotangents(events)
    gradients = engine.backward(problem, events, weights, density)
    errors = worst_gradient(gradients, autograd(problem, events, weights, density))
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("name", ["compiled", "lockstep"])
def test_engines_agree_also_with_large_currents_and_long_silence(name):
    problem = lif_network(5, hidden=4, horizon=120.0)
    big = {"input_values": problem.input_values * 60.0, "theta": problem.theta * 40.0, "c0": problem.c0 * 40.0}
    problem = dataclasses.replace(problem, **big)
    (events, gradients), (expected, exact) = (run(engines.get(e), problem) for e in (name, "reference"))
    assert 5 < len(events.units) < 500
    assert torch.equal(events.units, expected.units)
    assert (events.times - expected.times).abs().max() < 1e-10
    errors = worst_gradient(gradients, exact)
    assert max(errors.values()) < 1e-9, errors


def eventprop(V: Tensor, b: Tensor, theta: float, tau_s: float, tau_m: float, times: Tensor, units: Tensor, by: Tensor):
    """Return the gradient of V by the formulas of Wunderlich and Pehle (2021), table 1, in closed form.

    The loss depends on event times only, with derivatives ``by``, and the run starts at rest with current ``b``.
    """
    I, v, t = b.clone(), torch.zeros_like(b), 0.0
    slopes = []  # dV/dt of the emitter before each event
    for s, n in zip(times.tolist(), units.tolist(), strict=True):
        q_s, q_m = math.exp(-(s - t) / tau_s), math.exp(-(s - t) / tau_m)
        kappa = tau_s / (tau_s - tau_m)
        v = b + (v - b - kappa * (I - b)) * q_m + kappa * (I - b) * q_s
        I, t = b + (I - b) * q_s, s
        assert abs(v[n] - theta) < 1e-11
        slopes.append((I[n] - v[n]) / tau_m)
        v[n] = 0.0
        I = I + V[:, n]
    lambda_v, lambda_i, gradient = torch.zeros_like(b), torch.zeros_like(b), torch.zeros_like(V)
    for k in reversed(range(len(times))):
        n = int(units[k])
        gradient[:, n] -= tau_s * lambda_i
        jump = theta * lambda_v[n] + V[:, n] @ (lambda_v - lambda_i) + by[k]
        lambda_v[n] = lambda_v[n] + jump / (tau_m * slopes[k])
        back = float(times[k] - (times[k - 1] if k else 0.0))
        # tau_m dlambda_v = -lambda_v, tau_s dlambda_i = -lambda_i + lambda_v, backward in time
        q_s, q_m = math.exp(-back / tau_s), math.exp(-back / tau_m)
        kappa = tau_m / (tau_m - tau_s)
        lambda_i = (lambda_i - kappa * lambda_v) * q_s + kappa * lambda_v * q_m
        lambda_v = lambda_v * q_m
    return gradient


def test_gradient_is_that_of_eventprop(engine):
    torch.manual_seed(1)
    H = 5
    layer = ContinuousLIF(
        1, H, 0.7, 1.3, start="rest", self_connections=True, engine=engine.name, grazing_floor=0.0, nodes=12, panel=1.0
    )
    with torch.no_grad():
        layer.V.copy_(0.6 * torch.randn(1, H, H))
        layer.b.copy_(1.2 + torch.rand(1, H))
    silent = InputEvents.from_lists([torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)])
    out = layer(silent, 6.0)
    assert len(out.times) > 15
    by = torch.randn(len(out.times))
    (out.times * by).sum().backward()
    V, b = layer.V.detach()[0], layer.b.detach()[0]
    expected = eventprop(V, b, 1.0, 0.7, 1.3, out.times.detach(), out.units, by)
    assert layer.V.grad is not None
    assert (layer.V.grad[0] - expected).abs().max() < 1e-10 * expected.abs().max()


def test_constant_current_gives_regular_events(engine):
    layer = ContinuousLIF(1, 1, tau_s=0.5, tau_m=2.0, start="rest", engine=engine.name)
    with torch.no_grad():
        layer.b.fill_(1.6)
    times = layer(InputEvents.from_lists([torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)]), 10.0).times
    period = 2.0 * math.log(1.6 / 0.6)
    torch.testing.assert_close(times, period * torch.arange(1, len(times) + 1), rtol=1e-12, atol=0.0)


def test_gradients_of_all_parameters_match_differences():
    torch.manual_seed(3)
    layer = ContinuousLIF(2, 4, 0.8, 1.1, trainable_tau=True, threshold=Threshold(mean=0.0, std=0.1))
    with torch.no_grad():
        layer.U.copy_(torch.randn(1, 4, 2) + 2.5)
    events = InputEvents.from_lists([torch.tensor([0.1, 0.5, 1.0, 1.6])], [torch.tensor([0, 1, 0, 1])])

    def loss() -> Tensor:
        out = layer(events, 4.0, [2.0])
        assert len(out.times) > 6
        return out.times.sin().sum() + out.c.square().sum() + out.state.trace.sum()

    loss().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for k in range(len(flat)):
            value, ends = flat[k].item(), []
            for step in (1e-6, -1e-6):
                flat[k] = value + step
                ends.append(loss().item())
            flat[k] = value
            assert abs((ends[0] - ends[1]) / 2e-6 - gradient[k]) < 1e-6 * gradient.abs().max().clamp(min=1.0), name


def test_runaway_activity_and_foreign_options_are_refused():
    layer = ContinuousLIF(1, 3, max_events=50)
    with torch.no_grad():
        layer.V.fill_(5.0)
        layer.b.fill_(3.0)
    with pytest.raises(EventLimitError, match="more than 50 events"):
        layer(InputEvents.from_lists([torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)]), 10.0)
    with pytest.raises(TypeError, match="no option 'reset_side'"):
        ContinuousLIF(1, 3, reset_side="post")


def test_layers_stack_and_calibrate():
    torch.manual_seed(0)
    events = InputEvents.from_lists([torch.linspace(0.1, 3.0, 12)] * 4, [torch.arange(12) % 3] * 4)
    first, second = ContinuousLIF(3, 8), ContinuousLIF(8, 4)
    reached = calibrate_activity(first, events, 4.0, 3.0)
    assert (reached - 3.0).abs().max() < 1.0
    ContinuousStack(first, second)(events, 4.0)[1].state.c.sum().backward()
    assert first.U.grad is not None
    assert first.U.grad.abs().max() > 0
