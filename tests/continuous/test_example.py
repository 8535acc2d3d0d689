"""The script examples/continuous.py."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from egru.data import Recording


@pytest.fixture
def example() -> dict[str, Any]:
    torch.set_default_dtype(torch.float32)  # restored by the fixture of all tests
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "continuous.py"))


def test_timing_task_runs_from_end_to_end(example, tmp_path):
    make_full_task = example["make_timing_task"]

    def make_small_task(config):
        task = make_full_task(config)
        task.train, task.validation, task.test = task.train[:24], task.validation[:12], task.test[:12]
        return task

    example["TASKS"]["timing"] = make_small_task
    result = example["main"](["timing", "--epochs", "1", "--hidden", "8", "--output", str(tmp_path)])
    assert 0 <= result["test"] <= 1
    assert len(result["history"]) == 1
    assert (tmp_path / "timing.png").stat().st_size > 5000
    assert (tmp_path / "timing.json").is_file()


def test_timing_samples_differ_only_in_their_times(example):
    task = example["make_timing_task"](example["Config"]())
    for sample in task.train[:50]:
        assert sorted(sample.channels.tolist()) == [0, 1, 2]
        assert sample.times.diff().min() > 0.3
    assert {s.label for s in task.train} == set(range(6))
    train_times = {tuple(s.times.tolist()) for s in task.train}
    assert not train_times & {tuple(s.times.tolist()) for s in task.validation + task.test}


def test_pooling_keeps_every_sixth_event_of_a_cell(example):
    n = 13
    recording = Recording(
        torch.arange(2 * n) * 100, torch.tensor([3, 30] * n), torch.full((2 * n,), 7), torch.ones(2 * n).long(), 2
    )
    sample = example["pool_events"](recording)
    assert sample.label == 2
    torch.testing.assert_close(sample.times, torch.tensor([1.0, 1.1, 2.2, 2.3]))
    assert sample.channels.tolist() == [49 + 7, 49 + 13, 49 + 7, 49 + 13]
    shifted = example["pool_events"](recording, (10, 0))  # moves the second column of pixels out of the image
    assert shifted.channels.tolist() == [49 + 9] * 2
