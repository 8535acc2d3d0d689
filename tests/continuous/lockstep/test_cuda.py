"""The lockstep engine on a CUDA device, against the float64 reference."""

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
    """Allow sums in any order on the device."""
    torch.use_deterministic_algorithms(False)


Tensors = TypeVar("Tensors", Problem, Cotangents)


def moved(tensors: Tensors, device: str) -> Tensors:
    fields = {f.name: getattr(tensors, f.name) for f in dataclasses.fields(tensors)}
    return dataclasses.replace(tensors, **{k: v.to(device) for k, v in fields.items() if isinstance(v, torch.Tensor)})


def test_cuda_matches_the_reference():
    for seed in range(3):
        problem = network(300 + seed, batch=4, hidden=8, horizon=5.0)
        reference, lockstep = engines.get("reference"), engines.get("lockstep")
        exact, events = reference.forward(problem, density), lockstep.forward(moved(problem, "cuda"), density)
        assert torch.equal(events.units.cpu(), exact.units)
        assert (events.times.cpu() - exact.times).abs().max() < 1e-11
        weights = cotangents(exact)
        right = reference.backward(problem, exact, weights, density)
        left = lockstep.backward(moved(problem, "cuda"), events, moved(weights, "cuda"), density)
        left = left._replace(**{name: getattr(left, name).cpu() for name in DIFFERENTIABLE})
        assert max(worst_gradient(left, right).values()) < 1e-11
