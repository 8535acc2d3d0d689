"""benchmarks/prune.py: a run made smaller, and the kept tables in the documentation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import prune
from egru import experiments, runs
from egru.report.format import count

ROOT = Path(__file__).parents[2]


def test_a_run_without_its_quietest_units(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    torch.set_default_dtype(torch.float32)
    config = replace(experiments.find("digits").make(), epochs=1, limit=60, hidden=20, batch=30)
    runs.train("digits", config, tmp_path / "run", page=False)
    prune.main([str(tmp_path / "run"), "--seen", "30", "--turns", "2", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["share"]: row for row in found["rows"]}
    assert rows[0.5]["units"] == [10]
    assert rows[0.0]["parameters"] > rows[0.5]["parameters"]
    assert all(row["microseconds"] > 0 and 0 <= row["accuracy"] <= 1 for row in rows.values())
    shown = capsys.readouterr().out
    assert f"| 50 % | 10 | {count(rows[0.5]['parameters'])} |" in shown


def test_the_documentation_has_what_is_kept():
    written = (ROOT / "docs" / "pruning.md").read_text()
    kept = sorted((ROOT / "benchmarks" / "results").glob("prune_*.json"))
    assert len(kept) == 2
    for path in kept:
        assert prune.table(json.loads(path.read_text())) in written
