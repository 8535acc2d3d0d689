import math

import pytest
import torch

import egru


@pytest.mark.parametrize(
    ("threshold", "mean", "std"),
    [
        (egru.Threshold(), 0, math.sqrt(2)),
        (egru.Threshold("sigmoid", mean=-3.5, std=0.5), -3.5, 0.5 * math.sqrt(2)),
        (egru.Threshold("abs"), 0, math.sqrt(2)),
        (egru.Threshold("clamp", mean=0.2), 0.2, math.sqrt(0.2 * 0.8 / (3 * 0.25 + 3 + 1))),
        (egru.Threshold("identity", mean=0.3), 0.3, 0),
    ],
)
def test_initial_distribution_has_the_given_mean_and_std(threshold, mean, std):
    tau = torch.empty(200_000)
    threshold.initialise_(tau)
    assert abs(tau.mean() - mean) < 0.02
    assert abs(tau.std() - std) < 0.02


@pytest.mark.parametrize(
    ("kind", "function"),
    [("sigmoid", torch.sigmoid), ("abs", torch.abs), ("clamp", lambda t: t.clamp(0, 1)), ("identity", lambda t: t)],
)
@pytest.mark.parametrize("per_unit", [True, False])
def test_gradient_follows_the_chain_rule_of_the_parametrisation(kind, function, per_unit):
    layer = egru.EGRU(3, 6, threshold=egru.Threshold(kind, per_unit=per_unit))
    tau = layer.get_parameter("threshold_l0")
    with torch.no_grad():
        tau.uniform_(-0.4, 0.4)
    theta = layer.thresholds()["l0"]
    assert theta.shape == (6,)
    torch.testing.assert_close(theta, function(tau).expand(6))
    x = torch.randn(8, 3, 3)
    layer(x)[0].sum().backward()
    assert tau.grad is not None
    assert tau.grad.shape == tau.shape
    fixed = egru.EGRU(3, 6, threshold=egru.Threshold("identity"))
    fixed.load_state_dict({**layer.state_dict(), "threshold_l0": theta.detach()})
    fixed(x)[0].sum().backward()
    (chain,) = torch.autograd.grad(function(tau).expand(6), tau, fixed.get_parameter("threshold_l0").grad)
    assert chain.any()
    torch.testing.assert_close(tau.grad, chain)


def test_constant_thresholds_are_not_trained():
    layer = egru.EGRU(3, 6, threshold=egru.Threshold.constant(0.2))
    assert not layer.get_parameter("threshold_l0").requires_grad
    assert layer.thresholds()["l0"].tolist() == [0.2] * 6
    layer(torch.randn(3, 1, 3))[0].sum().backward()
    assert layer.get_parameter("threshold_l0").grad is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "relu"}, "kind must be one of sigmoid, abs, clamp, identity; got 'relu'"),
        ({"mean": float("inf")}, "mean must be a finite number or None, got inf"),
        ({"std": -1.0}, "std must not be negative, got -1.0"),
        ({"kind": "clamp", "std": 1.0}, "std is not supported with kind='clamp', got 1.0"),
        ({"kind": "clamp", "mean": 1.0}, "requires 0 < mean < 1, got 1.0"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        egru.Threshold(**arguments)
