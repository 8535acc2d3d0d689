"""The CUDA kernels against the float64 reference, on the device. How they are called is in test_cuda_calls.py."""

import dataclasses
from typing import Any

import pytest
import torch

from egru.kernels.cuda import pack, persistent, prepare, small_batch
from egru.kernels.cuda.plan import Direction
from egru.kernels.registry import get
from egru.types import RESETS
from tests.kernels.cuda_problems import GATES, check, make_problem, single_precision

__all__ = ["single_precision"]  # for every test here

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_every_reset(reset: str, reset_gate: str, precision: str) -> None:
    check(make_problem(9, 20, 12, 40, reset=reset, reset_gate=reset_gate, precision=precision))


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize(
    ("T", "B", "inputs", "H"),
    [(1, 1, 1, 1), (2, 3, 1, 7), (5, 1, 3, 130), (4, 65, 5, 33), (3, 300, 1, 200), (6, 130, 24, 590), (7, 64, 9, 1350),
     (4, 16, 2, 2048), (5, 256, 40, 1024), (2, 3000, 4, 96)],
)  # fmt: skip
def test_shapes(T: int, B: int, inputs: int, H: int, reset_gate: str) -> None:
    check(make_problem(T, B, inputs, H, reset_gate=reset_gate))


@pytest.mark.parametrize("precision", ["bfloat16", "float16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_zoneout_and_lengths(reset: str, reset_gate: str, precision: str) -> None:
    check(make_problem(8, 21, 6, 51, reset=reset, reset_gate=reset_gate, precision=precision, keep=True, ragged=True))


@pytest.mark.parametrize("B", [3, 21])
@pytest.mark.parametrize("precision", ["bfloat16", "float16", ""])
@pytest.mark.parametrize("reset", RESETS)
def test_candidates_from_states(reset: str, precision: str, B: int) -> None:
    """Low precision saves no z: neither update gates near 0 nor zoneout that mixes may spoil it."""
    for shift in (0.0, 4.0, 9.0):
        problem = make_problem(8, B, 6, 51, reset=reset, precision=precision)
        assert problem.bias_ih is not None
        problem.bias_ih[51:102] += shift
        check(problem)
        check(dataclasses.replace(problem, keep=torch.tensor(0.3, device="cuda")))


def test_large_layers_and_chips_without_persistent_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused steps in low precision, which save as the others do."""
    monkeypatch.setattr(persistent, "find_plan", lambda *_: None)
    monkeypatch.setattr(small_batch, "find_plan", lambda *_: None)
    for reset_gate in GATES:
        check(make_problem(8, 21, 6, 51, reset_gate=reset_gate, keep=True, ragged=True))


def test_no_bias_and_bounded_surrogate() -> None:
    check(make_problem(8, 21, 6, 50, bias=False, bounded=True))


def test_large_layers_run_step_by_step() -> None:
    check(make_problem(3, 8, 6, 3000))


def test_missing_gradients_count_as_zero() -> None:
    kernel, problem = get("cuda"), make_problem(5, 20, 6, 50)
    out = kernel.forward(problem, True)
    grad = torch.randn_like(out.y)
    zeros, last = torch.zeros_like(out.y), torch.zeros_like(out.c_last)
    got = kernel.backward(problem, out.y, out.c, out.reserve, grad, None, None, None, True)
    want = kernel.backward(problem, out.y, out.c, out.reserve, grad, zeros, last, last, True)
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_long_sequences_repeat_exactly() -> None:
    kernel, problem = get("cuda"), make_problem(300, 130, 1, 590)
    first = kernel.forward(problem, True)
    grad = torch.randn_like(first.y) * 1e-3
    grads = kernel.backward(problem, first.y, first.c, first.reserve, grad, None, None, None, False)
    for _ in range(5):
        again = kernel.forward(problem, True)
        assert torch.equal(first.c, again.c)
        repeated = kernel.backward(problem, again.y, again.c, again.reserve, grad, None, None, None, False)
        assert torch.equal(grads.bias_ih, repeated.bias_ih)
        assert torch.equal(grads.c0, repeated.c0)


@pytest.mark.parametrize("B", [3, 37])
@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
def test_every_output_is_written(reset_gate: str, precision: str, B: int) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is full of NaN; the fixture undoes it
    assert torch.empty(4, device="cuda").isnan().all()
    check(make_problem(6, B, 5, 61, reset_gate=reset_gate, precision=precision, ragged=True))


@pytest.mark.parametrize("precision", ["bfloat16", "float16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("B", range(1, small_batch.MAX_BATCH + 1))
def test_few_rows(B: int, reset_gate: str, precision: str) -> None:
    for H, inputs in ((9, 3), (75, 1), (300, 6)):
        problem = make_problem(7, B, inputs, H, reset_gate=reset_gate, precision=precision, keep=H == 75, ragged=H > 75)
        assert small_batch.find_plan(problem.input, H, reset_gate, precision) is not None
        check(problem)


@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
def test_few_rows_of_a_large_layer(reset_gate: str, precision: str) -> None:
    for H, B in ((1350, 1), (1350, 2), (1024, 8), (2048, 1)):
        check(make_problem(6, B, 5, H, reset_gate=reset_gate, precision=precision))


def test_few_rows_agree_with_many() -> None:
    """The first rows of a batch, alone and among others: the same events but where rounding decides."""
    problem = make_problem(200, 64, 7, 300)
    rows = dataclasses.replace(problem, input=problem.input[:, :2], c0=problem.c0[:2], y0=problem.y0[:2])
    together, alone = get("cuda").forward(problem, False), get("cuda").forward(rows, False)
    assert (together.c[:20, :2] - alone.c[:20]).abs().median() < 1e-5
    assert torch.equal(alone.c, get("cuda").forward(rows, True).c)


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize(("H", "B"), [(1, 1), (37, 5), (590, 500), (1350, 64), (96, 3000)])
def test_packed_weights_equal_the_plain_version(H: int, B: int, reset_gate: str) -> None:
    plan = persistent.find_plan(make_problem(1, B, 1, H).input, H, reset_gate, "bfloat16")
    assert plan is not None
    weight = torch.randn(3 * H, H, device="cuda")
    reference: dict[Direction, Any] = {"forward": pack.pack_forward, "backward": pack.pack_backward}
    for direction, plain in reference.items():
        preparer = prepare.Preparer(torch.bfloat16, 0, H, 1, 16, 0, plan, reset_gate, direction)
        size = prepare.packed_bytes(plan, reset_gate, direction)
        packed = preparer(weight, None, None).buffer[: size // 2]
        assert torch.equal(packed, plain(weight, plan, reset_gate, torch.bfloat16).flatten()), direction
