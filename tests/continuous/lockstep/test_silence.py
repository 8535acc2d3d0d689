"""Long intervals without events: the lockstep engine does not step through them."""

import dataclasses

import pytest
import torch

from egru.continuous import engines
from egru.continuous.options import Options
from egru.continuous.problem import Problem
from tests.continuous.networks import network, run, worst_gradient

LOCKSTEP = engines.get("lockstep")


def sparse_in_time(tau_s: float, horizon: float, options: Options | None = None, seed: int = 3) -> Problem:
    """Return a problem whose activations relax far faster than its events follow one another."""
    problem = network(seed, options or Options(grazing_floor=0.0), batch=1, hidden=3, horizon=horizon, inputs=2)
    return dataclasses.replace(problem, tau_s=torch.tensor(tau_s), tau_m=torch.tensor(1.1), V=problem.V * 0.3)


def test_iterations_do_not_grow_with_silence():
    counts = {}
    for horizon in (8.0, 800.0):
        problem = sparse_in_time(1.1e-3, 8.0)
        problem = dataclasses.replace(problem, b=problem.b - 2.0, horizon=horizon)  # no events without input
        events = LOCKSTEP.forward(problem)
        counts[horizon] = len(events.tape.iterations)
    assert counts[800.0] == counts[8.0] < 500  # 14,000 and 1.4 million if every panel were stepped through


def test_fast_activations_need_few_iterations_per_event():
    problem = sparse_in_time(1.1e-3, 6.0)
    events = LOCKSTEP.forward(problem)
    steps = len(events.times) + len(problem.input_times) + problem.readout_times.numel()
    assert len(events.times) > 3
    assert len(events.tape.iterations) < 60 * steps


@pytest.mark.parametrize("tau_s", [1.1e-3, 2e-2])
@pytest.mark.parametrize("accuracy", [(6, 0.5), (12, 1.0)])
@pytest.mark.parametrize("reset_side", ["pre", "post"])
def test_rest_matches_the_compiled_engine(tau_s, accuracy, reset_side):
    pytest.importorskip("egru._core", reason="the reference engine is too slow for this comparison")
    options = Options(nodes=accuracy[0], panel=accuracy[1], grazing_floor=0.0, reset_side=reset_side)
    problem = sparse_in_time(tau_s, 8.0, options)
    (events, gradients), (exact, expected) = (run(engines.get(name), problem) for name in ("lockstep", "compiled"))
    assert len(events.times) > 1
    assert torch.equal(events.units, exact.units)
    assert (events.times - exact.times).abs().max() < 1e-11
    assert (events.c_read - exact.c_read).abs().max() < 1e-11
    assert max(worst_gradient(gradients, expected).values()) < 1e-10


def test_rest_with_equal_rates_has_finite_gradients():
    problem = sparse_in_time(0.02, 2.0)
    quiet = problem.b - torch.tensor([[0.0], [0.0], [2.0]])
    # exp(-k t) and exp(-t / tau_s) decay alike
    problem = dataclasses.replace(problem, tau_m=0.02 * torch.sigmoid(quiet[0, 0]), b=quiet)
    (events, gradients), (_, expected) = (run(engine, problem) for engine in (LOCKSTEP, engines.get("compiled")))
    assert any(iteration.rests.any() for iteration in events.tape.iterations)
    assert max(worst_gradient(gradients, expected).values()) < 1e-9
