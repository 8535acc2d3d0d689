"""Products of the CPU kernel that skip zero blocks of pruned weights. See also "zero-blocks" in ``parity_cases.py``."""

import dataclasses
from typing import Any

import pytest
import torch

import egru
from egru import compiled
from egru.kernels import get
from egru.kernels.cpu import kernel as cpu
from tests.kernels.parity_cases import FORMS, Case, error, run
from tests.kernels.test_parity import LEVELS, Implementation, assert_parity, float32_bounds, margin_problem

pytestmark = pytest.mark.skipif(not LEVELS, reason=f"requires the compiled core: {compiled.missing}")


def skipping(level: str, threads: int = 2) -> Implementation:
    return Implementation("cpu", level=level, threads=threads, skip=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_float32_error_is_that_of_plain_torch(level: str, form: str) -> None:
    case = Case(**FORMS[form], H=70, B=17, I=40, density=0.3, zero_blocks=0.7)
    problem, expected = margin_problem(case)
    with skipping(level).active() as kernel:
        result = run(kernel, skipping(level).convert(problem, torch.float32))
    assert_parity(result, expected, float32_bounds(problem, expected))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_threads(level: str, form: str) -> None:
    """Also with the limits of the library, at which each step chooses what it skips."""
    problem = Case(**FORMS[form], H=100, B=19, T=30, I=40, density=0.4, zero_blocks=0.8).problem(dtype=torch.float32)
    for zero_blocks in (0.0, 0.65):
        results = []
        for threads in (1, 2, 3):
            with skipping(level, threads).active() as kernel:
                cpu.limits = dataclasses.replace(cpu.limits, zero_blocks=zero_blocks)
                results.append(run(kernel, problem))
        for other in results[1:]:
            assert all(torch.equal(x, other[name]) for name, x in results[0].items())


# The last three: several groups of rows, whole blocks of 32 units, and several groups of panels.
@pytest.mark.parametrize(
    "sizes", [{"B": 1, "T": 60}, {"B": 33, "H": 129, "I": 3}, {"B": 64, "T": 2, "H": 64}, {"B": 17, "T": 4, "H": 225}]
)
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_weights_without_zeros_and_without_anything_else(form: str, share: float, sizes: dict[str, Any]) -> None:
    options: dict[str, Any] = {"T": 3, "I": 40, "H": 40} | FORMS[form] | sizes
    problem = Case(**options).problem()
    if share:
        zeros = {name: torch.zeros_like(getattr(problem, name)) for name in ("weight_ih", "weight_hh")}
        problem = dataclasses.replace(problem, **zeros)
    expected = run(get("reference"), problem)
    for level in LEVELS:
        with skipping(level).active() as kernel:
            errors = error(run(kernel, problem), expected)
        assert max(errors.values()) < 1e-12


class Recorder:
    """The compiled core. Records whether each call skipped blocks of the recurrent and the input weights."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, bool]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(compiled.core, name)
        if name not in ("train_forward", "train_backward"):
            return function

        def record(call: Any) -> Any:
            result = function(call)
            self.calls.append((call.skip_hh, call.skip_ih))
            return result

        return record


def skipped(monkeypatch: pytest.MonkeyPatch, problem: Any) -> list[tuple[bool, bool]]:
    recorder = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "_core", recorder)
        run(get("cpu"), problem)
    return recorder.calls


SIZES: dict[str, Any] = {"H": 128, "I": 96, "B": 16, "T": 10}


def test_blocks_are_skipped_only_if_enough_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert skipped(monkeypatch, Case(**SIZES).problem()) == [(False, False)] * 2
    assert skipped(monkeypatch, Case(**SIZES, zero_blocks=0.4).problem()) == [(False, False)] * 2
    assert skipped(monkeypatch, Case(**SIZES, zero_blocks=0.85).problem()) == [(True, True)] * 2
    # The forward pass over the input requires more zeros.
    assert skipped(monkeypatch, Case(**SIZES, zero_blocks=0.7).problem()) == [(True, False), (True, True)]


def test_unstructured_zeros_and_few_rows_are_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Case(**SIZES).problem()
    torch.manual_seed(0)
    zeros = {name: getattr(problem, name) * (torch.rand(3 * 128, 1) < 0.1) for name in ("weight_ih", "weight_hh")}
    scattered = {name: weight * (torch.rand(weight.shape) < 0.1) for name, weight in zeros.items()}
    assert skipped(monkeypatch, dataclasses.replace(problem, **scattered))[0][0]  # nearly everything is zero
    halves = {name: getattr(problem, name) * (torch.rand(getattr(problem, name).shape) < 0.2) for name in zeros}
    assert skipped(monkeypatch, dataclasses.replace(problem, **halves)) == [(False, False)] * 2
    few = Case(**{**SIZES, "B": 1}, zero_blocks=0.9).problem()
    assert skipped(monkeypatch, few) == [(False, False)] * 2


def test_negative_zeros_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask multiplies negative weights to -0."""
    problem = Case(**SIZES, zero_blocks=0.9).problem()
    negative = dataclasses.replace(
        problem, weight_hh=torch.where(problem.weight_hh == 0, -0.0, problem.weight_hh), weight_ih=problem.weight_ih
    )
    assert skipped(monkeypatch, negative) == [(True, True)] * 2


def test_pruned_layer_trains_with_skipped_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked weights keep gradients of zero, and the others get those of a layer that skips nothing."""
    torch.manual_seed(0)
    layer = egru.EGRU(48, 64)
    egru.compress.prune_weights(layer, 0.9, block=16, scope="layer")
    x = torch.randn(10, 16, 48, requires_grad=True)
    results = []
    for zero_blocks in (2.0, 0.65):
        recorder = Recorder()
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "limits", dataclasses.replace(cpu.limits, zero_blocks=zero_blocks))
            patch.setattr("egru.kernels.cpu.quick._core", recorder)
            layer.zero_grad()
            layer(x)[0].square().sum().backward()
        assert recorder.calls == [(zero_blocks < 1, zero_blocks < 1)] * 2
        results.append([parameter.grad for parameter in layer.parameters()])
    for dense, sparse in zip(*results, strict=True):
        assert dense is not None
        torch.testing.assert_close(sparse, dense)
