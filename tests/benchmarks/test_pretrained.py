"""benchmarks/pretrained.py on two images."""

import json

import pytest
import torch

from benchmarks import pretrained
from egru.data import Classification
from tests.helpers import mnist_sample


def test_it_measures_and_writes(tmp_path, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    sample = mnist_sample()
    monkeypatch.setattr("egru.data.sequential_mnist", lambda: Classification("mnist", 10, sample, sample, sample))
    pretrained.main(["--images", "2", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["microseconds_a_pixel"]
    assert len(found) == 6
    assert all(value > 0 for value in found.values())
    assert capsys.readouterr().out.count(" x |") == 4


def test_other_digits_are_refused(monkeypatch):
    torch.set_default_dtype(torch.float32)
    readers = pretrained.contestants()
    monkeypatch.setattr(
        pretrained, "contestants", lambda: {**readers, "engine, whole image": lambda image: torch.arange(10.0)}
    )
    with pytest.raises(AssertionError, match="name different digits"):
        pretrained.measure(mnist_sample().x[:2])
