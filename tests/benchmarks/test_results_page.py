"""Tests of the script that writes docs/results/experiments.md."""

import dataclasses
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from egru import experiments, runs
from egru.activity import LayerCost, count_parameters, macs_per_step
from egru.experiments.build import Shape, build_classifier
from egru.experiments.config import RecipeConfig
from egru.experiments.tables import TABLES
from egru.training import EpochMetrics, Result, Run
from egru.training.records import KeptRecord
from tests.training.tiny import sequences, text

pytest.importorskip("matplotlib", reason="figures require matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import results_page  # pyright: ignore[reportMissingImports]
from results_records import wall_clock  # pyright: ignore[reportMissingImports]


def load(config: RecipeConfig):
    return text() if config.data == "ptb" else sequences()


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch):
    torch.set_default_dtype(torch.float32)
    for module in ("train", "load"):
        monkeypatch.setattr(sys.modules[f"egru.runs.{module}"], "load_data", load)


def train(tmp_path: Path, recipe: str, name: str, **changes) -> tuple[Result, list[EpochMetrics]]:
    """Train a small run of ``recipe``, store its records as ``name``, and return its result and metrics."""
    config = dataclasses.replace(experiments.smoke(experiments.find(recipe).make()), **changes)
    runs.train(recipe, config, tmp_path / name, log=lambda _: None, page=False)
    runs.export(tmp_path / name, tmp_path / "runs" / name)
    trained = Run.open(tmp_path / name)
    result = trained.result()
    assert result is not None
    return result, trained.metrics()


def write_page(tmp_path: Path) -> str:
    results_page.main(
        ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "docs" / "results" / "experiments.md")]
    )
    return (tmp_path / "docs" / "results" / "experiments.md").read_text()


def our_rows(page: str) -> list[list[str]]:
    """Return the cells of the rows of our runs, without recipes that were not run."""
    rows = [line for line in page.splitlines() if "| ours" in line and "not run" not in line]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_recipes_without_runs_are_listed_as_not_run(tmp_path):
    page = write_page(tmp_path)
    rows = [line for line in page.splitlines() if "| ours |" in line]
    assert len(rows) == sum(len(task.models) for task in results_page.TASKS)
    assert all(row.count("not run") == 9 for row in rows)
    for number in ("98.3 %", "95.5 ± 1.6 %", "98.8 %", "99.4 %", "95.1 %", "57.2", "58.7", "59.5 (mean 59.7 ± 0.1)"):
        assert f"| {number} |" in page
    assert "images/" not in page
    widths = {line.count("|") for line in page.splitlines() if line.startswith("| ")}
    assert widths == {len(results_page.TASKS[0].head()) + 1}


def test_rows_of_the_paper_name_their_table_and_are_all_there(tmp_path):
    rows = [line for line in write_page(tmp_path).splitlines() if "| paper, Table" in line or "| quoted, Table" in line]
    models = {recipe for task in results_page.TASKS for recipe in task.models}
    tables = {table for task in results_page.TASKS for table in task.tables}
    papers = [paper for recipe in models for paper in experiments.RECIPES[recipe].papers]
    papers += [paper for table in tables for paper in TABLES[table].quoted.values()]
    assert len(rows) == len(papers)
    assert models == {recipe for table in tables for recipe in TABLES[table].recipes()}
    for name in ("He et al.", "Innocenti et al.", "128 by 128", "Melis et al."):
        assert sum(name in row for row in rows) == 1
    assert sum("Gu et al." in row for row in rows) == 2


def test_numbers_of_the_paper_for_other_frames_are_in_a_separate_table(tmp_path):
    section = write_page(tmp_path).split("## DVS128 Gesture")[1].split("\n## ")[0]
    ours, paper = section.split("The paper's rows, for its own data and not comparable with the rows above:")
    assert "| paper, Table" not in ours
    assert "| ours |" not in paper
    assert "| EGRU 512 | paper, Table 1 | 5.5M | 88.0 % |" in paper
    assert "| EGRU 1024 | paper, Table S1, over 5 runs | 15.7M | 87.7 ± 2.1 % | - | 79.8 ± 3.3 % |" in paper
    assert "| EGRU 1024, with augmentation | paper, Table 1 | 15.7M | 97.1 % |" in paper
    assert "| EGRU 1024, hard clear | paper, Table S4 | - | 87.2 % |" in paper


def test_page_says_what_is_counted_and_where_settings_differ(tmp_path):
    page = " ".join(write_page(tmp_path).split())
    config = experiments.find("smnist").make()
    assert isinstance(config, experiments.ClassifierConfig)
    model = build_classifier(config, Shape((1,), 784, 10))
    layer = count_parameters(model.get_submodule("layer0"))
    assert f"{layer / 1e6:.3f}" == "1.048"
    assert f"together {count_parameters(model) - layer:,} (1.056M)" in page
    assert macs_per_step([LayerCost(1, 590)]) == 1_047_840  # 1.048M
    assert "1.054M MACs of GRU 590 are 1.048M of the layer and 5.9K of the readout" in page
    assert "131K MACs, the 256 x 512 recurrent weights" in page
    evnn, paper = experiments.find("ptb-evnn").make(), experiments.find("ptb-egru-1350").make()
    assert isinstance(evnn, experiments.LanguageConfig)
    assert isinstance(paper, experiments.LanguageConfig)
    assert f"last layer of {evnn.embedding} units instead of {paper.embedding}" in page
    assert f'`reset="{evnn.reset}"`' in page
    assert (paper.reset, evnn.reset_gate, paper.reset_gate) == ("output", "after", "before")
    assert (evnn.freeze_thresholds, paper.freeze_thresholds) == (True, False)
    assert f"{evnn.epochs} epochs instead of {paper.epochs}" in page


def test_stored_page_matches_the_records(tmp_path):
    results_page.main(["--out", str(tmp_path / "results.md")])
    stored = Path(__file__).parents[2] / "docs" / "results"
    assert (stored / "experiments.md").read_text() == (tmp_path / "results.md").read_text()
    assert {path.name for path in (tmp_path / "images").iterdir()} <= {
        path.name for path in (stored / "images").iterdir()
    }


def test_row_shows_the_recorded_numbers(tmp_path):
    result, metrics = train(tmp_path, "ptb-evnn", "first")
    page = write_page(tmp_path)
    (cells,) = our_rows(page)
    activity = result.activity
    assert cells[1] == f"ours, seed {experiments.find('ptb-evnn').make().seed}"
    assert cells[3] == f"**{result.test.perplexity:.2f}**"
    assert cells[4] == f"{metrics[result.best_epoch - 1].validation.perplexity:.2f}"
    assert cells[5] == f"{100 * activity.activity_sparsity:.1f} %"
    assert cells[7] == f"{activity.forward_macs / 1e3:.3g}K"
    mean = statistics.mean(line.training_activity.backward_sparsity for line in metrics)  # pyright: ignore
    assert cells[6].startswith(f"{100 * mean:.1f} % (skippable ")
    assert "    egru train ptb-evnn --epochs 3 " in page
    assert "--threshold" not in page  # the recipe's default
    images = {path.name for path in (tmp_path / "docs" / "results" / "images").iterdir()}
    assert images == {"ptb-training.png", "first-sparsity.png"}
    (tmp_path / "runs" / "first" / "result.json").unlink()
    unmeasured = {"layers": {}, "training_activity": None, "training_layers": None, "elapsed": None}
    Run.open(tmp_path / "runs" / "first").write_metrics([dataclasses.replace(line, **unmeasured) for line in metrics])
    page = write_page(tmp_path)  # unfinished, without metrics per layer
    (cells,) = our_rows(page)
    assert cells[1].endswith(", unfinished")
    assert cells[2:4] == ["-", "-"]
    assert cells[4] == f"{min(line.validation.perplexity or math.inf for line in metrics):.2f}"
    assert cells[8] == "3 of 3"
    assert cells[10].endswith(", without checkpoints")
    assert "sparsity.png" not in page


def test_derived_and_fine_tuned_runs_have_separate_rows(tmp_path):
    _, metrics = train(tmp_path, "ptb-evnn", "first")
    train(tmp_path, "ptb-evnn", "second", start_from=str(tmp_path / "first"))
    derived = tmp_path / "runs" / "third"
    runs.quieten(tmp_path / "first", derived, floor=(0.0, 0.1, 0.2), log=lambda _: None)
    result = Run.open(derived).result()
    assert result is not None
    assert result.derivation is not None
    page = write_page(tmp_path)
    rows = our_rows(page)
    seed = f"ours, seed {experiments.find('ptb-evnn').make().seed}"
    assert [cells[1] for cells in rows] == [seed, f"{seed}, fine-tuned, hidden 48", f"{seed}, thresholds raised"]
    assert rows[2][3] == f"**{result.test.perplexity:.2f}**"
    before, chosen = (trial.validation.perplexity for trial in result.derivation.trials)
    assert rows[2][4] == f"{result.derivation.validation.perplexity:.2f} (one column: {chosen:.2f})"
    assert rows[0][4].endswith(f" (one column: {before:.2f})")
    assert rows[2][6] == rows[0][6]  # measured in the training of the first run
    assert rows[2][8] == f"{len(metrics)} (best {result.best_epoch})"
    assert "    egru quieten first OUT --floor 0 0.1 0.2\n" in page
    assert "third-sparsity.png" not in page


def test_pruning_page_lists_every_stored_trial():
    results = (Run.open(path.parent).result() for path in results_page.RUNS.glob("*/result.json"))
    (result,) = (
        result
        for result in results
        if result is not None and result.derivation is not None and result.derivation.source.startswith("ptb")
    )
    assert result.derivation is not None
    page = (results_page.ROOT / "docs" / "guides" / "pruning.md").read_text()
    rows = [
        f"| {' / '.join(f'{floor:g}' for floor in trial.floor)} | {trial.validation.perplexity:.2f} | "
        f"{100 * trial.activity_sparsity:.1f} % | {trial.forward_macs / 1e6:.2f}M |\n"
        for trial in result.derivation.trials
    ]
    assert "".join(rows) in page
    assert f"to {result.test.perplexity:.2f} while" in page
    assert f"to {100 * result.activity.activity_sparsity:.1f} % and" in page
    assert f"to {result.activity.forward_macs / 1e6:.2f}M " in page


def test_seeds_are_averaged(tmp_path):
    results = [train(tmp_path, "smnist", f"seed{seed}", seed=seed, device="cpu")[0] for seed in (0, 1)]
    train(tmp_path, "smnist", "wider", hidden=20)  # another setting, not part of the mean
    train(tmp_path, "smnist-gru-590", "dense")
    page = write_page(tmp_path)
    rows = our_rows(page)
    assert [cells[1] for cells in rows] == ["ours, seed 0", "ours, seed 1", "ours, mean of 2", *["ours, seed 0"] * 2]
    tests = [result.test.accuracy for result in results]
    assert rows[0][3] == f"**{100 * tests[0]:.2f} %**"
    assert rows[2][3] == f"**{100 * statistics.mean(tests):.2f} % ± {100 * statistics.stdev(tests):.2f} %**"
    assert rows[2][8] == f"3 (best {', '.join(str(result.best_epoch) for result in results)})"
    assert rows[2][9] == Run.open(tmp_path / "seed0").environment().machine
    assert "Other seeds: `seed1`." in page
    assert "### seed1" not in page
    assert rows[4][5:7] == ["-", "-"]  # no events
    assert "sparsity.png" not in page  # a single layer is in the task's figure
    (layer,) = results[0].activity.layers
    assert f"| layer0 | 48 | {layer.active.count(0)} |" in page
    assert (tmp_path / "docs" / "results" / "images" / "smnist-training.png").exists()


def test_best_epoch_is_that_of_the_saved_ones(tmp_path):
    train(tmp_path, "smnist", "first", save_every=2, epochs=4)
    (cells,) = our_rows(write_page(tmp_path))
    best = Run.open(tmp_path / "first").result()
    assert best is not None
    assert cells[8] == f"4 (best of every 2nd: {best.best_epoch})"


def test_remark_of_a_record_follows_the_seed(tmp_path):
    train(tmp_path, "ptb-evnn", "first")
    train(tmp_path, "ptb-evnn", "second", start_from=str(tmp_path / "first"))
    KeptRecord("egru train", "2026-11-16", "started from int8 weights").write(
        tmp_path / "runs" / "second" / "record.json"
    )
    assert [cells[1] for cells in our_rows(write_page(tmp_path))] == [
        "ours, seed 0",
        "ours, seed 0, fine-tuned, hidden 48, started from int8 weights",
    ]
    stored = results_page.RUNS / "ptb-evnn-seed0-20261116-0720" / "record.json"
    assert KeptRecord.read(stored).note == "started from int8 weights"


def test_wall_clock_adds_up_the_parts_of_a_resumed_run():
    lines: list[Any] = [SimpleNamespace(elapsed=t, seconds=1.0) for t in (2.0, 4.0, 3.0, 5.0, 9.0)]
    assert wall_clock(lines) == (13.0, True)
    unmeasured: Any = SimpleNamespace(elapsed=None, seconds=1.5)
    assert wall_clock([unmeasured] * 2) == (3.0, False)
    assert wall_clock([]) == (0, False)
