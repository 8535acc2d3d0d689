"""The scripts examples/continuous.py and benchmarks/continuous_tasks.py."""

import concurrent.futures
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
    model.loss(*model(samples), samples.labels).backward()
    assert model.output.U.grad.abs().max() > 0


def test_high_event_rates_are_penalised(example):
    task = dataclasses.replace(example["TASKS"]["match"], hidden=6)
    samples = task.draw(8, 0)
    losses = []
    for max_rate in (100.0, 0.01):
        torch.manual_seed(0)
        model = example["Classifier"](task, example["Config"](output="membrane", max_rate=max_rate))
        losses.append(model.loss(*model(samples), samples.labels).item())
    assert losses[1] > losses[0] + 0.01


def run_script(monkeypatch, script: dict[str, Any], *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["continuous_tasks.py", *arguments])
    script["main"]()


class InProcess(concurrent.futures.Executor):
    """Runs every call at once, so that a test does not start processes."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, fn, /, *args, **kwargs):
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def script(monkeypatch) -> dict[str, Any]:
    torch.set_default_dtype(torch.float32)
    script = runpy.run_path(str(ROOT / "benchmarks" / "continuous_tasks.py"))
    monkeypatch.setitem(script["main"].__globals__, "ProcessPoolExecutor", InProcess)
    return script["main"].__globals__


def test_baselines_of_the_tasks(monkeypatch, tmp_path, script):
    run_script(monkeypatch, script, str(tmp_path), "--only", "baselines", "--seeds", "0")
    accuracy = {path.stem: json.loads(path.read_text())["test"] for path in tmp_path.glob("*.json")}
    assert accuracy["order-times-0"] > 0.99  # the order is linear in the times, so times are no evidence
    assert accuracy["order-counts-0"] < 0.25
    assert abs(accuracy["intervals-counts-0"] - 0.5) < 0.06
    assert abs(accuracy["match-counts-0"] - 0.5) < 0.06
    assert abs(accuracy["match-times-0"] - 0.5) < 0.06
    assert accuracy["yinyang-times-0"] < 0.7


def test_search_selects_settings_by_validation_for_the_trained_and_the_frozen_network(monkeypatch, tmp_path, script):
    calls = []

    def fit(task, config, *, test=True):
        calls.append((config.seed, config.freeze, config.learning_rate, test))
        result = {"validation": config.learning_rate, "history": []}
        return None, result | ({"test": 0.9} if test else {})

    config = script["example"]()["Config"]
    monkeypatch.setitem(script, "example", lambda: {"Config": config, "fit": fit, "TASKS": {}})
    monkeypatch.setitem(script, "FIXED", {})
    monkeypatch.setitem(script, "SEARCH", {"match-membrane": [{"learning_rate": rate} for rate in (1e-3, 9e-3, 2e-3)]})
    variants = ("match-membrane-frozen", "match-membrane")
    run_script(monkeypatch, script, str(tmp_path), "--only", *variants, "--seeds", "0", "1")
    assert [call[3] for call in calls if call[0] == 100] == [False] * 3  # the search does not see the test set
    assert {call for call in calls if call[0] != 100} == {(s, f, 9e-3, True) for s in (0, 1) for f in (False, True)}
    count = len(calls)
    run_script(monkeypatch, script, str(tmp_path), "--only", *variants, "--seeds", "0", "1")
    assert len(calls) == count  # recorded runs are not repeated
    monkeypatch.setitem(script, "RESULTS", tmp_path / "collected" / "tasks.json")
    (tmp_path / "collected").mkdir()
    run_script(monkeypatch, script, str(tmp_path), "--collect")
    collected = json.loads((tmp_path / "collected" / "tasks.json").read_text())
    assert [len(collected["runs"][name]) for name in variants] == [2, 2]


def test_failed_search_is_reported_and_ends_the_script(monkeypatch, tmp_path, script):
    def fit(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(script, "example", lambda: {"Config": lambda **_: None, "fit": fit, "TASKS": {}})
    with pytest.raises(SystemExit, match="out of luck"):
        run_script(monkeypatch, script, str(tmp_path), "--only", "match-membrane", "--seeds", "0")
