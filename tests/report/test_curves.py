"""Tests of the axes of training curves, which may be cut."""

import dataclasses

import pytest

from egru.report import figures
from egru.report.curves import panels
from tests.report import examples


def language_run(name: str, perplexities: list[float]):
    run = examples.run(name, epochs=len(perplexities), perplexity=perplexities[-1])
    history = zip(run.history, perplexities, strict=True)
    return dataclasses.replace(
        run, history=tuple(dataclasses.replace(epoch, validation_perplexity=value) for epoch, value in history)
    )


def falling(last: float, epochs: int = 40) -> list[float]:
    return [last + 240 * 0.7**i for i in range(epochs)]


def test_first_epochs_do_not_stretch_the_perplexity_axis():
    runs = [language_run("EGRU", falling(56)), language_run("GRU", falling(72))]
    score = panels(runs)[1]
    low, high = score.limits(runs)
    assert low is None
    assert high is not None
    late = [y for run in runs for _, y in score.points(run)[10:]]
    assert max(late) <= high < 90
    data, caption = figures.curves(runs).data, figures.curves(runs).caption
    assert data is not None
    assert data["panels"][1]["high"] == pytest.approx(high, rel=1e-4)
    assert len(data["panels"][1]["series"][0]["points"]) == 40  # nothing is left out of the data
    last = max(epoch for run in runs for epoch, y in score.points(run) if y > high)
    assert f"Validation perplexity above {high:.3g} is cut off, up to epoch {last}." in caption


def test_axis_shows_everything_if_a_cut_would_gain_little():
    runs = [language_run("EGRU", [80.0 - i for i in range(20)])]
    assert panels(runs)[1].limits(runs) == (None, None)
    assert panels(runs)[1].describe_cut(runs) == ""


def test_late_and_better_values_are_never_cut():
    diverged = [60.0] * 10 + [58.0] * 2 + [300.0] * 2 + [58.0] * 26
    runs = [language_run("EGRU", diverged)]
    assert panels(runs)[1].limits(runs) == (None, None)
    early_best = [300.0, 50.0, *[70.0] * 20]
    low, high = panels([language_run("EGRU", early_best)])[1].limits([language_run("EGRU", early_best)])
    assert low is None
    assert high is not None
    assert 70 < high < 80


def test_accuracy_axis_is_cut_below():
    run = examples.run(epochs=40)
    low, high = panels([run])[1].limits([run])
    assert high is None
    assert low is not None
    assert low > 0.9
    assert f"Validation accuracy below {100 * low:.1f} % is cut off" in panels([run])[1].describe_cut([run])


def test_single_epoch_and_constant_curves_are_not_cut():
    for run in (examples.run(epochs=1), language_run("EGRU", [60.0] * 9)):
        assert [panel.limits([run]) for panel in panels([run])][1] == (None, None)
