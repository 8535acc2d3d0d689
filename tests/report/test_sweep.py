"""Tests of the page of a sweep with made-up trials."""

import dataclasses
import json
import re
from typing import Any

import pytest

from egru.environment import Environment
from egru.report.sweep import SweepReport, TrialReport, write_sweep_report
from tests.report.parsing import Page


def trial(number: int, quality: float | None, macs: float | None, state: Any = "complete", **settings) -> TrialReport:
    settings = {"hidden": 8 * number + 8, "reset": ("none", "hard")[number % 2], "epochs": 4} | settings
    return TrialReport(number, state, quality, macs, 0.8, 4, 12.0, settings)


def sweep(*trials: TrialReport, score: Any = "accuracy", **changes) -> SweepReport:
    return SweepReport("here", "digits", score, trials, Environment.current(), "egru report here", **changes)


SWEEP = sweep(trial(0, 0.8, 300.0), trial(1, 0.9, 200.0), trial(2, 0.85, 100.0), trial(3, 0.7, 50.0, "pruned"))


def figures(path) -> dict[str, Any]:
    return json.loads(re.search(r'id="numbers">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])  # pyright: ignore


def test_front_has_the_complete_trials_that_none_surpasses():
    assert [each.number for each in SWEEP.front()] == [2, 1]
    perplexity = sweep(trial(0, 80.0, 300.0), trial(1, 60.0, 200.0), trial(2, 70.0, 100.0), score="perplexity")
    assert [each.number for each in perplexity.front()] == [2, 1]
    equal = sweep(trial(0, 0.9, 100.0), trial(1, 0.9, 100.0), trial(2, 0.9, 50.0))
    assert [each.number for each in equal.front()] == [2]


def test_complete_trials_come_first():
    failed = trial(4, None, None, "failed")
    ranked = dataclasses.replace(SWEEP, trials=(failed, *SWEEP.trials)).ranked()
    assert [each.number for each in ranked] == [1, 2, 0, 3, 4]


def test_page_shows_table_front_and_slices(tmp_path):
    path = write_sweep_report(tmp_path / "report", dataclasses.replace(SWEEP, notes=("trial-00009 is left out.",)))
    parsed = Page(path)
    text = " ".join(parsed.text.split())
    assert parsed.figures == ["pareto", "slices"]
    assert parsed.addresses == []
    assert "The best accuracy is 90.00 % . Trial 1 reached it with 200 MACs per step. 2 trials form the" in text
    assert "egru train --resume here/trial-00001" in text
    assert "The test split was not scored" in text
    assert "trial-00009 is left out." in text
    columns = "trial state accuracy MACs per step activity sparsity epochs training time hidden reset"
    assert f"{columns} 1 (front) complete 90.00 % 200 80.0 % 4 12.0 s 16 hard 2 (front) complete" in text
    assert "3 pruned 70.00 % 50 80.0 % 4 12.0 s 32 hard Complete trials" in text
    assert "Shared settings epochs 4" in text
    data = figures(path)
    (pareto,) = data["pareto"]["panels"]
    assert [pareto["points"][i]["name"] for i in pareto["front"]] == ["trial 2", "trial 1"]
    assert [point["hollow"] for point in pareto["points"]] == [False, False, False, True]
    hidden, reset = data["slices"]["panels"]
    assert [point["x"] for point in hidden["points"]] == [16, 24, 8, 32]
    assert reset["x"]["categories"] == ["hard", "none"]
    assert [point["x"] for point in reset["points"]] == [0, 1, 1, 0]


def test_trials_that_would_stretch_the_axis_are_left_out_and_counted(tmp_path):
    trials = [trial(i, 0.95 - i / 100, 100.0) for i in range(6)]
    path = write_sweep_report(tmp_path, sweep(*trials, trial(6, 0.1, 100.0), trial(7, 0.2, 90.0)))
    assert len(figures(path)["pareto"]["panels"][0]["points"]) == 6
    text = Page(path).text
    assert "Left out: 2 trials with accuracy below 79.00 %." in text
    assert "10.00 %" in text  # in the table
    path = write_sweep_report(
        tmp_path, sweep(trial(0, 60.0, 1.0), trial(1, 61.0, 1.0), trial(2, 1e9, 1.0), score="perplexity")
    )
    assert "Left out: 1 trial with perplexity above 64.00." in Page(path).text


def test_page_without_complete_trials(tmp_path):
    parsed = Page(write_sweep_report(tmp_path, sweep(trial(0, None, None, "failed"))))
    assert "No trial is complete." in parsed.text
    assert parsed.figures == []
    with pytest.raises(ValueError, match="SweepReport 'here': trials must contain at least one trial, got none"):
        sweep()


def test_text_is_escaped(tmp_path):
    one = dataclasses.replace(trial(0, 0.9, 1.0, data="<s>"), number=0)
    parsed = Page(write_sweep_report(tmp_path, sweep(one, trial(1, 0.8, 1.0, data="b"), notes=("<u>",))))
    assert not {"s", "u"} & set(parsed.tags)
