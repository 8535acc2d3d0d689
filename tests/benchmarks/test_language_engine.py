"""benchmarks/language_engine.py on a small model."""

import json
import sys
from pathlib import Path

import pytest
import torch

from egru import runs
from egru.experiments import LanguageConfig
from egru.training import Result
from tests.training.tiny import text

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import language_engine  # pyright: ignore[reportMissingImports]


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    for module in ("train", "load"):
        monkeypatch.setattr(sys.modules[f"egru.runs.{module}"], "load_data", lambda config: text())
    small = {"hidden": 24, "embedding": 20, "layers": 2, "batch": 8, "epochs": 3, "bptt": 20, "learning_rate": 2e-2}
    runs.train("ptb", LanguageConfig(**small), tmp_path / "run", log=lambda _: None)


def test_engine_and_torch_agree_on_perplexity(tmp_path, capsys):
    runs.export(tmp_path / "run", tmp_path / "small", "float32")
    for run in ("run", "small"):
        out = tmp_path / f"{run}.json"
        timed = ["--timed", "120"] if run == "run" else []
        assert language_engine.main([str(tmp_path / run), "--turn", "30", *timed, "--out", str(out)]) == 0
    run, export = (json.loads((tmp_path / f"{run}.json").read_text()) for run in ("run", "small"))
    assert run["words"] == export["words"] == export["timed"] == 199
    assert run["timed"] == 120
    rows = run["contestants"]
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert rows["torch"]["perplexity"] == pytest.approx(stored["test"]["perplexity"], rel=1e-5)
    assert rows["engine float32"]["perplexity"] == pytest.approx(rows["torch"]["perplexity"], rel=1e-4)
    assert rows["engine float32"]["perplexity"] != rows["engine int8"]["perplexity"]
    assert rows["torch"]["perplexity"] == pytest.approx(export["contestants"]["torch"]["perplexity"], rel=1e-5)
    activity = Result.from_dict(stored).activity
    assert rows["engine float32"]["activity_sparsity"] == pytest.approx(activity.activity_sparsity, abs=1e-3)
    assert rows["engine int8"]["times_torch"] > 1
    assert "x torch" in capsys.readouterr().out


def test_large_perplexity_difference_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(language_engine.LIMITS, "int8", 0.0)
    assert language_engine.main([str(tmp_path / "run"), "--words", "40"]) == 1
    assert "engine int8: perplexity differs by" in capsys.readouterr().out
