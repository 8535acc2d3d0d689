"""Engines agree on random networks with extreme but valid parameters.

Time constants over four orders of magnitude, thresholds near 0 and near 1, weights that are zero or huge, identical
units, and input events at the same time, at the start and at the end. Networks are skipped if a change of the
parameters by a few rounding errors changes the sequence of events. For the others the tolerance allows for that change.
"""

import dataclasses
import random

import pytest
import torch

from egru.continuous import engines
from egru.continuous.checks import check_problem
from egru.continuous.limits import EventLimitError
from egru.continuous.options import Options
from egru.continuous.problem import DIFFERENTIABLE, Events, Gradients, Problem
from tests.continuous.networks import run

Result = tuple[Events, Gradients]


def random_network(seed: int) -> Problem:
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    H, D, B, K = draw.choice([1, 2, 3, 5]), draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([0, 1, 4])
    tau_s, tau_m, tau_o = (torch.tensor(10 ** draw.uniform(-2, 2), dtype=torch.float64) for _ in range(3))
    horizon = float(min(tau_s, tau_m)) * 10 ** draw.uniform(0, 1)
    sizes = [0.0, 1e-8, 1.0, 1.0, 5.0, 30.0, 1e3, 1e6]
    V = torch.stack([draw.choice(sizes) * normal(H, H) for _ in range(3)])
    U = torch.stack([draw.choice(sizes) * normal(H, D) for _ in range(3)])
    b = torch.stack([draw.choice([0.0, 1.0, 5.0, 50.0]) * normal(H) for _ in range(3)])
    b[2] += draw.choice([0.0, 1.0, 3.0])
    theta = draw.choice([0.1 + 0.5 * uniform(H), 10 ** (-6 + 5 * uniform(H)), 1 - 10 ** (-8 + 7 * uniform(H))])
    below = draw.choice([theta.expand(B, H), 1e-9 * uniform(B, H), uniform(B, H), 50 * uniform(B, H)])
    c0, a0 = theta - below, draw.choice([torch.zeros(B, 3, H, dtype=torch.float64), normal(B, 3, H)])
    above = draw.random() < 0.25
    if above:
        c0 = torch.where(uniform(B, H) < 0.4, theta + uniform(B, H), c0)
    if draw.random() < 0.3:  # identical units emit at the same times
        V, U = V[:, :1, :1].expand(3, H, H).clone(), U[:, :1].expand(3, H, D).clone()
        b, theta = b[:, :1].expand(3, H).clone(), theta[:1].expand(H).clone()
        a0, c0 = a0[:, :, :1].expand(B, 3, H).clone(), c0[:, :1].expand(B, H).clone()
    times = horizon * uniform(B, K)
    pattern = draw.choice(["random", "equal", "edges"])
    if pattern == "equal":
        times[:] = 0.3 * horizon
    elif pattern == "edges":
        times[:, ::2], times[:, 1::2] = 0.0, horizon
    readouts = horizon * uniform(2)
    if K:
        readouts[0] = times[0, 0]
    return Problem(
        V, U, b, theta, tau_s, tau_m, tau_o, a0, c0, times.sort(1).values.flatten(),
        torch.randint(D, (B * K,), generator=g), draw.choice([0.0, 1.0, 1e-6, 1e4]) * normal(B * K),
        torch.arange(B + 1) * K, torch.cat([readouts.sort().values, readouts.new_tensor([horizon])]), horizon,
        Options(
            self_connections=draw.random() < 0.5,
            reset_side=draw.choice(["pre", "post"]),
            amplitude=draw.choice(["theta", "one"]),
            above_threshold="fire" if above else "raise",
            max_events=100,
            nodes=12,
            panel=1.0,
        ),
        mask=draw.choice([None, uniform(H, H) < 0.5]),
        input_mask=draw.choice([None, uniform(H, D) < 0.5]),
    )  # fmt: skip


def nearby(problem: Problem, seed: int) -> Problem:
    """Return the problem with parameters changed by a few rounding errors, the same for all units."""
    factor = 1 + 1e-14 * (2 * torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1)
    changed = {name: getattr(problem, name) * factor[k] for k, name in enumerate(("V", "U", "b", "a0"))}
    c0 = torch.where(problem.c0 < problem.theta, problem.c0 - 1e-15 * problem.c0.abs(), problem.c0)
    return dataclasses.replace(problem, **changed, c0=c0)


def attempt(name: str, problem: Problem) -> Result | str:
    try:
        return run(engines.get(name), problem)
    except EventLimitError:
        return "too many events"


def difference(left: Result, right: Result) -> tuple[float, float]:
    """Return the largest differences of outputs and of gradients, relative to 1 or to the largest entry."""
    pairs = [(getattr(left[0], name), getattr(right[0], name)) for name in ("times", "c_read", "o_read", "a_last")]
    gradients = [(getattr(left[1], name), getattr(right[1], name)) for name in DIFFERENTIABLE]

    def worst(values: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return max(float((a - b).abs().max()) / max(1.0, float(a.abs().max())) for a, b in values if a.numel())

    return worst(pairs), worst(gradients)


def available() -> list[str]:
    problem = random_network(0)
    return [name for name in engines.names() if engines.get(name).unsupported(problem) is None]


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 12))])
def test_engines_agree_on_extreme_networks(part):
    first, *others = available()
    compared = events = 0
    for seed in range(20 * part, 20 * (part + 1)):
        problem = random_network(seed)
        check_problem("test", problem)
        expected, moved = attempt(first, problem), attempt(first, nearby(problem, seed))
        if isinstance(expected, str) or isinstance(moved, str) or not torch.equal(expected[0].units, moved[0].units):
            continue
        noise = difference(expected, moved)
        for name in others:
            if name == "reference" and seed % 3:  # it is slow
                continue
            result = attempt(name, problem)
            assert not isinstance(result, str), (seed, name)
            assert torch.equal(result[0].units, expected[0].units), (seed, name)
            outputs, gradients = difference(expected, result)
            assert outputs <= 1e-11 + 100 * noise[0], (seed, name, outputs, noise)
            assert gradients <= 1e-10 + 100 * noise[1], (seed, name, gradients, noise)
        compared += 1
        events += len(expected[0].times)
    assert compared >= 5
    assert events > 0
