"""The correctness check that the GPU benchmark runs before timing, tested on the CPU."""

import dataclasses
from typing import Any

import pytest
import torch

import egru
from egru.bench import gpu_check
from egru.kernels import registry
from egru.types import ResetGate


def make_layer(reset_gate: ResetGate) -> egru.EGRU:
    surrogate = egru.Surrogate(width=0.5, height=0.3)
    return egru.EGRU(5, 30, reset_gate=reset_gate, surrogate=surrogate, backend="reference", dtype=torch.float32)


@pytest.mark.parametrize("reset_gate", ["after", "before"])
@pytest.mark.parametrize("precision", gpu_check.PRECISIONS)
def test_correct_layers_pass(precision: str, reset_gate: ResetGate) -> None:
    errors = gpu_check.check_layer(make_layer(reset_gate), torch.randn(6, 9, 5).float(), precision, gradients=True)
    assert set(errors) == {"state", "ties", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "theta"}


class BrokenKernel:
    """The reference kernel with one fault."""

    def __init__(self, fault: str) -> None:
        self.kernel: Any = registry.get("reference")
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def forward(self, problem: Any, save: bool) -> Any:
        out = self.kernel.forward(problem, save)
        if self.fault == "state":  # one state of one step
            out.c[2, 3, 4] += 1e-2
        if self.fault == "event":  # an event that is missing or superfluous
            out.y[1, 2, 3] = 0.5 if out.y[1, 2, 3] == 0 else 0.0
        return out

    def backward(self, problem: Any, *arguments: Any, **options: Any) -> Any:
        if self.fault == "gradient":
            problem = dataclasses.replace(problem, weight_hh=problem.weight_hh * 1.1)
        return self.kernel.backward(problem, *arguments, **options)


@pytest.mark.parametrize("fault", ["state", "event", "gradient"])
def test_wrong_layers_are_rejected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._KERNELS, "reference", BrokenKernel(fault))
    with pytest.raises(gpu_check.Wrong, match="gradient" if fault == "gradient" else "states off by"):
        gpu_check.check_layer(make_layer("after"), torch.randn(6, 9, 5).float(), "float32", gradients=True)
