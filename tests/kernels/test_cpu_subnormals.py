"""Subnormal gradients on the CPU: processors of Intel compute with them a hundred times as slowly."""

import platform

import pytest
import torch
from torch import Tensor

import egru
from egru import EventState, compiled

pytestmark = [
    pytest.mark.skipif(compiled.core is None, reason="the compiled core is not built"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 flushes subnormal numbers"),
]

STEPS = 140
"""The gradient of a state that halves at every step is then 0.5**140 = 7e-43, which is subnormal in float32."""


def gradient_of_start(layer: egru.EGRU | egru.ELSTM, dtype: torch.dtype, batch: int) -> Tensor:
    """Return the gradient of the initial state of units that forget half of it per step and never send an event."""
    layer = layer.to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.get_parameter("threshold_l0").fill_(100.0)
    zeros = torch.zeros(1, batch, 40, dtype=dtype)
    start = EventState(zeros.clone().requires_grad_(), zeros)
    _, state = layer(torch.randn(STEPS, batch, 3, dtype=dtype), start)
    state.c.sum().backward()
    gradient = start.c.grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("layer_type", [egru.EGRU, egru.ELSTM])
def test_subnormal_gradients_are_flushed_to_zero(layer_type: type[egru.EGRU] | type[egru.ELSTM], batch: int) -> None:
    layer = layer_type(3, 40, threshold=egru.Threshold("identity"), backend="cpu")
    exact = gradient_of_start(layer, torch.float64, batch)
    torch.testing.assert_close(exact, torch.full_like(exact, 0.5**STEPS), rtol=1e-10, atol=0)
    assert (gradient_of_start(layer, torch.float32, batch) == 0).all()
    tiny = torch.tensor(1e-38) / 16
    assert tiny > 0, "the caller's arithmetic is as before"
