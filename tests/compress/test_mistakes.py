"""Ordinary mistakes: each error names the argument, what it got and what it accepts, and the model does not change."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import egru
from egru.compress import Budget, Distillation, ThresholdSchedule, prune, raise_thresholds
from egru.report import report_models

DENSE = nn.GRU(4, 8)
X = torch.randn(5, 2, 4)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)[0].square().mean()


def sparsify(*, loss: Any = loss, data: Any = (X, X), target: Any = 0.3, dense: nn.Module = DENSE, **options: Any):
    torch.set_default_dtype(torch.float32)
    return egru.sparsify(egru.convert(dense), data, loss, target, epochs=1, log=lambda line: None, **options)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self):
        return iter([X[:, 0]] * 4)


def calibrate(data: Any = (X,), **options: Any):
    return egru.calibrate(egru.EGRU(4, 8), data, **options)


def quieten(data: Any = (X,), loss: Any = loss, **options: Any):
    return egru.compress.quieten(egru.EGRU(4, 8), data, loss, log=lambda line: None, **options)


def other_optimiser() -> torch.optim.Optimizer:
    return torch.optim.Adam(DENSE.parameters())


CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "loss is None": (lambda: sparsify(loss=lambda m, x: None), TypeError, "must return one number.* got NoneType"),
    "loss is a vector": (lambda: sparsify(loss=lambda m, x: m(x)[0][0, 0]), TypeError, r"got a tensor of shape \(8,\)"),
    "loss is a module": (lambda: sparsify(loss=nn.MSELoss()), TypeError, r"MSELoss\(model\(batch\[0\]\)"),
    "loss of torch": (lambda: sparsify(loss=F.cross_entropy), TypeError, "function of a model and a batch"),
    "loss is a number": (lambda: sparsify(loss=3), TypeError, "function of a model and a batch, got int"),
    "loss is detached": (lambda: sparsify(loss=lambda m, x: loss(m, x).detach()), ValueError, "without detach"),
    "loss is a float": (lambda: sparsify(loss=lambda m, x: loss(m, x).item()), ValueError, "without detach"),
    "target is text": (lambda: sparsify(target="0.1"), TypeError, "activity must be a number, got '0.1'"),
    "within is text": (lambda: Budget(within="1", metric=len), TypeError, "within must be a number, got '1'"),  # pyright: ignore
    "metric is None": (lambda: sparsify(metric=lambda m: None), ValueError, "finite number, got None"),
    "metric is NaN": (
        lambda: sparsify(target=Budget(within=0.5, metric=lambda m: float("nan"))), ValueError, "number, got nan",
    ),
    "teacher is a number": (lambda: sparsify(teacher=1), TypeError, "teacher must be a torch.nn.Module, got int"),
    "optimiser of the teacher": (lambda: sparsify(optimiser=other_optimiser()), ValueError, "none of the model's"),
    "another distillation": (
        lambda: sparsify(distillation=Distillation(egru.convert(DENSE), DENSE)), ValueError, "got another one",
    ),
    "no length": (lambda: sparsify(data=DataLoader(Endless())), ValueError, "loader with a length, got DataLoader"),
    "one score": (
        lambda: sparsify(dense=nn.GRU(4, 1), teacher=nn.GRU(4, 1)), ValueError, 'use compare="values"',
    ),
    "dense schedule": (lambda: ThresholdSchedule(DENSE, 0.2, 5), ValueError, "must have an event layer, got GRU"),
    "gain": (lambda: ThresholdSchedule(egru.EGRU(2, 3), 0.2, 5, gain=-1), ValueError, "gain must be positive, got -1"),
    "teacher of another size": (
        lambda: Distillation(egru.convert(DENSE), nn.GRU(4, 9), states=1.0), ValueError, "8 units in the model and 9",
    ),
    "sequences is a tensor": (lambda: egru.calibrate(egru.EGRU(4, 8), X), TypeError, r"got a tensor; pass \[tensor\]"),
    "batch with targets": (
        lambda: egru.calibrate(nn.Sequential(egru.convert(DENSE)), [(X, X)]), TypeError, "with the 2 values of a batch",
    ),
    "loss of sparsify": (lambda: sparsify(loss=lambda m, x: None), TypeError, "^sparsify: loss must return one"),
    "loss of calibrate": (lambda: calibrate(loss=nn.MSELoss()), TypeError, "^calibrate: loss must be a function"),
    "loss of calibrate returns text": (
        lambda: calibrate(loss=lambda m, x: [m(x), "1"][1]), TypeError, "^calibrate: loss must return one number",
    ),
    "loss of quieten": (lambda: quieten(loss=nn.MSELoss()), TypeError, "^quieten: loss must be a function"),
    "loss of quieten is NaN": (
        lambda: quieten(loss=lambda m, x: loss(m, x) * float("nan")), ValueError, "^quieten: the loss must be finite",
    ),
    "loss of a report": (
        lambda: report_models("x", DENSE, [X], lambda m, x: None), TypeError, "^report_models: loss must return one",  # pyright: ignore
    ),
    "negative rate": (lambda: sparsify(rate=-1.0), ValueError, "sparsify: rate must not be negative, got -1.0"),
    "rate is text": (lambda: sparsify(rate="4"), TypeError, "sparsify: rate must be a number, got '4'"),
    "epochs is a fraction": (
        lambda: egru.sparsify(egru.convert(DENSE), [X], loss, 0.3, epochs=2.5),  # pyright: ignore
        TypeError, "sparsify: epochs must be an integer, got 2.5",
    ),
    "metric is text": (lambda: sparsify(metric="accuracy"), TypeError, "sparsify: metric must be a function.* got str"),
    "metric of a budget": (
        lambda: Budget(within=1, metric="accuracy"), TypeError, "Budget: metric must be a function.* got str",  # pyright: ignore
    ),
    "data is a tensor": (lambda: sparsify(data=X), TypeError, r"sparsify: data must be .* a tensor; pass \[tensor\]"),
    "batches is a tensor": (lambda: quieten(X), TypeError, r"quieten: batches must be .* a tensor; pass \[tensor\]"),
    "within of calibrate": (lambda: calibrate(within="1"), TypeError, "calibrate: within must be a number, got '1'"),
    "within of quieten": (lambda: quieten(within="0.1"), TypeError, "quieten: within must be a number, got '0.1'"),
    "no summary": (lambda: prune(nn.Sequential(DENSE, egru.EGRU(8, 8)), None), TypeError, "summary.* got NoneType"),  # pyright: ignore
    "list of models": (lambda: report_models("x", [DENSE], [X], loss), TypeError, "a dict of modules, got list"),  # pyright: ignore
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_mistakes_are_named(name: str) -> None:
    run, error, message = CASES[name]
    torch.set_default_dtype(torch.float32)
    with pytest.raises(error, match=message):
        run()


def test_numbers_of_numpy_are_accepted() -> None:
    assert Budget(activity=np.float32(0.3)).limit == pytest.approx(0.3)  # pyright: ignore[reportArgumentType]
    assert sparsify(target=np.float32(0.3)).after.events <= 0.3


def test_integer_outputs_require_a_loss() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = egru.EGRU(4, 8, dtype=torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0].argmax(-1)

    with pytest.raises(TypeError, match=r"must return floating-point outputs, got torch\.int64; pass loss"):
        egru.calibrate(Tokens(), [X])


def test_a_loader_that_yields_more_than_its_length_is_cut() -> None:
    class Longer(list[torch.Tensor]):
        def __len__(self) -> int:
            return 1

    torch.set_default_dtype(torch.float32)
    data = Longer([X, X, X])
    model, calls = egru.convert(DENSE), []

    def counted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(model.training)
        return loss(model, batch)

    egru.sparsify(model, data, counted, 0.5, epochs=2, log=lambda line: None)
    assert sum(calls) == 2


def test_a_model_without_events_is_not_a_mistake() -> None:
    torch.set_default_dtype(torch.float32)
    model = egru.convert(DENSE)
    raise_thresholds(model, 100.0)
    assert egru.sparsify(model, [X], loss, 0.3, epochs=1, lr=1e-6, log=lambda line: None).after.events == 0
