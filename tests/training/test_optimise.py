import math

import pytest
import torch
from torch import nn

import egru
from egru.training import AveragedSGD, ClassifierTraining, Training, learning_rate_factor, make_optimiser
from egru.training.optimise import gradient_norm, parameter_groups


def test_cosine_schedule_starts_after_the_constant_share():
    training = Training(epochs=100, schedule="cosine", constant_share=0.7, final_factor=0.1)
    assert [learning_rate_factor(training, t) for t in (0, 35, 70)] == [1, 1, 1]
    assert learning_rate_factor(training, 85) == pytest.approx(0.55)
    assert learning_rate_factor(training, 100) == pytest.approx(0.1)


def test_step_schedule_reduces_the_rate_in_steps():
    training = Training(epochs=300, schedule="step", step_epochs=100, step_factor=0.8)
    assert [learning_rate_factor(training, t) for t in (0, 99.9, 100, 250)] == pytest.approx([1, 1, 0.8, 0.64])


def test_one_cycle_schedule_equals_torch():
    training = Training(epochs=20, schedule="one-cycle")
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1.0, total_steps=201, pct_start=0.1, cycle_momentum=False)
    for step in range(200):
        # the peak of torch's schedule is one step before a tenth of the steps
        at = step / 19.1 * 2 if step <= 19.1 else 2 + (step - 19.1) / (200 - 19.1) * 18
        assert learning_rate_factor(training, at) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)
        optimiser.step()
        theirs.step()


def test_thresholds_have_a_separate_parameter_group():
    model = nn.Sequential(egru.EGRU(2, 3, num_layers=2), nn.Linear(3, 1))
    others, thresholds = parameter_groups(model, Training(weight_decay=0.1, threshold_learning_rate=1e-4))
    assert [p.shape for p in thresholds["params"]] == [(3,), (3,)]
    assert (thresholds["base_lr"], thresholds["weight_decay"]) == (1e-4, 0)
    assert (others["base_lr"], others["weight_decay"]) == (1e-3, 0.1)
    assert len(others["params"]) + 2 == len(list(model.parameters()))
    (only,) = parameter_groups(model, Training(freeze_thresholds=True))
    assert len(only["params"]) == len(others["params"])
    assert not model[0].get_parameter("threshold_l0").requires_grad


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_equals_torch(name):
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    two.load_state_dict(one.state_dict())
    ours = make_optimiser(one, Training(optimiser=name, betas=(0.0, 0.999), weight_decay=0.1, learning_rate=0.02))
    assert ours.defaults["fused"]
    optimiser_class = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    theirs = optimiser_class(two.parameters(), 0.02, (0.0, 0.999), weight_decay=0.1, fused=True)
    for model, optimiser in ((one, ours), (two, theirs)):
        for _ in range(3):
            optimiser.zero_grad()
            model(torch.ones(4, 2)).square().sum().backward()
            optimiser.step()
    torch.testing.assert_close(one.weight, two.weight, rtol=0, atol=0)


def descend(optimiser, weight, losses):
    """Take a step with gradient 1 per loss and return the weight after each."""
    path = []
    for loss in losses:
        weight.grad = torch.ones_like(weight)
        optimiser.step()
        path.append(weight.item())
        optimiser.epoch_done(loss)
    return path


def test_averaging_starts_when_validation_stops_improving():
    weight = nn.Parameter(torch.zeros(1))
    optimiser = AveragedSGD([weight], 0.1, patience=2)
    descend(optimiser, weight, [3.0, 2.0, 1.0, 2.5, 1.5])  # 2.5 is below 3.0, the best loss before the last two
    assert not optimiser.averaging
    descend(optimiser, weight, [1.1])  # above 1.0, the best loss before the last two
    assert optimiser.averaging
    assert optimiser.averages() == []
    path = descend(optimiser, weight, [1.0, 1.0, 1.0])
    with optimiser.averaged():
        assert weight.item() == pytest.approx(sum(path) / 3)
    assert weight.item() == path[-1]


def test_averaged_sgd_steps_equal_torch():
    one, two = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    ours, theirs = AveragedSGD([one], 0.1, weight_decay=0.02), torch.optim.SGD([two], 0.1, weight_decay=0.02)
    for _ in range(4):
        one.grad = torch.randn(5)
        two.grad = one.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(one, two)


def test_gradient_norm_clips_all_gradients_together():
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    weights[0].grad, weights[1].grad = torch.full((3,), 2.0), torch.full((1,), 2.0)
    assert gradient_norm(weights, None).item() == pytest.approx(4)
    assert gradient_norm(weights, 1.0).item() == pytest.approx(4)
    gradients = [w.grad for w in weights[:2] if w.grad is not None]
    assert math.hypot(*(g.norm().item() for g in gradients)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"clip": 0.0}, "clip must be positive, or none"),
        ({"schedule": "linear"}, "schedule must be one of constant, cosine"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1"),
        ({"constant_share": 2.0}, "constant_share must be between 0 and 1"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ClassifierTraining(**changes)
