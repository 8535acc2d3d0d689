"""Runs small enough to be killed twenty times: synthetic sequences, a few units, random numbers in every step."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import egru
from egru.data import Classification, Split
from egru.training import ClassifierTask, ClassifierTraining, LanguageTask, LanguageTraining, Run, Silent, train


class Tokens(NamedTuple):
    train: Tensor
    validation: Tensor
    test: Tensor


def sequences() -> Classification:
    """Which half of a noisy sequence is louder."""
    g = torch.Generator().manual_seed(5)
    y = torch.randint(0, 2, (96,), generator=g)
    loud = torch.stack([1 - y, y], 1).repeat_interleave(4, 1).float()
    x = torch.randn(96, 8, 1, generator=g) * (0.2 + loud[..., None])
    return Classification("halves", 2, Split(x[:48], y[:48]), Split(x[48:72], y[48:72]), Split(x[72:], y[72:]))


def text() -> Tokens:
    """A walk over seven words."""
    g = torch.Generator().manual_seed(6)
    parts = (torch.randint(1, 3, (n,), generator=g).cumsum(0) % 7 for n in (800, 200, 200))
    return Tokens(*parts)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = egru.EGRU(1, 6, batch_first=True, zoneout=0.1, dropconnect=0.1, threshold=egru.Threshold(mean=-3.0))
        self.readout = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.readout(egru.exponential_trace(y, last=True, batch_first=True))


class Speaker(nn.Module):
    """A language model with tied weights."""

    def __init__(self, cell: type[nn.Module] = egru.EGRU) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(7, 6), cell(6, 6)
        self.readout = nn.Linear(6, 7)
        self.readout.weight = self.embedding.weight

    def forward(self, x: Tensor, state=None):
        y, state = self.rnn(self.embedding(x), state)
        return self.readout(y), y, state


def classifier_run(folder: Path, epochs: int = 4, say=print, **changes):
    """Start or go on with a run; the result and the model."""
    training = ClassifierTraining(epochs=epochs, **{"batch": 16, "learning_rate": 1e-2, "clip": 1.0, **changes})
    return _run(folder, Reader, ClassifierTask(sequences(), training), training, say)


def language_run(folder: Path, epochs: int = 3, say=print, **changes):
    training = LanguageTraining(
        epochs=epochs, **{"batch": 8, "evaluation_batch": 4, "learning_rate": 1e-2, "bptt": 20, **changes}
    )
    return _run(folder, Speaker, LanguageTask(text(), training), training, say)


def _run(folder: Path, make_model, task, training, say):
    torch.set_num_threads(1)
    torch.manual_seed(training.seed)
    model = make_model()
    run = Run.open(folder, say) if (folder / "config.json").exists() else Run.create(folder, {}, say)
    return train(model, task, training, run, Silent()), model


def endless(folder: str) -> None:
    """A run to be killed: never ends by itself."""
    classifier_run(Path(folder), epochs=1_000_000)
