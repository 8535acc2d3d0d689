"""The screen of sequential MNIST, on a few made-up images."""

import json
import sys
from pathlib import Path

import pytest
import torch

from egru.data import Classification, Split

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import smnist_screen  # pyright: ignore[reportMissingImports]


@pytest.fixture(autouse=True)
def few_images(ground, monkeypatch):
    torch.set_default_dtype(torch.float32)
    split = Split(torch.rand(40, 12, 1), torch.arange(40) % 10)
    monkeypatch.setattr(smnist_screen, "data_for", lambda *_: Classification("few", 10, split, split, split))
    monkeypatch.setattr(smnist_screen, "TRAINED", 40)
    monkeypatch.setitem(smnist_screen.BASE, "batch", 10)


def test_a_line_a_variant_and_none_twice(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    given = ["--variants", "base", "gru", "--updates", "8", "--out", str(path)]
    smnist_screen.main(given)
    smnist_screen.main(given)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["variant"] for line in lines] == ["base", "gru"]
    assert [line["updates"] for line in lines] == [8, 8]
    assert [len(line["curve"]) for line in lines] == [2, 2]
    assert lines[0]["adjoint_growth"] is not None
    assert lines[1]["adjoint_growth"] is None
    capsys.readouterr()
    smnist_screen.main(["--table", "--out", str(path)])
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_variant_that_diverges_is_a_line_too(tmp_path, monkeypatch):
    monkeypatch.setitem(smnist_screen.VARIANTS, "base", {"learning_rate": 1e30, "clip": None, "schedule": "constant"})
    path = tmp_path / "lines.jsonl"
    smnist_screen.main(["--variants", "base", "--updates", "8", "--out", str(path)])
    assert "training stopped" in json.loads(path.read_text())["stopped"]
