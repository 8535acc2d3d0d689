"""The record and the figure of accuracy against time per pixel."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tradeoff  # pyright: ignore[reportMissingImports]


def test_accuracies_are_those_of_the_recorded_runs():
    points = json.loads(tradeoff.RECORD.read_text())["points"]
    for name, point in points.items():
        network = name.partition(",")[0]
        if network in tradeoff.DENSE_RUNS:
            assert point["test_accuracy"] == tradeoff.recorded_accuracy(tradeoff.DENSE_RUNS[network])[0]


@pytest.mark.parametrize("theme", [tradeoff.LIGHT, tradeoff.DARK], ids=lambda theme: theme.name)
def test_figure_labels_every_point(theme, tmp_path):
    record = json.loads(tradeoff.RECORD.read_text())
    tradeoff.draw(record, theme, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    for name, point in record["points"].items():
        assert name in text
        assert f"{point['microseconds_per_pixel']:.1f} µs, {100 * point['test_accuracy']:.2f} %" in text


def test_stored_figures_show_the_record_of_the_shipped_network():
    points = json.loads(tradeoff.RECORD.read_text())["points"]
    shipped = [point for name, point in points.items() if name.startswith("EGRU")]
    assert {point["accuracy_from"] for point in shipped} == {'egru.pretrained("smnist")'}
    for theme in (tradeoff.LIGHT, tradeoff.DARK):
        text = (tradeoff.IMAGES / f"tradeoff-{theme.name}.svg").read_text()
        for point in points.values():
            assert f"{point['microseconds_per_pixel']:.1f} µs, {100 * point['test_accuracy']:.2f} %" in text
