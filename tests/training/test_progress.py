"""The progress of a training run: lines per epoch, a progress bar, TensorBoard."""

import dataclasses
import sys
import types

import pytest
import torch

from egru.training import ClassifierTask, ClassifierTraining, NoProgress, Run, tensorboard, train
from egru.training.progress import describe_epoch, progress_bar
from tests.training.tiny import language_run, make_classifier, sequences


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def test_progress_without_rich_prints_one_line_per_epoch(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    language_run(tmp_path / "run", epochs=1)
    (line,) = Run.open(tmp_path / "run").metrics()
    with progress_bar("tiny", 1) as shown:
        shown.step(0.5)
        shown.epoch(line)
    assert capsys.readouterr().out == describe_epoch(line) + "\n"


def test_progress_bar_prints_one_line_per_epoch(tmp_path, capsys):
    training = ClassifierTraining(epochs=2, batch=16)
    with progress_bar("tiny", 2) as progress:
        train(
            make_classifier(),
            ClassifierTask(sequences(), training),
            training,
            Run.create(tmp_path / "run", {}),
            progress,
        )
    printed = capsys.readouterr().out
    assert "epoch 2: loss" in printed
    assert "waiting for data" in printed
    line = Run.open(tmp_path / "run").metrics()[0]
    scores = dataclasses.replace(line.validation, perplexity=12.34)
    assert "perplexity 12.3" in describe_epoch(dataclasses.replace(line, validation=scores))


def test_tensorboard_receives_every_epoch(tmp_path, monkeypatch):
    seen = []

    class Writer:
        def __init__(self, folder):
            seen.append(folder)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            seen.append("closed")

        def add_scalar(self, name, value, epoch):
            seen.append((name, epoch))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.__dict__["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    training = ClassifierTraining(epochs=2, batch=16)
    with tensorboard(NoProgress(), tmp_path / "board") as progress:
        train(
            make_classifier(),
            ClassifierTask(sequences(), training),
            training,
            Run.create(tmp_path / "run", {}),
            progress,
        )
    assert seen[0] == str(tmp_path / "board")
    assert {("validation/accuracy", 1), ("validation/accuracy", 2), ("activity/forward_macs", 2)} <= set(seen)
    assert seen[-1] == "closed"
