"""Simultaneous events: groups of internal events, and internal events at the time of inputs and readouts."""

import dataclasses

import pytest
import torch

from egru.continuous import engines
from egru.continuous.problem import Problem
from tests.continuous.networks import EXACT, cotangents, loss, network, worst_gradient
from tests.continuous.test_engines import ENGINES, OPTION_SETS


@pytest.fixture(params=ENGINES)
def engine(request):
    return engines.get(request.param)


@pytest.fixture(params=OPTION_SETS)
def twins(request) -> Problem:
    """Units 1 and 3 are identical up to their first event, but have different outgoing weights."""
    problem = network(
        21, dataclasses.replace(EXACT, **OPTION_SETS[request.param]), batch=1, hidden=5, horizon=3.0, inputs=4
    )
    tensors = {name: getattr(problem, name).clone() for name in ("V", "U", "b", "theta", "a0", "c0")}
    for name, axis in (("V", 1), ("U", 1), ("b", 1), ("theta", 0), ("a0", 2), ("c0", 1)):
        tensors[name].select(axis, 3).copy_(tensors[name].select(axis, 1))
    tensors["V"][1, 3, 1], tensors["V"][1, 1, 3] = 4.0, -3.0  # each event changes the reset gate of the other unit
    tensors["V"][2, 3, 1] = -9.0  # if applied earlier, the first event would prevent the second
    tensors["b"][2] = 1.0
    tensors["c0"][:, [1, 3]], tensors["a0"][:, 2, [1, 3]] = 0.05, 1.5
    return dataclasses.replace(problem, **tensors)


def reordered(problem: Problem, order: torch.Tensor) -> Problem:
    return dataclasses.replace(
        problem,
        V=problem.V[:, order][:, :, order],
        U=problem.U[:, order],
        b=problem.b[:, order],
        theta=problem.theta[order],
        a0=problem.a0[:, :, order],
        c0=problem.c0[:, order],
    )


def group_of(events) -> list[int]:
    """Return the positions of events with equal times."""
    times = events.times.tolist()
    return [k for k in range(len(times)) if times.count(times[k]) > 1]


def test_simultaneous_events_are_ordered_by_unit(engine, twins):
    events = engine.forward(twins)
    group = group_of(events)
    assert len(group) == 2
    assert events.units[group].tolist() == [1, 3]
    assert len(events.times) > 3


def test_order_within_a_group_does_not_matter(engine, twins):
    order = torch.tensor([4, 3, 2, 1, 0])
    plain, other = engine.forward(twins), engine.forward(reordered(twins, order))
    assert sorted(order[other.units].tolist()) == sorted(plain.units.tolist())
    assert (plain.times - other.times).abs().max() < 1e-12
    assert (plain.c_read[:, :, order] - other.c_read).abs().max() < 1e-12
    assert (plain.a_last[:, :, order] - other.a_last).abs().max() < 1e-12


@pytest.mark.parametrize("name", [n if n == "reference" else pytest.param(n, marks=pytest.mark.slow) for n in ENGINES])
def test_gradient_of_perturbations_that_keep_a_group_together(name, twins):
    """Outgoing weights of the twins, and perturbations that move both alike, against five-point differences."""
    engine = engines.get(name)
    events = engine.forward(twins)
    weights = cotangents(events)
    gradients = engine.backward(twins, events, weights)
    H = 5

    def along(**directions: torch.Tensor) -> tuple[float, float]:
        h, values = 2e-5, []
        for k in (-2, -1, 1, 2):
            moved = dataclasses.replace(
                twins, **{name: getattr(twins, name) + k * h * d for name, d in directions.items()}
            )
            result = engine.forward(moved)
            assert torch.equal(result.units, events.units)
            assert group_of(result) == group_of(events)
            values.append(loss(moved, result, weights))
        difference = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
        return difference, sum(float((getattr(gradients, name) * d).sum()) for name, d in directions.items())

    both = torch.zeros(H)
    both[[1, 3]] = 1
    directions: list[dict[str, torch.Tensor]] = [{"c0": both[None]}, {"theta": both}]
    directions += [{"a0": both * torch.eye(3)[gate][None, :, None]} for gate in range(3)]
    directions += [{"b": both * torch.eye(3)[gate][:, None]} for gate in range(3)]
    for gate in range(3):
        for m, n in ((3, 1), (1, 3), (0, 3)):
            one = torch.zeros_like(twins.V)
            one[gate, m, n] = 1
            directions.append({"V": one})
    for direction in directions:
        difference, gradient = along(**direction)
        assert abs(difference - gradient) < 1e-6 * max(1.0, abs(gradient)), direction


def test_groups_match_the_reference(engine, twins):
    reference = engines.get("reference")
    events, exact = engine.forward(twins), reference.forward(twins)
    assert torch.equal(events.units, exact.units)
    assert (events.times - exact.times).abs().max() < 1e-11
    weights = cotangents(events)
    errors = worst_gradient(engine.backward(twins, events, weights), reference.backward(twins, exact, weights))
    assert max(errors.values()) < 1e-11, errors


def test_identical_units_stay_identical(engine):
    """With four copies of one unit, every event belongs to a group of four."""
    problem = network(22, batch=1, hidden=4, horizon=20.0)
    same = {
        name: getattr(problem, name).select(axis, 0).unsqueeze(axis).expand_as(getattr(problem, name)).contiguous()
        for name, axis in (("U", 1), ("theta", 0), ("a0", 2), ("c0", 1))
    }
    V = torch.tensor([0.5, -0.5, 0.4])[:, None, None].expand(3, 4, 4).contiguous()
    b = torch.tensor([1.0, 0.0, 1.2])[:, None].expand(3, 4).contiguous()
    problem = dataclasses.replace(problem, **{**same, "V": V, "b": b})
    events = engine.forward(problem)
    assert len(events.times) >= 16
    assert events.units.tolist() == [0, 1, 2, 3] * (len(events.times) // 4)
    assert (events.times.reshape(-1, 4) == events.times[::4, None]).all()
    gradients = engine.backward(problem, events, dataclasses.replace(cotangents(events), c_read=torch.ones(1, 3, 4)))
    assert torch.isfinite(gradients.V).all()


def test_internal_event_precedes_a_simultaneous_readout(engine):
    problem = network(23, batch=1)
    events = engine.forward(problem)
    assert len(events.times) > 5
    for s, n in zip(events.times.tolist(), events.units.tolist(), strict=True):
        read = engine.forward(dataclasses.replace(problem, readout_times=torch.tensor([s])))
        assert abs(float(read.c_read[0, 0, n])) < 1e-12
        assert float(read.o_read[0, 0, n]) > float(problem.theta[n]) - 1e-12
        assert (read.times - events.times).abs().max() < 1e-12


def test_internal_event_precedes_a_simultaneous_input(engine):
    """An input that would prevent the event is applied after it."""
    problem = network(24, batch=1, inputs=1)
    problem = dataclasses.replace(problem, input_times=torch.tensor([11.9]), input_channels=torch.tensor([0]))
    events = engine.forward(problem)
    s, n = events.times[1], int(events.units[1])
    U = problem.U.clone()
    U[2, n, 0] = -50.0
    late = dataclasses.replace(problem, U=U, input_times=s[None], input_values=torch.ones(1))
    early = dataclasses.replace(late, input_times=s[None] - 1e-6)
    assert int(engine.forward(late).units[1]) == n
    assert n not in engine.forward(early).units[1:2].tolist()


def test_event_at_the_horizon_is_included(engine):
    problem = network(23, batch=1)
    events = engine.forward(problem)
    k = len(events.times) // 2
    s = float(events.times[k])
    cut = engine.forward(
        dataclasses.replace(
            problem,
            horizon=s,
            readout_times=torch.tensor([s]),
            input_offsets=torch.tensor([0, int((problem.input_times <= s).sum())]),
            input_times=problem.input_times[problem.input_times <= s],
            input_channels=problem.input_channels[problem.input_times <= s],
            input_values=problem.input_values[problem.input_times <= s],
        )
    )
    assert torch.equal(cut.units, events.units[: k + 1])
