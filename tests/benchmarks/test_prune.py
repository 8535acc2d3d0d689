"""benchmarks/prune.py: pruning of a small run, and the stored tables in the documentation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import prune
from egru import experiments, runs
from egru.format import count

ROOT = Path(__file__).parents[2]


def test_pruning_a_run_writes_a_record(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    torch.set_default_dtype(torch.float32)
    config = replace(experiments.find("digits").make(), epochs=1, limit=60, hidden=20, batch=30)
    runs.train("digits", config, tmp_path / "run", page=False)
    prune.main([str(tmp_path / "run"), "--ranked-on", "30", "--turns", "2", "--out", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    rows = {row["fraction"]: row for row in record["rows"]}
    assert rows[0.5]["units"] == [10]
    assert rows[0.0]["parameters"] > rows[0.5]["parameters"]
    assert all(row["microseconds"] > 0 and 0 <= row["accuracy"] <= 1 for row in rows.values())
    assert all(0 <= row["backward_sparsity"] <= 1 for row in rows.values())
    pytest.importorskip("matplotlib", reason="figures require matplotlib")
    _, sparsity = prune.figure(record).axes
    assert [len(line.get_xdata()) for line in sparsity.lines] == [6, 6]
    printed = capsys.readouterr().out
    assert f"| 50 % | 10 | {count(rows[0.5]['parameters'])} |" in printed


def test_training_starts_from_a_network_with_fewer_units(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    torch.set_default_dtype(torch.float32)
    config = replace(experiments.find("digits").make(), epochs=1, limit=60, hidden=20, batch=30)
    runs.train("digits", config, tmp_path / "run", page=False)
    prune.main([str(tmp_path / "run"), "--ranked-on", "30", "--units", "16", "--write", str(tmp_path / "small")])
    small = runs.load(tmp_path / "small").model
    assert small.get_submodule("layer0").hidden_size == 16
    start = replace(config, hidden=16, start_from=str(tmp_path / "small"), learning_rate=1e-30)
    runs.train("digits", start, tmp_path / "continued", page=False)
    continued = runs.load(tmp_path / "continued").model.state_dict()
    assert all(torch.equal(continued[name], value) for name, value in small.named_parameters())
    with pytest.raises(SystemExit):
        prune.main([str(tmp_path / "run"), "--units", "16"])


def test_documentation_contains_the_stored_tables():
    page = (ROOT / "docs" / "guides" / "pruning.md").read_text()
    stored = sorted((ROOT / "benchmarks" / "results").glob("prune_*.json"))
    assert len(stored) == 2
    for path in stored:
        assert prune.table(json.loads(path.read_text())) in page
