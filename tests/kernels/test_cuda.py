"""Parity of the CUDA kernels with the float64 reference, on the device. test_cuda_calls.py tests the calls."""

import dataclasses
from typing import Any

import pytest
import torch

from egru.kernels.cuda import cluster, pack, persistent, prepare, small_batch
from egru.kernels.cuda.plan import Direction
from egru.kernels.registry import get
from egru.types import RESETS, Reset, ResetGate
from tests.kernels.cuda_problems import GATES, check, make_problem, single_precision

__all__ = ["single_precision"]  # a fixture for every test here

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_every_reset_matches_the_reference(reset: Reset, reset_gate: ResetGate, precision: str) -> None:
    check(make_problem(9, 20, 12, 40, reset=reset, reset_gate=reset_gate, precision=precision))


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize(
    ("T", "B", "inputs", "H"),
    [(1, 1, 1, 1), (2, 3, 1, 7), (5, 1, 3, 130), (4, 65, 5, 33), (3, 300, 1, 200), (6, 130, 24, 590), (7, 64, 9, 1350),
     (4, 16, 2, 2048), (5, 256, 40, 1024), (2, 3000, 4, 96)],
)  # fmt: skip
def test_every_shape_matches_the_reference(T: int, B: int, inputs: int, H: int, reset_gate: ResetGate) -> None:
    check(make_problem(T, B, inputs, H, reset_gate=reset_gate))


@pytest.mark.parametrize("precision", ["bfloat16", "float16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_zoneout_and_lengths_match_the_reference(reset: Reset, reset_gate: ResetGate, precision: str) -> None:
    check(make_problem(8, 21, 6, 51, reset=reset, reset_gate=reset_gate, precision=precision, keep=True, ragged=True))


@pytest.mark.parametrize("B", [3, 21])
@pytest.mark.parametrize("precision", ["bfloat16", "float16", ""])
@pytest.mark.parametrize("reset", RESETS)
def test_candidates_are_recovered_from_states(reset: Reset, precision: str, B: int) -> None:
    """Low precision saves no z. Update gates near 0 and fractional zoneout make its recovery difficult."""
    for shift in (0.0, 4.0, 9.0):
        problem = make_problem(8, B, 6, 51, reset=reset, precision=precision)
        assert problem.bias_ih is not None
        problem.bias_ih[51:102] += shift
        check(problem)
        check(dataclasses.replace(problem, keep=torch.tensor(0.3, device="cuda")))


def test_fused_steps_run_low_precision_without_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices other than Hopper, and for layers that are too large."""
    monkeypatch.setattr(persistent, "find_plan", lambda *_: None)
    monkeypatch.setattr(small_batch, "find_plan", lambda *_: None)
    for reset_gate in GATES:
        check(make_problem(8, 21, 6, 51, reset_gate=reset_gate, keep=True, ragged=True))


def test_no_bias_and_bounded_surrogate_match_the_reference() -> None:
    check(make_problem(8, 21, 6, 50, bias=False, bounded=True))


def test_large_layers_run_in_fused_steps() -> None:
    check(make_problem(3, 8, 6, 3000))


@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("inputs", [1, 6, 66])
def test_transposed_weights_match_the_reference(inputs: int, reset_gate: ResetGate, precision: str) -> None:
    problem = make_problem(5, 20, inputs, 51, reset_gate=reset_gate, precision=precision)
    weights = {name: getattr(problem, name).T.contiguous().T for name in ("weight_ih", "weight_hh")}
    check(dataclasses.replace(problem, **weights))


def test_missing_gradients_mean_zero() -> None:
    kernel, problem = get("cuda"), make_problem(5, 20, 6, 50)
    out = kernel.forward(problem, True)
    grad = torch.randn_like(out.y)
    zeros, last = torch.zeros_like(out.y), torch.zeros_like(out.c_last)
    without = kernel.backward(problem, out.y, out.c, out.reserve, grad, None, None, None, True)
    with_zeros = kernel.backward(problem, out.y, out.c, out.reserve, grad, zeros, last, last, True)
    for a, b in zip(without, with_zeros, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_long_sequences_are_bit_identical_when_repeated() -> None:
    kernel, problem = get("cuda"), make_problem(300, 130, 1, 590)
    first = kernel.forward(problem, True)
    grad = torch.randn_like(first.y) * 1e-3
    grads = kernel.backward(problem, first.y, first.c, first.reserve, grad, None, None, None, False)
    for _ in range(5):
        second = kernel.forward(problem, True)
        assert torch.equal(first.c, second.c)
        repeated = kernel.backward(problem, second.y, second.c, second.reserve, grad, None, None, None, False)
        assert torch.equal(grads.bias_ih, repeated.bias_ih)
        assert grads.c0 is not None
        assert repeated.c0 is not None
        assert torch.equal(grads.c0, repeated.c0)


@pytest.mark.parametrize("B", [3, 37])
@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
def test_every_output_is_written(reset_gate: ResetGate, precision: str, B: int) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN; reset by the fixture
    assert torch.empty(4, device="cuda").isnan().all()
    check(make_problem(6, B, 5, 61, reset_gate=reset_gate, precision=precision, ragged=True))


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize(
    ("T", "B", "inputs", "H"),
    [(1, 1, 1, 1), (5, 1, 3, 512), (3, 40, 64, 512), (4, 33, 9, 256), (2, 700, 1, 128), (6, 3, 65, 100), (9, 8, 64, 33),
     (40, 130, 5, 96)],
)  # fmt: skip
def test_small_float32_layers_match_the_reference(T: int, B: int, inputs: int, H: int, reset_gate: ResetGate) -> None:
    for full in (False, True):
        problem = make_problem(T, B, inputs, H, reset_gate=reset_gate, precision="", keep=full, ragged=full)
        for direction in ("forward", "backward"):
            assert cluster.find_plan(problem.input, H, reset_gate, "", direction) is not None
        check(problem)


@pytest.mark.parametrize("B", [5, 21])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_float32_without_clusters_matches_the_reference(
    reset: Reset, reset_gate: ResetGate, B: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices before Hopper, and for larger layers."""
    monkeypatch.setattr(cluster, "find_plan", lambda *_, **__: None)
    check(make_problem(8, B, 6, 51, reset=reset, reset_gate=reset_gate, precision="", keep=True, ragged=True))


@pytest.mark.parametrize("precision", ["bfloat16", "float16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("B", range(1, small_batch.MAX_BATCH + 1))
def test_small_batches_match_the_reference(B: int, reset_gate: ResetGate, precision: str) -> None:
    for H, inputs in ((9, 3), (75, 1), (300, 6)):
        problem = make_problem(7, B, inputs, H, reset_gate=reset_gate, precision=precision, keep=H == 75, ragged=H > 75)
        assert small_batch.find_plan(problem.input, H, reset_gate, precision) is not None
        check(problem)


@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
def test_small_batches_of_large_layers_match_the_reference(reset_gate: ResetGate, precision: str) -> None:
    for H, B in ((1350, 1), (1350, 2), (1024, 8), (2048, 1)):
        check(make_problem(6, B, 5, H, reset_gate=reset_gate, precision=precision))


def test_small_and_large_batches_agree() -> None:
    """The first rows of a batch, alone and within the batch, up to events that rounding decides."""
    problem = make_problem(200, 64, 7, 300)
    rows = dataclasses.replace(problem, input=problem.input[:, :2], c0=problem.c0[:2], y0=problem.y0[:2])
    together, alone = get("cuda").forward(problem, False), get("cuda").forward(rows, False)
    assert (together.c[:20, :2] - alone.c[:20]).abs().median() < 1e-5
    assert torch.equal(alone.c, get("cuda").forward(rows, True).c)


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize(("H", "B"), [(1, 1), (37, 5), (590, 500), (1350, 64), (96, 3000)])
def test_prepared_weights_equal_the_reference_packing(H: int, B: int, reset_gate: ResetGate) -> None:
    plan = persistent.find_plan(make_problem(1, B, 1, H).input, H, reset_gate, "bfloat16")
    assert plan is not None
    weight = torch.randn(3 * H, H, device="cuda")
    reference: dict[Direction, Any] = {"forward": pack.pack_forward, "backward": pack.pack_backward}
    for direction, plain in reference.items():
        preparer = prepare.Preparer(torch.bfloat16, 0, H, 1, 16, 0, plan, reset_gate, direction)
        size = prepare.packed_bytes(plan, reset_gate, direction)
        packed = preparer(weight, None, None).buffer[: size // 2]
        assert torch.equal(packed, plain(weight, plan, reset_gate, torch.bfloat16).flatten()), direction
