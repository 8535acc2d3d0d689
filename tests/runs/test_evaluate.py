"""``runs.evaluate``: scores, operation counts, memory of a call and progress."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import egru
from egru.data import Classification, Split
from egru.runs import evaluate
from egru.training import ClassifierTask, ClassifierTraining, progress
from tests.helpers import mnist_sample

IMAGES = 45
"""Images of 784 steps: two full parts of an evaluation and a smaller one."""


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)  # filling every new tensor takes longer than the model


@pytest.fixture
def digits(monkeypatch) -> Split:
    split = Split(*(part[80 : 80 + IMAGES] for part in mnist_sample()))
    data = Classification("some digits", 10, split, split, split)
    monkeypatch.setattr(sys.modules["egru.runs.load"], "load_data", lambda config: data)
    return split


def test_evaluate_equals_one_forward_pass_with_all_its_counts(digits):
    model = egru.pretrained("smnist")
    with torch.no_grad(), egru.ActivityMonitor(model) as monitor:
        expected = model(digits.x)[0].double()
    scores, activity, _ = evaluate(Path("smnist"), device="cpu")
    assert scores.accuracy == (expected.argmax(1) == digits.y).double().mean().item()
    assert scores.loss == pytest.approx(cross_entropy(expected, digits.y).item(), rel=1e-6)
    assert activity == monitor.summary()


def test_long_sequences_are_evaluated_in_small_parts_on_a_cpu(digits):
    sizes = []

    class Model(torch.nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return x.new_zeros(len(x), 10), None

    task = ClassifierTask(Classification("digits", 10, digits, digits, digits), ClassifierTraining())
    fractions = []
    task.evaluate(Model(), "test", fractions.append)
    assert sizes == [20, 20, 5]  # at most 2**14 steps
    assert fractions == [20 / 45, 40 / 45, 1.0]


def test_evaluate_prints_its_progress(digits, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    evaluate(Path("smnist"), device="cpu")
    assert capsys.readouterr().err.splitlines() == [
        f"smnist, test split: {percent} % done" for percent in (44, 89, 100)
    ]


def test_progress_in_a_terminal_is_a_bar(monkeypatch, capsys):
    pytest.importorskip("rich", reason="requires rich: pip install 'egru[train]'")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress.evaluation_progress("test split") as show:
        show(0.5)
    printed = capsys.readouterr()
    assert "test split" in printed.err
    assert printed.out == ""
