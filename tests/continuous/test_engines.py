"""Checks that every engine must pass. The letters A to K are those of the table in docs/concepts/continuous.md."""

import dataclasses

import pytest
import torch

from egru.continuous import engines
from egru.continuous.limits import event_bound
from egru.continuous.options import Options
from egru.continuous.problem import DIFFERENTIABLE, Engine, Problem
from tests.continuous.autograd_run import differentiable
from tests.continuous.figures import reached
from tests.continuous.networks import EXACT, changed, cotangents, density, loss, network, run, worst_gradient

ENGINES = list(engines.names())
OTHERS = [name for name in ENGINES if name != "reference"]
OPTION_SETS = {
    "paper": {},
    "self": {"self_connections": True},
    "post": {"reset_side": "post"},
    "one": {"amplitude": "one"},
    "all": {"self_connections": True, "reset_side": "post", "amplitude": "one"},
}
TWO_AND_TEN = [pytest.param(range(2), id="2"), pytest.param(range(2, 12), id="10", marks=pytest.mark.slow)]
TWO_AND_22 = [pytest.param(range(2), id="2"), pytest.param(range(2, 24), id="22", marks=pytest.mark.slow)]


@pytest.fixture(params=ENGINES)
def engine(request) -> Engine:
    return engines.get(request.param)


@pytest.fixture(params=OPTION_SETS)
def options(request) -> Options:
    return dataclasses.replace(EXACT, **OPTION_SETS[request.param])


def loss_for(engine: Engine, problem: Problem):
    """Return a running loss if the engine supports one, else None."""
    return density if engine.unsupported(problem, density) is None else None


@pytest.mark.parametrize("seeds", TWO_AND_TEN)
def test_events_match_scipy(engine, seeds):
    """Check B: the same order, and times and final state to 1e-11."""
    pytest.importorskip("scipy", reason="compares with SciPy")
    from tests.continuous.scipy_solver import simulate

    count = 0
    for seed in seeds:
        problem = network(seed, batch=1, hidden=4, horizon=8.0)
        events = engine.forward(problem)
        times, units, c = simulate(problem, 0)
        count += len(units)
        assert events.units.tolist() == units
        assert reached("B", engine.name, (events.times - torch.tensor(times)).abs().max()) < 1e-11
        assert reached("B", engine.name, (events.c_read[0, -1] - torch.tensor(c)).abs().max()) < 1e-11
    assert count >= 5 * len(seeds)


def autograd(problem, events, weights, running) -> dict[str, torch.Tensor]:
    """Return the gradients of the same loss by autograd."""
    outputs, leaves = differentiable(problem, events, running)
    if weights.integral is None:
        outputs.pop("integral")
    total = sum((getattr(weights, name) * value).sum() for name, value in outputs.items())
    assert isinstance(total, torch.Tensor)
    assert abs(total.item() - loss(problem, events, weights)) < 1e-11 * (1 + abs(total.item()))
    exact = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, exact, strict=True))


@pytest.mark.parametrize("seeds", TWO_AND_22)
def test_gradient_matches_autograd(engine, options, seeds):
    """Check C: all parameters and all kinds of losses together, to 1e-10."""
    count = 0
    for seed in seeds:
        problem = network(seed, options, hidden=3 + seed % 4)
        running = loss_for(engine, problem)
        events = engine.forward(problem, running)
        count += len(events.times)
        weights = cotangents(events)
        gradients = engine.backward(problem, events, weights, running)
        errors = worst_gradient(gradients, autograd(problem, events, weights, running))
        assert reached("C", engine.name, max(errors.values())) < 1e-10, (seed, errors)
        assert not gradients.floored.any()
    assert count >= 20 * len(seeds)


@pytest.mark.parametrize("only", ["times", "amplitudes", "c_read", "o_read", "a_last", "integral"])
def test_gradient_of_each_loss_term_matches_autograd(engine, only):
    """Check C: one kind of loss at a time, so that no error is hidden by a larger term."""
    problem = network(3)
    running = loss_for(engine, problem)
    events = engine.forward(problem, running)
    if only == "integral" and running is None:
        pytest.skip("this engine does not support a running loss")
    weights = cotangents(events, only=only)
    gradients = engine.backward(problem, events, weights, running)
    outputs, leaves = differentiable(problem, events, running)
    total = (getattr(weights, only) * outputs[only]).sum()
    exact = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    errors = worst_gradient(gradients, dict(zip(leaves, exact, strict=True)))
    assert reached("C", engine.name, max(errors.values())) < 1e-10, errors


def five_point(engine, problem, weights, running, name, index, h=2e-5) -> float:
    """Return a fourth-order central difference, with a step small enough to keep the sequence of events."""
    base = engine.forward(problem, running)
    for _ in range(8):
        values = []
        for k in (-2, -1, 1, 2):
            moved = changed(problem, name, index, k * h)
            events = engine.forward(moved, running)
            if not torch.equal(events.units, base.units):
                break
            values.append(loss(moved, events, weights))
        else:
            return (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
        h /= 4
    raise AssertionError(f"{name}[{index}]: the sequence of events changes at any step")


def check_differences(engine, problem, per_tensor: int, generator: torch.Generator) -> None:
    running = loss_for(engine, problem)
    events = engine.forward(problem, running)
    weights = cotangents(events)
    gradients = engine.backward(problem, events, weights, running)
    for name in DIFFERENTIABLE:
        gradient = getattr(gradients, name).reshape(-1)
        scale = max([1.0, *gradient.abs().tolist()])
        for index in torch.randperm(len(gradient), generator=generator)[:per_tensor].tolist():
            difference = five_point(engine, problem, weights, running, name, index)
            assert reached("D", engine.name, abs(difference - gradient[index]) / scale) < 1e-6, (name, index)


def test_gradient_matches_differences(engine):
    """Check D: to 1e-6 of the largest entry."""
    check_differences(
        engine, network(11, batch=1, hidden=3, horizon=4.0, inputs=4), 1, torch.Generator().manual_seed(0)
    )


@pytest.mark.slow
def test_gradient_matches_differences_for_many_networks(engine, options):
    """Check D: every entry of 12 small networks per set of options."""
    for seed in range(12):
        problem = network(100 + seed, options, batch=1, hidden=3 + seed % 3, horizon=4.0, inputs=6)
        per_tensor = 6 if engine.name in ("reference", "lockstep") else 1000  # these two are slow
        check_differences(engine, problem, per_tensor, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("seeds", TWO_AND_22)
def test_engine_matches_the_reference(name, options, seeds):
    """Check H: outputs and gradients to 1e-11."""
    engine = engines.get(name)
    for seed in seeds:
        problem = network(200 + seed, options, batch=3, hidden=8, horizon=5.0)
        running = loss_for(engine, problem)
        events, gradients = run(engine, problem, running)
        exact = engines.get("reference").forward(problem, running)
        assert torch.equal(events.units, exact.units)
        assert torch.equal(events.offsets, exact.offsets)
        for output in ("times", "c_read", "o_read", "a_last", "integral"):
            value, expected = getattr(events, output), getattr(exact, output)
            if value is not None:
                assert reached("H", name, (value - expected).abs().max()) < 1e-11, output
        assert torch.equal(events.counters.events, exact.counters.events)
        torch.testing.assert_close(events.counters.min_slope, exact.counters.min_slope, rtol=0, atol=1e-11)
        weights = cotangents(events)
        reference = engines.get("reference").backward(problem, exact, weights, running)
        errors = worst_gradient(gradients, reference)
        assert reached("H'", name, max(errors.values())) < 1e-11, (seed, errors)
        assert torch.equal(gradients.floored, reference.floored)


def above(seed: int) -> Problem:
    """In each sample, one unit starts above its threshold and emits at once, and one starts above it and decays."""
    problem = network(seed, dataclasses.replace(EXACT, above_threshold="fire"), hidden=4, horizon=5.0)
    a0, c0 = problem.a0.clone(), problem.c0.clone()
    c0[:, 1], a0[:, 2, 1] = problem.theta[1] + 0.2, 2.0
    c0[:, 2], a0[:, 2, 2] = problem.theta[2] + 0.1, -2.0
    return dataclasses.replace(problem, a0=a0, c0=c0)


def test_forced_event_has_a_fixed_time_and_an_exact_gradient(engine):
    """Checks C and I."""
    problem = above(4)
    running = loss_for(engine, problem)
    events = engine.forward(problem, running)
    for s in range(2):
        first = int(events.offsets[s])
        assert float(events.times[first]) == 0
        assert int(events.units[first]) == 1
        assert not (events.times[first + 1 : int(events.offsets[s + 1])] == 0).any()
    weights = cotangents(events)
    gradients = engine.backward(problem, events, weights, running)
    errors = worst_gradient(gradients, autograd(problem, events, weights, running))
    assert reached("C", engine.name, max(errors.values())) < 1e-10, errors
    assert (gradients.c0[:, 1] == 0).all()
    for name, index in (("theta", 1), ("theta", 2), ("V", 1)):
        difference = five_point(engine, problem, weights, running, name, index)
        gradient = getattr(gradients, name)
        miss = abs(difference - gradient.reshape(-1)[index]) / max(1.0, float(gradient.abs().max()))
        assert reached("I", engine.name, miss) < 1e-6


def test_two_halves_match_one_run(engine):
    """Check K: the second half starts from the final state of the first."""
    problem = network(5)
    middle = 6.5
    first = dataclasses.replace(problem, horizon=middle, readout_times=torch.tensor([middle]))
    early = problem.input_times <= middle
    first = select_inputs(first, early)
    whole, one = engine.forward(problem), engine.forward(first)
    second = select_inputs(
        dataclasses.replace(
            problem,
            a0=one.a_last,
            c0=one.c_read[:, -1],
            input_times=problem.input_times - middle,
            horizon=problem.horizon - middle,
            readout_times=torch.tensor([problem.horizon - middle]),
        ),
        ~early,
    )
    two = engine.forward(second)
    for s in range(2):
        a, b = slice(*one.offsets[s : s + 2].tolist()), slice(*two.offsets[s : s + 2].tolist())
        c = slice(*whole.offsets[s : s + 2].tolist())
        assert whole.units[c].tolist() == [*one.units[a].tolist(), *two.units[b].tolist()]
        joined = torch.cat([one.times[a], two.times[b] + middle])
        assert reached("K", engine.name, (whole.times[c] - joined).abs().max()) < 1e-12
    assert reached("K", engine.name, (whole.c_read[:, -1] - two.c_read[:, -1]).abs().max()) < 1e-12


def select_inputs(problem: Problem, keep: torch.Tensor) -> Problem:
    """Keep only some of the input events."""
    sizes = [int(keep[a:b].sum()) for a, b in zip(problem.input_offsets[:-1], problem.input_offsets[1:], strict=True)]
    return dataclasses.replace(
        problem,
        input_times=problem.input_times[keep],
        input_channels=problem.input_channels[keep],
        input_values=problem.input_values[keep],
        input_offsets=torch.tensor([0, *sizes]).cumsum(0),
    )


def test_permuting_units_permutes_outputs_and_gradients(engine):
    """Check K."""
    problem = network(6)
    order = torch.tensor([3, 0, 4, 1, 2])
    moved = dataclasses.replace(
        problem,
        V=problem.V[:, order][:, :, order],
        U=problem.U[:, order],
        b=problem.b[:, order],
        theta=problem.theta[order],
        a0=problem.a0[:, :, order],
        c0=problem.c0[:, order],
    )
    plain, other = engine.forward(problem), engine.forward(moved)
    assert torch.equal(order[other.units], plain.units)
    assert (plain.times - other.times).abs().max() < 1e-12
    assert (plain.c_read[:, :, order] - other.c_read).abs().max() < 1e-12
    weights = cotangents(plain, integral=False)
    permuted = dataclasses.replace(
        weights,
        c_read=weights.c_read[:, :, order],
        o_read=weights.o_read[:, :, order],
        a_last=None if weights.a_last is None else weights.a_last[:, :, order],
    )
    g, h = engine.backward(problem, plain, weights), engine.backward(moved, other, permuted)
    back = g._replace(
        V=g.V[:, order][:, :, order],
        U=g.U[:, order],
        b=g.b[:, order],
        theta=g.theta[order],
        a0=g.a0[:, :, order],
        c0=g.c0[:, order],
    )
    assert reached("K", engine.name, max(worst_gradient(back, h).values())) < 1e-12


def test_unused_readouts_and_zero_inputs_have_no_effect(engine):
    """Check K: readouts without a loss and input events of value 0 change neither events nor gradients."""
    problem = network(7)
    events = engine.forward(problem)
    weights = cotangents(events)
    plain = engine.backward(problem, events, weights)

    extra = torch.linspace(0.1, 11.9, 7)
    times, order = torch.cat([problem.readout_times, extra]).sort()
    extended = dataclasses.replace(problem, readout_times=times)
    read = engine.forward(extended)
    assert torch.equal(read.units, events.units)
    old = (order < 3).nonzero()[:, 0]
    c_read, o_read = torch.zeros_like(read.c_read), torch.zeros_like(read.o_read)
    c_read[:, old], o_read[:, old] = weights.c_read, weights.o_read
    gradients = engine.backward(extended, read, dataclasses.replace(weights, c_read=c_read, o_read=o_read))
    assert reached("K", engine.name, max(worst_gradient(plain, gradients).values())) < 1e-12

    n = len(problem.input_times) // 2
    times = torch.cat([problem.input_times.reshape(2, n), torch.tensor([[3.3], [8.8]])], 1)
    values = torch.cat([problem.input_values.reshape(2, n), torch.zeros(2, 1)], 1)
    channels = torch.cat([problem.input_channels.reshape(2, n), torch.tensor([[1], [2]])], 1)
    order = times.argsort(1)
    with_zeros = dataclasses.replace(
        problem,
        input_times=times.gather(1, order).flatten(),
        input_values=values.gather(1, order).flatten(),
        input_channels=channels.gather(1, order).flatten(),
        input_offsets=torch.arange(3) * (n + 1),
    )
    fed = engine.forward(with_zeros)
    assert torch.equal(fed.units, events.units)
    gradients = engine.backward(with_zeros, fed, weights)
    real = order.flatten() < n
    assert gradients.input_times[~real].abs().max() < 1e-12
    gradients = gradients._replace(input_times=gradients.input_times[real], input_values=gradients.input_values[real])
    assert reached("K", engine.name, max(worst_gradient(plain, gradients).values())) < 1e-12


def test_order_of_simultaneous_inputs_does_not_matter(engine):
    problem = network(8, batch=1)
    times = problem.input_times.clone()
    times[3:6] = times[3]
    problem = dataclasses.replace(problem, input_times=times)
    order = torch.tensor([0, 1, 2, 5, 3, 4, 6, 7, 8])
    other = dataclasses.replace(
        problem, input_channels=problem.input_channels[order], input_values=problem.input_values[order]
    )
    events, moved = engine.forward(problem), engine.forward(other)
    assert torch.equal(events.units, moved.units)
    assert (events.times - moved.times).abs().max() < 1e-12
    weights = cotangents(events)
    g, h = engine.backward(problem, events, weights), engine.backward(other, moved, weights)
    assert abs(g.input_times[3:6].sum() - h.input_times[3:6].sum()) < 1e-11
    h = h._replace(input_times=g.input_times, input_values=h.input_values[order.argsort()])
    assert max(worst_gradient(g, h).values()) < 1e-11


def test_run_without_events(engine):
    problem = dataclasses.replace(network(9), theta=torch.full((5,), 1.5))
    events, gradients = run(engine, problem)
    assert len(events.times) == 0
    assert events.counters.events.tolist() == [0, 0]
    assert torch.isinf(events.counters.min_slope).all()
    assert (gradients.V == 0).all()
    assert (gradients.theta == 0).all()
    assert gradients.c0.abs().min() > 0


def test_run_without_inputs_and_readouts_works(engine):
    problem = select_inputs(network(9), torch.zeros(18, dtype=torch.bool))
    problem = dataclasses.replace(problem, readout_times=torch.zeros(0))
    events, gradients = run(engine, problem)
    assert events.c_read.shape == (2, 0, 5)
    assert gradients.U.abs().max() == 0
    assert len(events.times) > 0


def test_event_count_is_bounded_and_max_events_is_exact(engine):
    problem = network(10)
    events = engine.forward(problem)
    most = int(events.counters.events.max())
    cap = event_bound(problem.theta, float(problem.tau_m), float(problem.horizon))
    assert most <= float(cap)
    assert events.counters.root_solves.min() > 0
    assert events.counters.flow_evaluations.min() > 0
    fits = dataclasses.replace(problem, options=dataclasses.replace(EXACT, max_events=most))
    assert torch.equal(engine.forward(fits).times, events.times)
    short = dataclasses.replace(problem, options=dataclasses.replace(EXACT, max_events=most - 1))
    with pytest.raises(RuntimeError, match=rf"emitted more than {most - 1} events \(max_events={most - 1}\)"):
        engine.forward(short)


def test_event_bound_is_one_event_plus_one_per_refractory_time():
    pause_of_two = torch.tensor([1 - 2.718281828459045**-1, 1.0, 1.5])  # units with theta >= 1 never emit
    assert abs(float(event_bound(pause_of_two, 2.0, 10.0)) - 6) < 1e-12


def test_grazing_events_are_floored_and_counted(engine):
    problem = network(1)
    exact_events, exact = run(engine, problem)
    floor = float(exact_events.counters.min_slope.min()) * 1.0001
    floored = dataclasses.replace(problem, options=dataclasses.replace(EXACT, grazing_floor=floor))
    events, gradients = run(engine, floored)
    assert int(gradients.floored.sum()) == 1
    assert int(gradients.floored.argmax()) == int(exact_events.counters.min_slope.argmin())
    assert torch.equal(events.times, exact_events.times)
    assert 1e-9 < max(worst_gradient(gradients, exact).values()) < 1e-2
