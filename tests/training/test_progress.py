"""The progress of a training run: lines per epoch, a progress bar, TensorBoard."""

import dataclasses
import sys
import time
import types

import pytest
import torch

from egru.training import ClassifierTask, ClassifierTraining, NoProgress, Run, tensorboard, train
from egru.training.progress import PrintedProgress, describe_epoch, progress_bar
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


def test_long_epochs_report_steps_and_the_remaining_time(tmp_path, monkeypatch, capsys):
    language_run(tmp_path / "run", epochs=1)
    (line,) = Run.open(tmp_path / "run").metrics()
    times = iter([0.0, 1.0, 59.0, 61.0, 90.0, 100.0, 159.0, 161.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    progress = PrintedProgress("tiny", 10)
    for epochs in (4.0, 4.2, 4.25, 4.4):
        progress.step(epochs)
    progress.epoch(line)
    for epochs in (5.0, 6.0):
        progress.step(epochs)
    captured = capsys.readouterr()
    assert captured.out == describe_epoch(line) + "\n"
    # 0.25 epochs took 60 s, so 5.75 take 23 minutes; 2 took 160 s, so 4 take 5.3 minutes
    assert captured.err.splitlines() == [
        "tiny: 4.25 of 10 epochs done, about 23.0 min left",
        "tiny: 6.00 of 10 epochs done, about 5.3 min left",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_prints_one_line_per_epoch(terminal, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")  # rich then takes a pipe for a terminal
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
