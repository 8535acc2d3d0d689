"""Reports of models that were not trained by a recipe."""

import json

import pytest
import torch
from torch import nn

import egru
from egru.report import read_runs, report_models
from tests.report.parsing import Page


class Tagger(nn.Module):
    """A recurrent layer with a readout."""

    def __init__(self, layer: nn.Module, size: int = 8) -> None:
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(size, 2)

    def forward(self, x):
        return self.readout(self.layer(x)[0])


class Stepper(nn.Module):
    """A cell that the model calls once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = egru.EGRUCell(3, 8, threshold=egru.Threshold.constant(0.0))

    def forward(self, x):
        state, outputs = None, []
        for step in x:
            state = self.cell(step, state)
            outputs.append(state.y)
        return torch.stack(outputs)


def loss(model, x):
    return model(x).square().mean()


@pytest.fixture
def models():
    torch.manual_seed(0)
    gru = Tagger(nn.GRU(3, 8))
    return {"GRU": gru, "with events": egru.convert(gru, events="delta")}


def batches(count: int = 2):
    return [torch.randn(12, 4, 3) for _ in range(count)]


def test_numbers_are_those_of_the_models(models, tmp_path):
    egru.calibrate(models["with events"], batches(), within=0.2)
    data = batches()
    path = report_models(tmp_path, models, data, loss, seconds={"GRU": 12.0})
    dense, events = read_runs(tmp_path / "report.json")
    for run, model in zip((dense, events), models.values(), strict=True):
        expected = sum(loss(model, x).item() for x in data) / 2
        assert run.loss == pytest.approx(expected, rel=1e-6)
        with torch.no_grad(), egru.ActivityMonitor(model) as monitor:
            for x in data:
                model(x)
        assert run.activity.forward_macs == monitor.summary().forward_macs
    assert (dense.name, dense.seconds, events.seconds, events.split) == ("GRU", 12.0, None, "validation")
    text = Page(path).text
    assert f"validation loss of {events.loss:.4g} (GRU: {dense.loss:.4g})" in text
    assert "Event raster" in text
    assert "Command" not in text


def test_accuracy_replaces_the_loss(models, tmp_path):
    def accuracy(model, x):
        return 0.75 if model is models["GRU"] else 0.5

    path = report_models(tmp_path, models, batches(), loss, accuracy=accuracy, split="test")
    assert [run.accuracy for run in read_runs(tmp_path / "report.json")] == [0.75, 0.5]
    assert "test accuracy" in Page(path).text


def test_cells_that_run_step_by_step_are_drawn(tmp_path):
    x = batches(1)
    path = report_models(tmp_path, Stepper(), x, loss)
    assert "not drawn" not in Page(path).text
    assert (tmp_path / "raster-1.png").exists()


def test_modes_are_restored(models, tmp_path):
    for model in models.values():
        model.train()
        model.readout.eval()
    report_models(tmp_path, models, batches(), loss)
    assert all(model.training and not model.readout.training for model in models.values())


def test_layers_of_different_lengths_are_not_drawn(tmp_path):
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = egru.EGRU(3, 4), egru.EGRU(4, 4)

        def forward(self, x):
            return self.second(self.first(x)[0][::2])[0]

    path = report_models(tmp_path, Halves(), batches(1), loss)
    assert "The events of model are not drawn: its layers ran for different numbers of steps." in Page(path).text


def test_bad_input_is_refused(models, tmp_path):
    with pytest.raises(ValueError, match="models must contain at least one model"):
        report_models(tmp_path, {}, batches(), loss)
    with pytest.raises(ValueError, match="there are no batches"):
        report_models(tmp_path, models, [], loss)
    with pytest.raises(ValueError, match="seconds names 'LSTM', the models are GRU, with events"):
        report_models(tmp_path, models, batches(), loss, seconds={"LSTM": 1.0})
    with pytest.raises(ValueError, match="accuracy must be a fraction between 0 and 1, got 75"):
        report_models(tmp_path, models, batches(), loss, accuracy=lambda model, x: 75)
    assert not list(tmp_path.iterdir())


def test_report_without_loss_is_stored_as_before(tmp_path):
    from tests.report import examples

    record = examples.run().to_dict()
    assert "loss" not in record
    assert type(examples.run()).from_dict(json.loads(json.dumps(record))) == examples.run()
