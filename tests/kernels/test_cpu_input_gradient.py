"""The gradient of the input in the CPU kernel: strips of 32 inputs, and dot products for few inputs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import egru
from egru import compiled
from egru.kernels.cpu import kernel as cpu

pytestmark = pytest.mark.skipif(compiled.core is None, reason="the compiled core is not built")
LEVELS = compiled.core.levels() if compiled.core is not None else []


def input_gradient(layer: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y, state = layer(x)
    (y.square().sum() + state.c.sum()).backward()
    assert x.grad is not None
    return x.grad


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack the weights at any size, and divide sequences into chunks."""
    limits = cpu.Limits(direct_forward=0, direct_backward=0, one_thread=0, per_thread=1, own_threads=0)
    monkeypatch.setattr(cpu, "limits", limits)
    monkeypatch.setattr(cpu, "BACKWARD_ROWS", 50)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inputs", [16, 17, 32, 70, 131, 200])
@pytest.mark.parametrize("cell", ["before", "after", "lstm"])
@pytest.mark.parametrize("lean", [False, True])
def test_equals_the_reference(level: str, inputs: int, cell: str, lean: bool) -> None:
    assert compiled.core is not None
    torch.manual_seed(0)
    layer = (
        egru.ELSTM(inputs, 75, dtype=torch.float64)
        if cell == "lstm"
        else egru.EGRU(inputs, 75, reset_gate="before" if cell == "before" else "after", dtype=torch.float64)
    )
    exact = copy.deepcopy(layer)
    exact.backend, layer.lean = "reference", lean
    x = torch.randn(9, 14, inputs, dtype=torch.float64) / 4
    compiled.core.force_level(level)
    try:
        ours = input_gradient(layer, x)
    finally:
        compiled.core.force_level("auto")
    torch.testing.assert_close(ours, input_gradient(exact, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("threads", [2, 3])
def test_does_not_depend_on_the_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = egru.EGRU(150, 70), torch.randn(6, 11, 150)
    monkeypatch.setattr(cpu.Limits, "threads", lambda *_: 1)
    expected = input_gradient(layer, x)
    monkeypatch.setattr(cpu.Limits, "threads", lambda *_: threads)
    assert torch.equal(input_gradient(layer, x), expected)


def test_packed_sequences_have_no_gradient_after_their_end() -> None:
    layer = egru.EGRU(40, 33, dtype=torch.float64)
    x = torch.randn(7, 3, 40, dtype=torch.float64, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 4, 1]))
    layer(packed)[0].data.sum().backward()
    assert x.grad is not None
    assert x.grad[4:, 1].count_nonzero() == 0
    assert x.grad[:4, 1].count_nonzero() > 0
