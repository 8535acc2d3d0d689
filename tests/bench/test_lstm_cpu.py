"""The benchmark of event LSTMs with tiny layers: what it measures and writes, and that wrong outputs are refused."""

import json

import pytest
import torch
from torch import nn

import egru
from egru.bench import lstm_cpu


@pytest.fixture(autouse=True)
def tiny(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lstm_cpu, "SIZES", {24: (20, 6, 3)})


def test_all_comparisons_are_measured_and_written(capsys, tmp_path):
    options = ["--activity", "0.2", "1.0", "--repeats", "1", "--seconds", "0.001", "--units", "24"]
    assert lstm_cpu.main([*options, "--out", "lstm.json"]) == 0
    rows = json.loads((tmp_path / "lstm.json").read_text())["rows"]
    assert [row["activity"] for row in rows] == [pytest.approx(0.2, abs=0.02), 1.0]
    for row in rows:
        times = row["training"]["milliseconds"]
        assert row["training"]["ratio"] == times["lstm"] / times["elstm"]
        assert row["inference"]["ratio"] > 0
        assert row["stream"]["microseconds_per_step"]["elstm"] > 0
    assert "H   24 activity" in capsys.readouterr().out


def test_wrong_layers_and_engines_are_refused(monkeypatch):
    layer, x = egru.ELSTM.from_lstm(nn.LSTM(20, 24)), torch.randn(6, 3, 20)
    assert lstm_cpu.check(layer, x) < 1e-12
    run = egru.ELSTM.run_direction

    def wrong(self, *arguments):
        y, c, state = run(self, *arguments)
        return (1.01 * y if self.backend == "cpu" else y), c, state

    monkeypatch.setattr(egru.ELSTM, "run_direction", wrong)
    assert lstm_cpu.check(layer, x) > 1e-3
    with pytest.raises(SystemExit, match="differs from the reference by"):
        lstm_cpu.measure(24, 0.2, 1, 0.001)
    other = egru.EventEngine(egru.ELSTM(20, 24))
    assert lstm_cpu.check_engine(layer, other, x[:, 0]) > 0.1
