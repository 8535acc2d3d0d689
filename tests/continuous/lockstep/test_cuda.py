"""The lock-step engine on a CUDA device against the float64 reference."""

import dataclasses
from typing import TypeVar

import pytest
import torch

from egru.continuous import engines
from egru.continuous.problem import DIFFERENTIABLE, Cotangents, Problem
from tests.continuous.networks import cotangents, density, network, worst_gradient

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture(autouse=True)
def _any_order(defaults) -> None:
    """Sums on the device need not be in one order."""
    torch.use_deterministic_algorithms(False)


Thing = TypeVar("Thing", Problem, Cotangents)


def moved(thing: Thing, device: str) -> Thing:
    tensors = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
    return dataclasses.replace(thing, **{k: v.to(device) for k, v in tensors.items() if isinstance(v, torch.Tensor)})


def test_device_gives_the_same_events_and_gradients():
    for seed in range(3):
        problem = network(300 + seed, batch=4, hidden=8, horizon=5.0)
        reference, lockstep = engines.get("reference"), engines.get("lockstep")
        exact, found = reference.forward(problem, density), lockstep.forward(moved(problem, "cuda"), density)
        assert torch.equal(found.units.cpu(), exact.units)
        assert (found.times.cpu() - exact.times).abs().max() < 1e-11
        weights = cotangents(exact)
        right = reference.backward(problem, exact, weights, density)
        left = lockstep.backward(moved(problem, "cuda"), found, moved(weights, "cuda"), density)
        left = left._replace(**{name: getattr(left, name).cpu() for name in DIFFERENTIABLE})
        assert max(worst_gradient(left, right).values()) < 1e-11
