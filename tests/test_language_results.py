"""The page of results: what runs recorded, and "not run" for the rest."""

import json
import sys
from pathlib import Path

import pytest
import torch

from egru import recipes
from tests.training.tiny import text

pytest.importorskip("matplotlib", reason="figures need matplotlib")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import language_results  # pyright: ignore[reportMissingImports]


@pytest.fixture(autouse=True)
def single_precision(ground, monkeypatch):
    torch.set_default_dtype(torch.float32)
    for module in ("start", "trained"):
        monkeypatch.setattr(sys.modules[f"egru.recipes.{module}"], "load", lambda config: text())


def page(tmp_path) -> str:
    language_results.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "docs" / "results.md")])
    return (tmp_path / "docs" / "results.md").read_text()


def test_nothing_is_made_up(tmp_path):
    (tmp_path / "docs").mkdir()
    written = page(tmp_path)
    rows = [line for line in written.splitlines() if "| ours |" in line]
    assert len(rows) == len(language_results.MODELS)
    assert all(row.count("not run") == 7 for row in rows)
    assert "57.2" in written
    assert "58.7" in written
    assert "images/" not in written
    stored = Path(__file__).parent.parent / "docs" / "results.md"
    if not any(language_results.RUNS.glob("ptb-*")):
        assert stored.read_text() == written


def test_a_run_and_what_it_recorded(tmp_path):
    config = recipes.smoke(recipes.find("ptb-evnn").make())
    recipes.start("ptb-evnn", config, tmp_path / "run", say=lambda _: None)
    recipes.export(tmp_path / "run", tmp_path / "runs" / "first")
    written = page(tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (row,) = (line for line in written.splitlines() if "| ours |" in line and "not run" not in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    overall = result["activity"]["overall"]
    assert cells[3] == f"**{result['test']['perplexity']:.2f}**"
    assert cells[4] == f"{100 * overall['activity_sparsity']:.1f} %"
    assert cells[6] == f"{overall['forward_macs'] / 1e6:.2f}M"
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    mean = sum(line["training_activity"]["backward_sparsity"] for line in metrics) / len(metrics)
    assert cells[5].startswith(f"{100 * mean:.1f} % (skippable ")
    assert "    egru train ptb-evnn --epochs 3 " in written
    assert "--threshold" not in written  # as in the recipe
    assert {path.name for path in (tmp_path / "docs" / "images").iterdir()} == {
        "ptb-perplexity.png",
        "first-sparsity.png",
    }
    (tmp_path / "runs" / "first" / "result.json").unlink()
    old = ("layers", "training_activity", "training_layers", "elapsed")
    lines = [json.dumps({k: v for k, v in line.items() if k not in old}) for line in metrics]
    (tmp_path / "runs" / "first" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    written = page(tmp_path)  # unfinished, and from before layers were counted
    assert "| ours, unfinished | - | validation " in written
    assert "3 of 3 |" in written
    assert "checkpoints not counted" in written
    assert "sparsity.png" not in written


def test_the_clock_of_several_sittings():
    lines = [{"elapsed": t, "seconds": 1.0} for t in (2.0, 4.0, 3.0, 5.0, 9.0)]
    assert language_results.wall_clock(lines) == (13.0, True)
    assert language_results.wall_clock([{"seconds": 1.5}] * 2) == (3.0, False)
    assert language_results.wall_clock([]) == (0, False)
