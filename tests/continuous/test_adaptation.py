"""Adaptive leaky integrate-and-fire neurons: all engines against autograd, a closed form and one another."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from egru import Threshold
from egru.continuous import ContinuousLIF, InputEvents, engines, rate_penalty, silence_penalty
from egru.continuous.options import Options
from egru.continuous.problem import DIFFERENTIABLE, Engine, Problem
from egru.continuous.reference.crossing import find_crossings
from egru.continuous.reference.network import Network
from tests.continuous.networks import EXACT, cotangents, density, network, run, worst_gradient
from tests.continuous.test_delays import delayed_network
from tests.continuous.test_engines import autograd
from tests.continuous.test_random_networks import attempt, difference, nearby
from tests.continuous.test_time_constants import with_unit_taus

ALIF = dataclasses.replace(EXACT, cell="alif", amplitude="one")


NOTHING = InputEvents.from_lists([torch.zeros(0).double()], [torch.zeros(0, dtype=torch.int64)])
DRIVE = InputEvents.from_lists([torch.tensor([0.1, 0.5, 1.0, 1.6, 2.4]).double()] * 2, [torch.arange(5) % 2] * 2)


def with_adaptation(problem: Problem, seed: int = 0, *, per_unit: bool = True, strength: float = 0.4) -> Problem:
    """Return ``problem`` with weak recurrent weights and adaptation, some of it of the opposite sign."""
    g = torch.Generator().manual_seed(seed)
    H = problem.c0.shape[1]
    beta = strength * (torch.rand(H, generator=g, dtype=torch.float64) - 0.15)
    tau_a = 0.4 + 3 * torch.rand(H if per_unit else (), generator=g, dtype=torch.float64)
    return dataclasses.replace(problem, V=problem.V * 0.1, beta=beta, tau_a=tau_a)


def alif_network(seed: int, options: Options = ALIF, *, per_unit: bool = True, **sizes: Any) -> Problem:
    return with_adaptation(network(seed, options, **sizes), seed, per_unit=per_unit)


@pytest.fixture(params=engines.names())
def engine(request) -> Engine:
    return engines.get(request.param)


def assert_matches_autograd(engine: Engine, problem: Problem) -> None:
    for running_loss in (None, density):  # with a running loss, the compiled engine updates all units at every event
        events = engine.forward(problem, running_loss)
        assert 20 < len(events.times) < 300
        weights = cotangents(events)
        gradients = engine.backward(problem, events, weights, running_loss)
        errors = worst_gradient(gradients, autograd(problem, events, weights, running_loss))
        assert max(errors.values()) < 1e-10, errors
        assert gradients.beta.abs().max() > 0
        assert gradients.tau_a.abs().max() > 0


@pytest.mark.parametrize("per_unit", [True, False])
@pytest.mark.parametrize("options", [{}, {"self_connections": True}, {"amplitude": "theta"}], ids=str)
def test_gradient_matches_autograd(engine, options, per_unit):
    problem = alif_network(4, dataclasses.replace(ALIF, **options), hidden=4, per_unit=per_unit)
    assert_matches_autograd(engine, problem)


def test_gradient_with_time_constants_per_unit_matches_autograd(engine):
    assert_matches_autograd(engine, with_unit_taus(alif_network(4, hidden=4)))


@pytest.mark.parametrize("equal", [("tau_a", "tau_s"), ("tau_a", "tau_m"), ("tau_s", "tau_m"), "all"], ids=str)
def test_equal_time_constants_are_not_special(engine, equal):
    problem = alif_network(4, hidden=4, per_unit=False)
    names = ("tau_a", "tau_s", "tau_m") if equal == "all" else equal
    assert_matches_autograd(engine, dataclasses.replace(problem, **dict.fromkeys(names, problem.tau_s)))


@pytest.mark.parametrize("name", ["compiled", "lockstep"])
def test_fast_adaptation_is_resolved_by_the_nodes_of_a_running_loss(name):
    problem = alif_network(4, hidden=4, batch=1, per_unit=False, horizon=2.0, drive=2.0)
    problem = dataclasses.replace(problem, tau_a=torch.tensor(0.004), beta=torch.full((4,), 20.0))
    result, expected = (engines.get(e).forward(problem, density) for e in (name, "reference"))
    assert len(result.units) > 2
    assert result.integral is not None
    assert expected.integral is not None
    assert (result.integral - expected.integral).abs().max() < 1e-11


def test_gradient_with_delays_matches_autograd(engine):
    problem = with_adaptation(delayed_network(4, ALIF, hidden=4, drive=0.4), 4)
    assert_matches_autograd(engine, problem)


def without_connections(units: int, batch: int, horizon: float, seed: int) -> Problem:
    """Return unconnected units with random states and time constants, in which ``z`` often rises and falls."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)

    problem = alif_network(0, hidden=units, batch=batch, horizon=horizon, inputs=0)
    a0 = torch.stack([uniform(-6.0, 6.0, batch, units) for _ in range(3)], 1)
    theta = uniform(0.2, 1.0, units)
    return dataclasses.replace(
        problem,
        mask=torch.zeros(units, units, dtype=torch.bool),
        readout_times=problem.readout_times[-1:],
        b=torch.stack([uniform(-1.0, 1.0, units) for _ in range(3)]),
        theta=theta,
        tau_s=10 ** uniform(-1.0, 1.0, units),
        tau_m=10 ** uniform(-1.0, 0.5, units),
        tau_a=10 ** uniform(-1.0, 1.0, units),
        a0=a0,
        c0=theta - uniform(0.0, 2.0, batch, units),
        beta=torch.full((units,), 1e3, dtype=torch.float64),
    )


def first_crossings(problem: Problem, points: int) -> tuple[Tensor, Tensor]:
    """Return when each unit first reaches its threshold from below, from a fine grid and the closed form of ``c``.

    Also return whether ``z`` had fallen below the threshold before that and risen again.
    """
    t = torch.linspace(0.0, float(problem.horizon), points, dtype=torch.float64)[:, None, None]
    tau_s, tau_m, tau_a, theta = problem.tau_s, problem.tau_m, problem.tau_a, problem.theta
    (b_u, _, b_z), (a_u, _, a_z) = problem.b, problem.a0.unbind(1)
    rest, kept = b_z - b_u, torch.exp(-t / tau_m)

    def filtered(tau: Tensor) -> Tensor:
        return tau / (tau - tau_m) * (torch.exp(-t / tau) - kept)

    c = rest + (problem.c0 - rest) * kept + (a_z - b_z) * filtered(tau_s) - (a_u - b_u) * filtered(tau_a)
    z = rest + (a_z - b_z) * torch.exp(-t / tau_s) - (a_u - b_u) * torch.exp(-t / tau_a)
    rises = (c[:-1] < theta) & (c[1:] >= theta)
    first, crosses = rises.to(torch.int8).argmax(0), rises.any(0)
    fallen = (z[:-1] > theta) & (z[1:] <= theta)
    again = crosses & (fallen.cumsum(0).gather(0, first[None])[0] > 0)
    return torch.where(crosses, t[first + 1, 0, 0], torch.inf), again


@pytest.mark.parametrize("above", [False, True])
def test_no_crossing_is_missed(engine, above):
    """Also where the input exceeds the threshold in two intervals, and where ``c`` starts above its threshold."""
    units, batch, horizon, points = 250, 4, 12.0, 6000
    problem = without_connections(units, batch, horizon, 1)
    if above:
        options = dataclasses.replace(ALIF, above_threshold="fire")
        problem = dataclasses.replace(problem, c0=2 * problem.theta - problem.c0, options=options)
    expected, again = first_crossings(problem, points)
    first = torch.full((batch, units), torch.inf, dtype=torch.float64)
    events = None if engine.name == "reference" else engine.forward(problem)
    net = Network.from_problem(problem)
    for s in range(batch):
        if events is None:  # without the slow run
            a, c = problem.a0[s].numpy(), problem.c0[s].numpy()
            first[s] = torch.as_tensor(find_crossings(a, net.b, c, net.theta, horizon, net.settings).times)
            continue
        for k in reversed(range(int(events.offsets[s]), int(events.offsets[s + 1]))):
            first[s, events.units[k]] = events.times[k]
    forced = problem.c0 >= problem.theta
    forced &= problem.a0[:, 2] - problem.a0[:, 0] > problem.theta  # these emit at once
    assert (first[forced] == 0).all() or events is None
    first, expected, again = first[~forced], expected[~forced], again[~forced]
    spacing = horizon / (points - 1)
    missed = torch.isinf(first) & (expected < horizon - spacing)
    assert not missed.any()
    both = torch.isfinite(first) & torch.isfinite(expected)
    assert both.sum() > 50
    assert (again & both).sum() >= (10 if not above else 0)
    # A crossing may be shorter than the spacing; then the engine's is the earlier one.
    assert (first[both] <= expected[both] + 1e-12).all()
    assert (first[both] < expected[both] - spacing - 1e-12).sum() + (first < expected)[~both].sum() <= 5


def interval(b: float, w: float, tau_m: float, tau_a: float) -> float:
    """Return the time from a reset with adaptation current ``w`` to the next event, for constant current ``b``."""

    def membrane(t: float) -> float:
        decay = tau_a / (tau_a - tau_m) * (math.exp(-t / tau_a) - math.exp(-t / tau_m))
        return b * (1 - math.exp(-t / tau_m)) - w * decay - 1.0

    low, high = 0.0, 100.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if membrane(middle) < 0 else (low, middle)
    return high


def test_constant_current_gives_intervals_that_grow_to_a_steady_state(engine):
    b, beta, tau_m, tau_a = 2.0, 0.5, 1.5, 6.0
    layer = ContinuousLIF(1, 1, 0.5, tau_m, start="rest", adaptation=beta, tau_a=tau_a, engine=engine.name)
    torch.nn.init.constant_(layer.b, b)
    times = layer(NOTHING, 120.0).times.detach()
    w, time = 0.0, 0.0
    for s in times.tolist():
        length = interval(b, w, tau_m, tau_a)
        time, w = time + length, w * math.exp(-length / tau_a) + beta
        assert abs(s - time) < 1e-11
    intervals = times.diff(prepend=times.new_zeros(1))
    assert (intervals[:4].diff() > 0.1).all()
    steady = float(intervals[-1])  # w just after an event is constant: w = w exp(-T / tau_a) + beta
    assert abs(interval(b, beta / (1 - math.exp(-steady / tau_a)), tau_m, tau_a) - steady) < 1e-8
    assert steady > 3 * float(intervals[0])


def test_zero_strength_equals_neurons_without_adaptation(engine):
    problem = with_unit_taus(alif_network(4, hidden=4))
    gates = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    silent = {name: getattr(problem, name) * gates[:, None, None] for name in ("V", "U")}
    silent |= {name: getattr(problem, name) * gates[:, None] for name in ("b", "a0")}
    problem = dataclasses.replace(problem, **silent, beta=torch.zeros_like(problem.beta))
    options = dataclasses.replace(problem.options, cell="lif")
    plain = dataclasses.replace(problem, options=options, beta=None, tau_a=None)
    (events, gradients), (expected, exact) = (run(engine, p, density) for p in (problem, plain))
    assert torch.equal(events.units, expected.units)
    assert (events.times - expected.times).abs().max() < 1e-13
    for name in DIFFERENTIABLE[:-2]:
        left, right = (getattr(g, name) for g in (gradients, exact))
        rows = slice(2, 3) if name in ("V", "U", "b") else slice(None)  # the gate of the adaptation differs
        if name == "a0":
            left, right = left[:, 1:], right[:, 1:]
        torch.testing.assert_close(left[rows], right[rows], rtol=1e-10, atol=1e-10)


def loss_of_layer(layer: ContinuousLIF) -> Tensor:
    out = layer(DRIVE, torch.tensor([4.0, 3.5]), [2.0, 3.5], running_loss=lambda c, t, sample: c.square().sum(1))
    assert len(out.times) > 20
    assert out.integral is not None
    penalty = silence_penalty(out, layer.thresholds()) + rate_penalty(out, low=1.0, high=2.0)
    return out.times.sin().sum() + out.c.square().sum() + out.state.a[:, 0].sum() + out.integral.sum() + penalty


LAYERS = {
    "shared": {"tau_a": 2.0, "adaptation": 0.3},
    "per unit": {"tau_a": torch.linspace(0.5, 4.0, 4), "adaptation": torch.tensor([0.5, 0.3, -0.1, 0.0])},
    "delays": {"tau_a": 2.0, "adaptation": torch.linspace(0.1, 0.4, 4), "delays": 0.3},
    "checkpoints": {"tau_a": 2.0, "adaptation": 0.3, "checkpoint_every": 5},
    "connections": {"tau_a": 2.0, "adaptation": 0.3, "connections": torch.tensor([[0, 1, 2, 3], [1, 2, 3, 1]])},
}


@pytest.mark.parametrize("options", LAYERS)
def test_gradients_of_a_layer_match_differences(options):
    torch.manual_seed(3)
    layer = ContinuousLIF(
        2, 4, 0.8, 1.1, trainable_tau=True, trainable_adaptation=True, threshold=Threshold(mean=0.0, std=0.1),
        grazing_floor=0.0, **LAYERS[options],
    )  # fmt: skip
    with torch.no_grad():
        layer.U.copy_(torch.randn_like(layer.U) + 2.5)
        layer.b.add_(0.6)
    loss_of_layer(layer).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for k in range(len(flat)):
            value, ends = flat[k].item(), []
            for step in (1e-6, -1e-6):
                flat[k] = value + step
                ends.append(loss_of_layer(layer).item())
            flat[k] = value
            difference = (ends[0] - ends[1]) / 2e-6
            assert abs(difference - gradient[k]) < 2e-6 * gradient.abs().max().clamp(min=1.0), name


def test_checkpoints_are_bitwise_equal():
    problem = with_unit_taus(alif_network(4, hidden=5))
    part = dataclasses.replace(problem, options=dataclasses.replace(ALIF, checkpoint_every=7))
    (events, gradients), (expected, exact) = (run(engines.get("compiled"), p) for p in (part, problem))
    assert torch.equal(events.times, expected.times)
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))


def test_run_continues_from_a_state(engine):
    torch.manual_seed(0)
    layer = ContinuousLIF(2, 3, adaptation=0.4, tau_a=3.0, engine=engine.name)
    torch.nn.init.constant_(layer.b, 3.0)
    whole = layer(DRIVE, 4.0)
    first = layer(DRIVE.window(0.0, 2.0), 2.0)
    second = layer(DRIVE.window(2.0, 4.0), 2.0, state=first.state)
    assert first.state.a[:, 0].max() > 0.1
    torch.testing.assert_close(second.state.a, whole.state.a, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(second.state.c, whole.state.c, rtol=1e-11, atol=1e-11)
    assert torch.equal(first.counts() + second.counts(), whole.counts())


def test_simultaneous_events_of_identical_units_keep_the_group(engine):
    problem = alif_network(3, hidden=1, batch=1, drive=2.0)
    three = {name: getattr(problem, name).expand(*getattr(problem, name).shape[:-1], 3) for name in ("b", "a0", "c0")}
    three |= {name: getattr(problem, name).expand(3) for name in ("theta", "beta", "tau_a")}
    three["V"] = torch.full((3, 3, 3), 0.05, dtype=torch.float64)
    three["U"] = problem.U.expand(3, 3, problem.U.shape[2])
    problem = dataclasses.replace(problem, **{name: value.contiguous() for name, value in three.items()})
    events, gradients = run(engine, problem)
    assert len(events.times) > 10
    assert torch.equal(events.units, torch.arange(3).repeat(len(events.units) // 3))
    expected = run(engines.get("reference"), problem)[1]
    assert max(worst_gradient(gradients, expected).values()) < 1e-10


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(0, 6)),
    taus=st.tuples(*[st.sampled_from([0.06, 0.3, 1.0, 1.0 + 1e-9, 5.0])] * 3),
    strength=st.sampled_from([0.0, 0.2, 1.0, 4.0]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    drive=st.sampled_from([-0.5, 0.5, 2.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_engines_agree_on_random_networks(sizes, taus, strength, flags, drive, seed):
    (hidden, batch, inputs), (self_connections, delayed, per_unit) = sizes, flags
    options = dataclasses.replace(ALIF, self_connections=self_connections, max_events=150)
    make = delayed_network if delayed else network
    problem = make(seed, options, hidden=hidden, batch=batch, inputs=inputs, horizon=4.0, drive=drive)
    problem = with_adaptation(problem, seed, per_unit=per_unit, strength=strength)
    factor = 1.0 if not per_unit else 1 + 0.3 * torch.arange(hidden)
    values = {name: torch.tensor(tau) * factor for name, tau in zip(("tau_s", "tau_m", "tau_a"), taus, strict=True)}
    problem = dataclasses.replace(problem, **values)
    expected, moved = attempt("reference", problem), attempt("reference", nearby(problem, seed))
    if isinstance(expected, str) or isinstance(moved, str):
        reject()
    assume(torch.equal(expected[0].units, moved[0].units))
    noise = difference(expected, moved)
    for name in ("compiled", "lockstep"):
        result = attempt(name, problem)
        assert not isinstance(result, str), name
        assert torch.equal(result[0].units, expected[0].units), name
        outputs, gradients = difference(expected, result)
        assert outputs <= 1e-11 + 100 * noise[0], name
        assert gradients <= 1e-10 + 100 * noise[1], name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"adaptation": 1.0, "tau_a": -1.0}, ValueError, "tau_a must be positive and finite, got -1.0"),
        ({"adaptation": 1.0, "tau_a": torch.ones(3)}, ValueError, r"tau_a must be .* of shape \(4,\)"),
        ({"adaptation": 1.0, "tau_a": torch.tensor([1.0, 1.0, torch.nan, 1.0])}, ValueError, "got nan for unit 2"),
        ({"adaptation": torch.ones(3), "tau_a": 1.0}, ValueError, r"adaptation must be .* got .* of shape \(3,\)"),
        ({"adaptation": torch.ones(4).int(), "tau_a": 1.0}, ValueError, "got torch.int32"),
        ({"adaptation": math.nan, "tau_a": 1.0}, ValueError, "adaptation must be finite, got nan"),
        ({"adaptation": torch.tensor([0.0, math.inf, 0.0, 0.0]), "tau_a": 1.0}, ValueError, "got inf for unit 1"),
        ({"adaptation": "1", "tau_a": 1.0}, TypeError, "adaptation must be a number or a tensor, got str '1'"),
        ({"adaptation": 1.0}, ValueError, "adaptation requires tau_a"),
        ({"tau_a": 1.0}, ValueError, "tau_a requires adaptation"),
        ({"trainable_adaptation": True}, ValueError, "trainable_adaptation requires adaptation"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        ContinuousLIF(2, 4, **options)


def test_values_are_checked_in_every_call():
    layer = ContinuousLIF(2, 4, adaptation=0.3, tau_a=2.0, trainable_adaptation=True, trainable_tau=True)
    assert layer.log_tau is not None
    assert layer.adaptation is not None
    with torch.no_grad():
        layer.log_tau[3] = torch.nan
    with pytest.raises(ValueError, match="tau_a must be positive and finite, got nan"):
        layer(DRIVE, 4.0)
    with torch.no_grad():
        layer.log_tau[3] = -40.0
    with pytest.raises(ValueError, match=r"tau_a=4.2\S*e-18 is too small for tau_m=1, tau_s=1 and the horizon 4"):
        layer(DRIVE, 4.0)
    with torch.no_grad():
        layer.log_tau[3] = 0.0
        layer.adaptation.fill_(torch.nan)
    with pytest.raises(ValueError, match="adaptation must be finite, got nan"):
        layer(DRIVE, 4.0)


@pytest.mark.parametrize("options", [EXACT, dataclasses.replace(EXACT, reset_side="post"), ALIF], ids=lambda o: o.cell)
def test_final_activations_do_not_need_a_readout_at_the_horizon(engine, options):
    problem = network(4, options, hidden=4)
    if options.adaptive:
        problem = with_adaptation(problem)
    early = dataclasses.replace(problem, readout_times=problem.readout_times[:-1])
    events, expected = engine.forward(early), engine.forward(problem)
    assert float(early.readout_times[-1]) < problem.horizon - 0.5
    torch.testing.assert_close(events.a_last, expected.a_last, rtol=1e-12, atol=1e-12)
    weights = cotangents(events, only="a_last")
    gradients = engine.backward(early, events, weights)
    weights = dataclasses.replace(cotangents(expected, only="a_last"), a_last=weights.a_last)
    errors = worst_gradient(gradients, engine.backward(problem, expected, weights))
    assert max(errors.values()) < 1e-11, errors
    assert gradients.V.abs().max() > 0.01


@pytest.mark.parametrize("name", ["compiled", "lockstep"])
def test_float32_agrees_with_float64(name):
    layer = ContinuousLIF(2, 3, 0.7, 1.2, adaptation=0.4, tau_a=3.0, trainable_adaptation=True, engine=name)
    torch.nn.init.constant_(layer.b, 2.5)
    single = copy.deepcopy(layer).float()
    events = DRIVE._replace(times=DRIVE.times.float(), values=DRIVE.values.float())
    out, expected = single(events, 4.0), layer(DRIVE, 4.0)
    assert torch.equal(out.units, expected.units)
    torch.testing.assert_close(out.times.double(), expected.times, rtol=1e-5, atol=1e-5)
    out.times.sum().backward()
    expected.times.sum().backward()
    assert single.adaptation is not None
    assert layer.adaptation is not None
    assert single.adaptation.grad is not None
    assert layer.adaptation.grad is not None
    torch.testing.assert_close(single.adaptation.grad.double(), layer.adaptation.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per_unit", [True, False])
@pytest.mark.parametrize("name", ["compiled", "lockstep"])
def test_engines_agree_on_more_units_than_a_block_and_on_long_silence(name, per_unit):
    large = alif_network(5, hidden=70, horizon=1.5, per_unit=per_unit)
    large = dataclasses.replace(large, V=large.V * 0.3)
    quiet = alif_network(6, hidden=4, inputs=2, horizon=400.0, per_unit=per_unit)
    bias = torch.tensor([[0.0], [0.0], [-0.6]], dtype=torch.float64)
    quiet = dataclasses.replace(
        quiet, b=quiet.b * 0.1 + bias, input_values=8 * quiet.input_values.abs(), U=quiet.U.abs()
    )
    for problem in (large, quiet):
        (events, gradients), (expected, exact) = (run(engines.get(e), problem) for e in (name, "reference"))
        assert len(events.units) > 2
        assert torch.equal(events.units, expected.units)
        assert (events.times - expected.times).abs().max() < 1e-11
        errors = worst_gradient(gradients, exact)
        assert max(errors.values()) < 1e-9, errors
