"""benchmarks/pretrained.py on two images."""

import json

import pytest
import torch

from benchmarks import pretrained
from egru.data import Classification
from tests.helpers import mnist_sample


def test_measures_and_writes_a_record(tmp_path, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    sample = mnist_sample()
    monkeypatch.setattr("egru.data.sequential_mnist", lambda: Classification("mnist", 10, sample, sample, sample))
    pretrained.main(["--images", "2", "--out", str(tmp_path / "record.json")])
    microseconds = json.loads((tmp_path / "record.json").read_text())["microseconds_per_pixel"]
    assert len(microseconds) == 6
    assert all(value > 0 for value in microseconds.values())
    assert capsys.readouterr().out.count(" x |") == 4


def test_different_predictions_fail(monkeypatch):
    torch.set_default_dtype(torch.float32)
    readers = pretrained.contestants()
    monkeypatch.setattr(
        pretrained, "contestants", lambda: {**readers, "engine, whole image": lambda image: torch.arange(10.0)}
    )
    with pytest.raises(AssertionError, match="predict different digits"):
        pretrained.measure(mnist_sample().x[:2])
