"""The recipe runs from end to end, and its pooling keeps what it promises."""

import runpy
from pathlib import Path

import pytest
import torch

from egru.data import Recording

RECIPE = str(Path(__file__).parents[2] / "examples" / "continuous.py")


@pytest.fixture
def single():
    torch.set_default_dtype(torch.float32)  # the fixture of all tests puts it back


def test_timing_task_runs(single, tmp_path):
    recipe = runpy.run_path(RECIPE)
    small = recipe["timing"]

    def few(config):
        task = small(config)
        task.train, task.validation, task.test = task.train[:24], task.validation[:12], task.test[:12]
        return task

    recipe["run"].__globals__["timing"] = few
    result = recipe["main"](["timing", "--epochs", "1", "--hidden", "8", "--output", str(tmp_path)])
    assert 0 <= result["test"] <= 1
    assert len(result["history"]) == 1
    assert (tmp_path / "timing.png").stat().st_size > 5000
    assert (tmp_path / "timing.json").is_file()


def test_samples_of_the_timing_task_differ_in_times_alone(single):
    recipe = runpy.run_path(RECIPE)
    task = recipe["timing"](recipe["Config"]())
    for sample in task.train[:50]:
        assert sorted(sample.channels.tolist()) == [0, 1, 2]
        assert sample.times.diff().min() > 0.3
    assert {s.label for s in task.train} == set(range(6))
    early = {tuple(s.times.tolist()) for s in task.train}
    assert not early & {tuple(s.times.tolist()) for s in task.validation + task.test}


def test_pooling_keeps_every_sixth_event_of_a_cell_at_its_time(single):
    recipe = runpy.run_path(RECIPE)
    n = 13
    recording = Recording(
        torch.arange(2 * n) * 100, torch.tensor([3, 30] * n), torch.full((2 * n,), 7), torch.ones(2 * n).long(), 2
    )
    sample = recipe["pooled"](recording)
    assert sample.label == 2
    torch.testing.assert_close(sample.times, torch.tensor([1.0, 1.1, 2.2, 2.3]))
    assert sample.channels.tolist() == [49 + 7, 49 + 13, 49 + 7, 49 + 13]
    moved = recipe["pooled"](recording, (10, 0))  # the second column of pixels leaves the picture
    assert moved.channels.tolist() == [49 + 9] * 2
