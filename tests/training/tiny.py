"""Small runs for tests: synthetic data, a few units, and random numbers in every step."""

from pathlib import Path
from typing import Any

import torch

import egru
from egru.data import Classification, Split, Text
from egru.models import LanguageModel, SequenceClassifier
from egru.training import ClassifierTask, ClassifierTraining, LanguageTask, LanguageTraining, NoProgress, Run, train
from egru.types import Cell


def sequences() -> Classification:
    """Noisy sequences, labelled by the half with the larger values."""
    g = torch.Generator().manual_seed(5)
    y = torch.randint(0, 2, (96,), generator=g)
    loudness = torch.stack([1 - y, y], 1).repeat_interleave(4, 1).float()
    x = torch.randn(96, 8, 1, generator=g).abs() * (0.1 + loudness[..., None])
    return Classification("halves", 2, Split(x[:48], y[:48]), Split(x[48:72], y[48:72]), Split(x[72:], y[72:]))


def text() -> Text:
    """A random walk over seven words."""
    g = torch.Generator().manual_seed(6)
    parts = (torch.randint(1, 3, (n,), generator=g).cumsum(0) % 7 for n in (800, 200, 200))
    return Text("walk", list("abcdefg"), *parts)


def make_classifier() -> SequenceClassifier:
    threshold, surrogate = egru.Threshold(mean=-3.0), egru.Surrogate(width=0.3)
    return SequenceClassifier(1, 12, 2, zoneout=0.1, dropconnect=0.1, threshold=threshold, surrogate=surrogate)


def make_language_model(cell: Cell = "egru") -> LanguageModel:
    options: Any = {"threshold": egru.Threshold(mean=-3.0)} if cell == "egru" else {}
    return LanguageModel(7, 12, 16, num_layers=2, cell=cell, dropout=0.1, **options)


def classifier_run(folder: Path, epochs: int = 4, log=print, minutes=None, **changes):
    """Start or resume a run, and return its result and model."""
    training = ClassifierTraining(epochs=epochs, **{"batch": 16, "learning_rate": 4e-2, "clip": 1.0, **changes})
    return _run(folder, make_classifier, ClassifierTask(sequences(), training), training, log, minutes)


def language_run(folder: Path, epochs: int = 3, log=print, minutes=None, **changes):
    training = LanguageTraining(
        epochs=epochs, **{"batch": 8, "evaluation_batch": 4, "learning_rate": 2e-2, "bptt": 20, **changes}
    )
    return _run(folder, make_language_model, LanguageTask(text(), training), training, log, minutes)


def _run(folder: Path, make_model, task, training, log, minutes):
    """Create or open the run in ``folder`` and train."""
    torch.set_num_threads(1)
    torch.manual_seed(training.seed)
    model = make_model()
    run = Run.open(folder, log) if (folder / "config.json").exists() else Run.create(folder, {}, log)
    return train(model, task, training, run, NoProgress(), minutes), model


def endless(folder: str) -> None:
    """Train until the process is killed."""
    classifier_run(Path(folder), epochs=1_000_000)
