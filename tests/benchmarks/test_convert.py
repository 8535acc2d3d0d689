"""benchmarks/convert.py: every command writes a row, with tiny networks."""

import functools
import json
from dataclasses import replace

import pytest
import torch

import egru
from benchmarks import convert
from egru import experiments, runs
from egru.training import Run

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.fixture
def main(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()

    def run(*arguments):
        assert convert.main(["--results", "record.json", *arguments]) == 0
        return json.loads((tmp_path / "record.json").read_text())

    yield run
    torch.set_num_threads(before)


def test_digits_then_its_engine(main, monkeypatch):
    monkeypatch.setattr(egru, "sparsify", functools.partial(egru.sparsify, epochs=2))
    tiny = ("--hidden", "8", "--dense-epochs", "1", "--activity", "0.5", "--seeds", "1")
    row = main("digits", *tiny)["digits 0.5"]
    assert row["seeds"][0]["activity_sparsity"] > 0.4
    assert row["mean"]["dense"] == row["seeds"][0]["dense"]
    untrained = main("digits", *tiny[:2], "--dense-epochs", "0", *tiny[4:])
    assert untrained["digits 0.5"] == row
    assert untrained["digits 0.5 untrained"]["seeds"][0]["dense"] != row["seeds"][0]["dense"]
    record = main("engine", "--steps", "20", "--rounds", "2")
    assert record["digits 0.5"] == row
    engine = record["engine"]
    assert engine["network"] == "digits-1"
    assert engine["times_faster"]["torch.nn.GRU"] > 0
    assert 0 < engine["contestants"]["EventEngine float32"]["sparsity"] < 1


def test_a_run_without_and_with_training(main, tmp_path):
    config = replace(experiments.find("digits").make(), epochs=1, limit=60, hidden=8, batch=30, cell="gru", zoneout=0.0)
    runs.train("digits", config, tmp_path / "gru", page=False)
    record = main("calibrate", "gru", "--within", "0.05")
    row = record["calibrate gru"]
    assert 0 <= row["accuracy_events"] <= 1
    assert row["activity_sparsity"] > 0
    record = main("finetune", "gru", "--activity", "0.5", "--epochs", "1")
    assert record["finetune gru"]["activity_sparsity"] > 0.4
    assert record["calibrate gru"] == row
    engine = main("engine", "gru", "gru-finetune", "--steps", "20", "--rounds", "2")["engine gru"]
    assert engine["hidden"] == 8
    tuned = replace(
        runs.load(tmp_path / "gru-finetune").config, epochs=1, start_from=str(tmp_path / "gru-finetune"), root="data"
    )
    runs.train("digits", tuned, tmp_path / "tuned", page=False)
    row = main("trained", "tuned")["trained tuned"]
    result = Run.open(tmp_path / "tuned").result()
    assert result is not None
    assert row["accuracy_events"] == result.test.accuracy
    assert "--start-from gru-finetune" in row["command"]
    assert str(tmp_path) not in json.dumps(row)
    with pytest.raises(SystemExit, match="did not start from another network"):
        main("trained", "gru")
