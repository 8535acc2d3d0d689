"""Time constants that differ between units: all engines against autograd, and those of a layer."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from egru.continuous import ContinuousEGRU, ContinuousLIF, InputEvents, engines
from egru.continuous.options import Options
from egru.continuous.problem import Engine, Problem
from tests.continuous.networks import EXACT, cotangents, density, network, run, worst_gradient
from tests.continuous.test_delays import delayed_network
from tests.continuous.test_engines import autograd
from tests.continuous.test_lif import lif_network

OPTIONS = {
    "pre": {},
    "post and self": {"reset_side": "post", "self_connections": True},
    "lif": {"cell": "lif", "amplitude": "one"},
}


def with_unit_taus(problem: Problem, names: tuple[str, ...] = ("tau_s", "tau_m", "tau_o"), seed: int = 1) -> Problem:
    """Return ``problem`` with time constants from 0.4 to 2.4, drawn for each unit."""
    g = torch.Generator().manual_seed(seed)
    H = problem.c0.shape[1]
    return dataclasses.replace(
        problem, **{name: 0.4 + 2 * torch.rand(H, generator=g, dtype=torch.float64) for name in names}
    )


def unit_network(seed: int, options: Options, **sizes: Any) -> Problem:
    make = lif_network if options.cell == "lif" else network
    return with_unit_taus(make(seed, options, **sizes))


@pytest.fixture(params=engines.names())
def engine(request) -> Engine:
    return engines.get(request.param)


def assert_matches_autograd(engine: Engine, problem: Problem) -> None:
    events = engine.forward(problem, density)
    assert 20 < len(events.times) < 300
    weights = cotangents(events)
    gradients = engine.backward(problem, events, weights, density)
    errors = worst_gradient(gradients, autograd(problem, events, weights, density))
    assert max(errors.values()) < 1e-10, errors
    for name in ("tau_s", "tau_m", "tau_o"):
        assert getattr(gradients, name).shape == getattr(problem, name).shape


@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_matches_autograd(engine, options):
    assert_matches_autograd(engine, unit_network(4, dataclasses.replace(EXACT, **OPTIONS[options]), hidden=4))


@pytest.mark.parametrize("options", [{}, {"reset_side": "post"}], ids=str)
def test_gradient_with_delays_matches_autograd(engine, options):
    problem = delayed_network(4, dataclasses.replace(EXACT, **options), hidden=4, drive=0.4)
    assert_matches_autograd(engine, with_unit_taus(problem))


@pytest.mark.parametrize("name", ["tau_s", "tau_m", "tau_o"])
def test_one_time_constant_per_unit_and_the_others_shared(engine, name):
    assert_matches_autograd(engine, with_unit_taus(network(4, EXACT, hidden=4), (name,)))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["compiled", "lockstep"])
def test_engines_agree(name, options):
    """With more units than a block of the compiled engine has, short intervals, and long ones that end at rest."""
    problem = unit_network(5, dataclasses.replace(EXACT, **OPTIONS[options]), hidden=70, horizon=1.5)
    problem = dataclasses.replace(problem, V=problem.V * 0.3)
    quiet = unit_network(6, dataclasses.replace(EXACT, **OPTIONS[options]), hidden=4, inputs=2, horizon=400.0)
    bias = quiet.b - torch.tensor([[0.0], [0.0], [1.0]])
    quiet = dataclasses.replace(quiet, b=bias, U=quiet.U.abs(), input_values=8 * quiet.input_values.abs())
    for case in (problem, quiet):
        (events, gradients), (expected, exact) = (run(engines.get(e), case) for e in (name, "reference"))
        assert len(events.units) > 2
        assert torch.equal(events.units, expected.units)
        assert (events.times - expected.times).abs().max() < 1e-11
        errors = worst_gradient(gradients, exact)
        assert max(errors.values()) < 1e-9, errors


def test_equal_entries_give_the_same_result_as_a_number(engine):
    problem = network(3, EXACT, hidden=5)
    taus = {name: getattr(problem, name).expand(5).contiguous() for name in ("tau_s", "tau_m", "tau_o")}
    (events, gradients), (expected, exact) = (run(engine, p) for p in (dataclasses.replace(problem, **taus), problem))
    assert torch.equal(events.units, expected.units)
    assert (events.times - expected.times).abs().max() < 1e-12
    for name in taus:
        assert abs(getattr(gradients, name).sum() - getattr(exact, name)) < 1e-10 * (1 + abs(getattr(exact, name)))


def layer_loss(layer: ContinuousEGRU) -> Tensor:
    events = InputEvents.from_lists([torch.tensor([0.1, 0.5, 1.0, 1.6])] * 2, [torch.tensor([0, 1, 0, 1])] * 2)
    out = layer(events, 4.0, [2.0])
    assert len(out.times) > 6
    return out.times.sin().sum() + out.c.square().sum() + out.state.trace.sum()


@pytest.mark.parametrize("kind", [ContinuousEGRU, ContinuousLIF])
@pytest.mark.parametrize("options", [{}, {"delays": 0.3}, {"checkpoint_every": 3}, {"connections": True}], ids=str)
def test_gradients_of_a_layer_match_differences(kind, options):
    torch.manual_seed(3)
    if "connections" in options:
        options = {"connections": (torch.rand(4, 4) < 0.6).nonzero().T.contiguous()}
    taus = 0.6 + torch.rand(3, 4)
    layer = kind(2, 4, taus[0], taus[1], taus[2], trainable_tau=True, **options)
    with torch.no_grad():
        layer.U.copy_(torch.randn_like(layer.U) + 2.5)
        layer.b[-1] += 0.4
    layer_loss(layer).backward()
    assert layer.log_tau is not None
    assert layer.log_tau.grad is not None
    assert layer.log_tau.shape == (3, 4)
    flat, gradient = layer.log_tau.data.view(-1), layer.log_tau.grad.view(-1)
    for k in range(len(flat)):
        value, ends = flat[k].item(), []
        for step in (1e-6, -1e-6):
            flat[k] = value + step
            ends.append(layer_loss(layer).item())
        flat[k] = value
        assert abs((ends[0] - ends[1]) / 2e-6 - gradient[k]) < 1e-6 * gradient.abs().max().clamp(min=1.0)


def test_checkpoints_are_bitwise_equal():
    problem = unit_network(4, EXACT, hidden=5)
    part = dataclasses.replace(problem, options=dataclasses.replace(EXACT, checkpoint_every=7))
    (events, gradients), (expected, exact) = (run(engines.get("compiled"), p) for p in (part, problem))
    assert torch.equal(events.times, expected.times)
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))


def test_trace_of_the_initial_state_decays_at_the_rate_of_its_unit():
    tau_o = torch.tensor([0.5, 2.0])
    layer = ContinuousEGRU(1, 2, tau_o=tau_o)
    none = InputEvents.from_lists([torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)])
    state = layer.initial_state(1)._replace(trace=torch.ones(1, 2))
    out = layer(none, 2.0, [1.0], state=state)
    torch.testing.assert_close(out.trace[0, 0], torch.exp(-1.0 / tau_o))
    assert "tau=(1 to 1, 1 to 1, 0.5 to 2)" in repr(layer)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.ones(3), ValueError, r"tau_m must be a number or a floating-point tensor of shape \(4,\)"),
        (torch.ones(4, 1), ValueError, r"of shape \(4, 1\)"),
        (torch.ones(4, dtype=torch.int64), ValueError, "torch.int64"),
        (torch.tensor([1.0, 0.0, 1.0, 1.0]), ValueError, "positive and finite, got 0 for unit 1"),
        (torch.tensor([1.0, 1.0, torch.nan, 1.0]), ValueError, "got nan for unit 2"),
        (torch.tensor(-1.0), ValueError, "tau_m must be positive"),
        ("1", TypeError, "tau_m must be a number"),
    ],
    ids=str,
)
def test_bad_time_constants_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        ContinuousEGRU(2, 4, tau_m=value)


def test_time_constants_are_checked_in_every_call():
    layer = ContinuousEGRU(2, 4, tau_s=torch.ones(4), trainable_tau=True)
    assert layer.log_tau is not None
    with torch.no_grad():
        layer.log_tau[1, 2] = torch.nan
    with pytest.raises(ValueError, match="tau_m must be positive and finite, got nan for unit 2"):
        layer_loss(layer)
    with torch.no_grad():
        layer.log_tau[1, 2] = -40.0
    with pytest.raises(ValueError, match=r"tau_m=4.2\S*e-18 is too small for tau_s=1 and the horizon 4"):
        layer_loss(layer)
