"""Clipping of the gradients that flow from step to step."""

import pytest
import torch

import egru
from egru import functional
from egru.kernels import reference, registry
from tests.helpers import lively, weighted_sum, worst

X = torch.randn(9, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def layer(**options):
    options = {"surrogate": egru.Surrogate(0.8, 0.9), "recurrent_clip": 0.2, **options}
    return lively(egru.EGRU(4, 6, **options))


@pytest.mark.parametrize("lean", [False, True])
def test_gradients_equal_those_of_the_reference(lean):
    model = layer(lean=lean)
    weighted_sum([model(X)[0]]).backward()
    weights = [model.get_parameter(f"{n}_l0") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    theta, rest = model.thresholds()["l0"], egru.EventState(X.new_zeros(3, 6), X.new_zeros(3, 6))
    options = {"reset": "output", "surrogate": model.surrogate}
    gradients = [p.grad for p in weights]
    for clip, same in ((0.2, True), (0.0, False)):
        y = functional.egru_sequence(X, rest, *weights, theta, recurrent_clip=clip, **options).y  # pyright: ignore
        expected = torch.autograd.grad(weighted_sum([y]), weights, retain_graph=True)
        assert (worst(gradients, expected) < 1e-12) == same


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM, egru.ERNN])
def test_gradient_of_the_state_is_bounded(layer_class):
    states = []
    for clip in (None, 1e-3):
        torch.manual_seed(3)
        model = layer_class(4, 6, threshold=egru.Threshold.constant(-5.0), recurrent_clip=clip)
        state = egru.EventState(*(torch.randn(1, 3, 6).requires_grad_() for _ in range(2)))
        weighted_sum([model(X, state)[0]]).backward()
        states.append(torch.stack([half.grad for half in state if half.grad is not None]))
    unclipped, clipped = states
    assert unclipped.abs().max() > 1e-2
    assert clipped.abs().max() == 1e-3


def test_chunks_are_clipped_like_one_call():
    model = layer()
    y, _ = model(X)
    weighted_sum([y]).backward()
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    first, state = model(X[:4])
    second, _ = model(X[4:], state)
    weighted_sum([torch.cat([first, second])]).backward()
    assert worst([p.grad for p in model.parameters()], whole) < 1e-12


def test_compiled_kernels_reject_clipping_but_run_inference(monkeypatch):
    with pytest.raises(ValueError, match=r"backend='cpu' cannot run this: .*does not support recurrent_clip"):
        layer(backend="cpu")(X)
    monkeypatch.setattr(reference.ReferenceKernel, "forward", lambda *_: pytest.fail("the reference kernel was called"))
    if registry.get("cpu").describe().startswith("compiled"):
        with torch.no_grad():
            layer()(X)


@pytest.mark.parametrize("clip", [0, -1.0, float("nan"), "much", True])
def test_invalid_bound_raises(clip):
    with pytest.raises(ValueError, match="recurrent_clip must be a positive number or None"):
        egru.EGRU(3, 4, recurrent_clip=clip)
