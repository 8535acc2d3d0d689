"""Two-sided events on the CPU with states that are exactly 0, whose sign is 0."""

import copy

import pytest
import torch

import egru
from egru import compiled
from egru.types import RESETS

pytestmark = pytest.mark.skipif(compiled.core is None, reason="the compiled core is not built")


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("layer_type", [egru.EGRU, egru.ELSTM])
def test_gradients_at_states_of_zero_match_the_reference(
    layer_type: type[egru.EGRU] | type[egru.ELSTM], reset: egru.types.Reset, batch: int
) -> None:
    layer = layer_type(
        3, 20, bias=False, events="signed", reset=reset, threshold=egru.Threshold.constant(0.3),
        surrogate=egru.Surrogate(width=1.0), dtype=torch.float64,
    )  # fmt: skip
    layer.get_parameter("threshold_l0").requires_grad_(True)
    reference = copy.deepcopy(layer)
    layer.backend, reference.backend = "cpu", "reference"
    x = torch.randn(4, batch, 3, dtype=torch.float64)
    x[:2] = 0  # without biases, states are then exactly 0
    for module in (layer, reference):
        y, state = module(x)
        (y.square().sum() + state.c.sum()).backward()
    for (name, parameter), expected in zip(layer.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-10, atol=1e-12, msg=name)
