"""The scripts examples/continuous.py and benchmarks/continuous_tasks.py."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example() -> dict[str, Any]:
    torch.set_default_dtype(torch.float32)  # restored by the fixture of all tests
    return runpy.run_path(str(ROOT / "examples" / "continuous.py"))


@pytest.mark.parametrize(
    "arguments", [["yinyang"], ["order", "--output", "membrane"], ["intervals", "--output", "membrane", "--freeze"]]
)
def test_tasks_run_from_end_to_end(example, tmp_path, arguments):
    task = arguments[0]
    example["TASKS"][task] = dataclasses.replace(example["TASKS"][task], samples=20, hidden=6)
    result = example["main"]([*arguments, "--epochs", "1", "--batch", "10", "--folder", str(tmp_path)])
    assert 0 <= result["test"] <= 1
    assert len(result["history"]) == 1
    assert (tmp_path / f"{task}.png").stat().st_size > 5000
    assert json.loads((tmp_path / f"{task}.json").read_text())["test"] == result["test"]


def test_frozen_layer_does_not_change(example):
    task = dataclasses.replace(example["TASKS"]["yinyang"], hidden=6)
    model = example["Classifier"](task, example["Config"](freeze=True))
    assert not any(p.requires_grad for p in model.layer.parameters())
    samples = task.draw(8, 0)
    model.loss(model(samples)[1], samples.labels).backward()
    assert model.output.U.grad.abs().max() > 0


def test_baselines_of_the_tasks(monkeypatch, tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    script = runpy.run_path(str(ROOT / "benchmarks" / "continuous_tasks.py"))
    path = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["x", "--only", "baselines", "--seeds", "0", "--results", str(path)])
    script["main"]()
    baselines = json.loads(path.read_text())["baselines"]
    assert baselines["order-times"][0] > 0.99  # the order is linear in the times, so times are no evidence
    assert baselines["order-counts"][0] < 0.25
    assert abs(baselines["intervals-counts"][0] - 0.5) < 0.06
    assert baselines["yinyang-times"][0] < 0.7
