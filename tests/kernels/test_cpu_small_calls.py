"""Short calls of the CPU kernel: states at rest, gradients that nothing reads, and the overhead of a call."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import egru
from egru import EventState, compiled
from egru.bench.train_cpu import problem_of
from egru.kernels import get

pytestmark = pytest.mark.skipif(compiled.core is None, reason="the compiled core is not built")

LAYERS = [egru.EGRU(7, 70, reset_gate="before"), egru.EGRU(7, 70, reset_gate="after"), egru.ELSTM(7, 70)]


def outputs_and_gradients(layer: egru.EGRU | egru.ELSTM, x: Tensor, hx: EventState | None) -> list[Tensor]:
    layer.zero_grad()
    y, state = layer(x, hx)
    (y.square().sum() + state.c.sum()).backward()
    return [y.detach(), *(half.detach() for half in state), *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("layer", LAYERS, ids=["before", "after", "lstm"])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (1, 60), (3, 2), (3, 30)])
def test_calls_from_rest_equal_the_reference(layer: egru.EGRU | egru.ELSTM, lean: bool, steps: int, batch: int) -> None:
    torch.manual_seed(steps + batch)
    fast, exact = copy.deepcopy(layer).double(), copy.deepcopy(layer).double()
    fast.backend, exact.backend, fast.lean = "cpu", "reference", lean
    x = torch.randn(steps, batch, 7, dtype=torch.float64)
    zeros = exact.zero_state(batch)
    for start in (None, zeros):  # one row for all sequences, and a state of its own for each
        for ours, expected in zip(
            outputs_and_gradients(fast, x, start), outputs_and_gradients(exact, x, zeros), strict=True
        ):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 60])
def test_unused_recurrent_weights_are_checked(batch: int) -> None:
    layer = egru.EGRU(3, 40)
    with torch.no_grad():
        layer.get_parameter("weight_hh_l0")[77, 11] = torch.nan
    with pytest.raises(ValueError, match="weight_hh contains nan"):
        layer(torch.randn(1, batch, 3))


@pytest.mark.parametrize("layer", LAYERS[:2], ids=["before", "after"])
def test_gradients_do_not_depend_on_whether_that_of_the_state_is_requested(layer: egru.EGRU) -> None:
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).double()
    x, grad = torch.randn(3, 4, 7, dtype=torch.float64), torch.ones(3, 4, 70, dtype=torch.float64)
    problem = problem_of(layer, x)
    problem.y0 = problem.c0 = torch.rand(4, 70, dtype=torch.float64)  # not at rest
    forward = get("cpu").forward(problem, True)
    results = [
        get("cpu").backward(problem, forward.y, forward.c, forward.reserve, grad, None, None, None, True, requested)
        for requested in (True, False)
    ]
    assert results[1].c0 is None
    assert results[1].y0 is None
    for with_state, without in zip(results[0], results[1], strict=True):
        assert without is None or (with_state is not None and torch.equal(with_state, without))


def calls(function: Any) -> int:
    """Return how many Python and C functions a call of ``function`` runs."""
    count = 0

    def record(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    function()
    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_call_overhead() -> None:
    """The time of a small call is that of the functions it runs: about 0.3 µs each."""
    layer, cell, x = egru.EGRU(32, 32), egru.EGRUCell(32, 32), torch.randn(1, 1, 32)
    with torch.no_grad():
        assert calls(lambda: layer(x)) <= 60
        assert calls(lambda: cell(x[0])) <= 55
    assert calls(lambda: layer(x)) <= 80


def test_parameters_are_checked_without_torch(monkeypatch):
    layer, x = egru.EGRU(3, 8, backend="reference"), torch.randn(1, 2, 3)
    monkeypatch.setattr(torch, "isfinite", lambda _: pytest.fail("torch.isfinite is slow on the CPU"))
    layer(x)
