"""Fine-tuning to a budget: the schedule of thresholds, and the whole procedure."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import egru
from egru.compress import Budget, ThresholdSchedule
from egru.types import EVENTS

QUIET: dict[str, Any] = {"log": lambda line: None}


class Classifier(nn.Module):
    def __init__(self, layer_class=nn.GRU):
        super().__init__()
        self.rnn = layer_class(2, 16, batch_first=True)
        self.readout = nn.Linear(16, 2)

    def forward(self, x):
        return self.readout(self.rnn(x)[0][:, -1])


def data():
    """Return batches of sequences whose class is the sign of their mean."""
    x = torch.randn(4, 16, 12, 2) + 0.5 * torch.randn(4, 16, 1, 1).sign()
    return [(batch, (batch.mean((1, 2)) > 0).long()) for batch in x]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, batches = Classifier(), data()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(20):
        for batch in batches:
            optimiser.zero_grad()
            loss(model, batch).backward()
            optimiser.step()
    return model, batches


@pytest.mark.parametrize("events", EVENTS)
def test_schedule_reaches_the_target_and_follows_its_curve(events):
    layer = egru.convert(nn.GRU(4, 32), events)
    x = torch.randn(20, 16, 4)
    goals = []
    with ThresholdSchedule(layer, 0.2, steps=80, ramp=0.5) as schedule:
        for _ in range(80):
            layer(x)
            schedule.step()
            goals.append(schedule.goal)
    assert goals[40:] == pytest.approx([0.2] * 40)
    assert goals == sorted(goals, reverse=True)
    assert schedule.measured == pytest.approx(0.2, rel=0.15)


def test_schedule_of_macs():
    layer = egru.convert(nn.GRU(4, 32))
    with ThresholdSchedule(layer, Budget(macs=0.4), steps=60) as schedule:
        for _ in range(60):
            layer(torch.randn(20, 16, 4))
            schedule.step()
    assert schedule.measured == pytest.approx(0.4, rel=0.1)


def test_schedule_requires_its_context():
    schedule = ThresholdSchedule(egru.convert(nn.GRU(2, 3)), 0.2, steps=2)
    with pytest.raises(RuntimeError, match="inside the context"):
        schedule.step()
    with schedule, pytest.raises(RuntimeError, match="nothing was counted"):
        schedule.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of activity, macs and within is required, got none"),
        ({"activity": 0.1, "macs": 0.1}, "exactly one"),
        ({"activity": 1.5}, r"activity must be in \(0, 1\), got 1.5"),
        ({"within": 0.5}, "within requires a metric"),
        ({"within": -1.0, "metric": float}, "within must not be negative"),
    ],
)
def test_wrong_budgets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Budget(**arguments)


def accuracy(batches):
    def metric(model):
        with torch.no_grad():
            return 100 * torch.cat([model(x).argmax(1) == y for x, y in batches]).double().mean().item()

    return metric


@pytest.mark.parametrize("target", [0.25, Budget(macs=0.35)])
def test_sparsify_meets_the_budget_and_keeps_the_accuracy(trained, target):
    teacher, batches = trained
    metric, lines = accuracy(batches), []
    model = egru.convert(teacher)
    result = egru.sparsify(model, batches, loss, target, teacher=teacher, metric=metric, epochs=20, log=lines.append)
    measured = result.after.events if target == 0.25 else result.after.macs
    assert measured <= (0.25 if target == 0.25 else 0.35)
    assert result.metric_before == metric(teacher)
    assert result.metric_after == metric(model) >= metric(teacher) - 5
    assert result.epochs == 20 == len(lines) - 2
    assert "after" in str(result)
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), trained[0].parameters(), strict=True))


def test_patience_stops_early_and_the_best_epoch_is_kept(trained):
    teacher, batches = trained
    model, states = egru.convert(teacher), []

    def metric(model):
        """Rise until the twelfth epoch and fall afterwards. The first call measures the model before."""
        states.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        return 40.0 + len(states) if len(states) <= 13 else 30.0

    result = egru.sparsify(model, batches, loss, 0.9, metric=metric, epochs=30, ramp=0.1, patience=3, **QUIET)
    assert result.epochs == 15
    weights = {name: parameter for name, parameter in model.named_parameters() if "threshold" not in name}
    same = [all(torch.equal(state[name], value) for name, value in weights.items()) for state in states[:-1]]
    assert [epoch for epoch, equal in enumerate(same) if equal] == [12]


def test_within_keeps_the_sparsest_model_whose_metric_is_accepted(trained):
    teacher, batches = trained
    metric = accuracy(batches)
    model = egru.convert(teacher)
    budget = Budget(within=5.0, metric=metric)
    result = egru.sparsify(model, batches, loss, budget, teacher=teacher, epochs=4, **QUIET)
    assert result.metric_after is not None
    assert result.metric_after >= metric(teacher) - 5
    assert metric(model) == result.metric_after
    assert result.after.events < 0.6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": nn.GRU(2, 3)}, ValueError, r"the model must have an event layer, got GRU; egru.convert\(model\)"),
        ({"data": []}, ValueError, "data must contain at least one batch"),
        ({"data": iter([1])}, ValueError, "data must be a list or a loader with a length"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"patience": 2}, ValueError, "patience=2 requires a metric"),
        ({"target": 2.0}, ValueError, r"activity must be in \(0, 1\), got 2.0"),
        ({"loss": lambda model, batch: model(batch[0]).sum() * math.nan}, ValueError, "the loss must be finite"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    arguments = {"model": egru.convert(Classifier()), "data": data(), "loss": loss, "target": 0.2, **QUIET, **arguments}
    with pytest.raises(error, match=message):
        egru.sparsify(**arguments)


def test_a_budget_below_the_cost_of_the_input_is_reported_before_training():
    model = egru.convert(nn.GRU(30, 4))
    batches, lines = [torch.randn(5, 2, 30)], []
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"without any event the model takes 0\.8"):
        egru.sparsify(model, batches, lambda m, x: m(x)[0].square().mean(), Budget(macs=0.1), log=lines.append)
    assert not lines
    assert unchanged(model, before)


def unchanged(model, before):
    """Return whether a model has the given parameters and buffers."""
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("failure", ["loss", "metric"])
def test_model_does_not_change_if_fine_tuning_fails(trained, failure):
    dense, batches = trained
    model = egru.convert(dense).eval()
    before, calls = copy.deepcopy(model.state_dict()), []

    def failing(model, batch):
        calls.append(batch)
        return loss(model, batch) * (math.nan if failure == "loss" and len(calls) > 10 else 1)

    def metric(model):
        return math.nan if failure == "metric" and len(calls) > 10 else 1.0

    error = {"loss": RuntimeError, "metric": ValueError}[failure]
    with pytest.raises(error, match=r"the loss became nan|metric must return a finite number, got nan"):
        egru.sparsify(model, batches, failing, 0.3, metric=metric, epochs=5, **QUIET)
    assert len(calls) > 10
    assert unchanged(model, before)
    assert not any(module.training for module in model.modules())


def test_modes_are_restored_and_frozen_modules_stay_in_evaluation_mode(trained):
    _, batches = trained
    model = nn.Sequential(Classifier(), nn.BatchNorm1d(2))
    for batch, _ in batches:
        model(batch)
    converted: Any = egru.convert(model).train()
    converted[1].eval()
    before = converted[1].running_mean.clone()
    egru.sparsify(converted, batches, loss, 0.3, epochs=1, **QUIET)
    assert torch.equal(converted[1].running_mean, before)
    assert converted.training
    assert not converted[1].training


def test_the_metric_is_computed_in_evaluation_mode():
    class Noisy(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5)

        def forward(self, x):
            return self.readout(self.dropout(self.norm(self.rnn(x)[0][:, -1])))

    teacher, batches = Noisy(), data()
    model: Any = egru.convert(teacher).train()
    other, statistics = 10 + torch.randn(16, 12, 2), []

    def metric(model):
        with torch.no_grad():
            statistics.append(
                (model.norm.running_mean.clone(), model(other), model(other), model.norm.running_mean.clone())
            )
        return 100.0

    result = egru.sparsify(model, batches, loss, Budget(within=0.5, metric=metric), teacher=teacher, epochs=1, **QUIET)
    assert result.metric_after == 100.0
    assert len(statistics) > 2
    for before, first, second, after in statistics:
        assert torch.equal(first, second)
        assert torch.equal(before, after)
    assert model.training
    assert model.dropout.training


def test_gradients_and_frozen_thresholds_are_restored_if_fine_tuning_fails(trained):
    dense, batches = trained
    model = egru.convert(dense)
    loss(model, batches[0]).backward()
    parameters = list(model.parameters())
    trainable = [p.requires_grad for p in parameters]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    calls = []

    def failing(model, batch):
        calls.append(batch)
        return loss(model, batch) * (math.nan if len(calls) > 10 else 1)

    before = repr(model)
    with pytest.raises(RuntimeError, match="the loss became nan"):
        egru.sparsify(model, batches, failing, 0.3, epochs=5, **QUIET)
    assert not all(trainable)
    assert [p.requires_grad for p in parameters] == trainable
    assert repr(model) == before
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_trained_thresholds_are_shown_as_trainable(trained):
    dense, batches = trained
    model = egru.convert(dense)
    assert "trainable=False" in repr(model)
    egru.sparsify(model, batches, loss, 0.3, epochs=1, **QUIET)
    assert model.rnn.threshold_l0.requires_grad
    assert "trainable=True" in repr(model)


@pytest.mark.parametrize("events", EVENTS)
def test_activity_below_the_target_does_not_rise_to_it(trained, events):
    dense, batches = trained
    model = egru.convert(dense, events)
    egru.compress.raise_thresholds(model, 0.3)
    lines = []
    result = egru.sparsify(model, batches, loss, 0.95, epochs=3, rate=0.0, lr=1e-5, log=lines.append)
    assert result.before.events < 0.8
    assert result.after.events == pytest.approx(result.before.events, abs=0.02)
    assert "meets the target already" in lines[1]
