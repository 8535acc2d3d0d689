"""Tests of the comparison of settings on sequential MNIST, with a few random images."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from egru import experiments, runs
from egru.data import Classification, Split
from egru.report import LIGHT
from egru.training import RunError
from tests.training.tiny import sequences

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import smnist_screen  # pyright: ignore[reportMissingImports]


@pytest.fixture(autouse=True)
def random_images(defaults, monkeypatch):
    torch.set_default_dtype(torch.float32)
    split = Split(torch.rand(40, 12, 1), torch.arange(40) % 10)
    monkeypatch.setattr(smnist_screen, "data_for", lambda *_: Classification("random", 10, split, split, split))
    monkeypatch.setattr(smnist_screen, "TRAINING_IMAGES", 40)
    monkeypatch.setitem(smnist_screen.BASE, "batch", 10)


def test_each_variant_is_stored_once(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    arguments = ["--variants", "base", "gru", "--updates", "8", "--out", str(path)]
    smnist_screen.main(arguments)
    smnist_screen.main(arguments)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["variant"] for line in lines] == ["base", "gru"]
    assert [line["updates"] for line in lines] == [8, 8]
    assert [len(line["curve"]) for line in lines] == [2, 2]
    assert lines[0]["adjoint_growth"] is not None
    assert lines[1]["adjoint_growth"] is None
    capsys.readouterr()
    smnist_screen.main(["--table", "--out", str(path)])
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_diverged_variant_is_stored(tmp_path, monkeypatch):
    monkeypatch.setitem(smnist_screen.VARIANTS, "base", {"learning_rate": 1e30, "clip": None, "schedule": "constant"})
    path = tmp_path / "lines.jsonl"
    smnist_screen.main(["--variants", "base", "--updates", "8", "--out", str(path)])
    assert "training stopped" in json.loads(path.read_text())["stopped"]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The folder of a finished run of `egru train`."""
    monkeypatch.setattr(sys.modules["egru.runs.train"], "load_data", lambda config: sequences())
    config = dataclasses.replace(experiments.smoke(experiments.find("smnist").make()), seed=4)
    runs.train("smnist", config, tmp_path / "run", log=lambda _: None, page=False)
    return tmp_path / "run"


def test_finished_run_is_added_once(tmp_path, trained):
    path = tmp_path / "lines.jsonl"
    for _ in range(2):
        smnist_screen.main(["--add", str(trained), "on a GPU", "--out", str(path)])
    (line,) = map(json.loads, path.read_text().splitlines())
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert (line["variant"], line["seed"]) == ("on a GPU", 4)
    assert line["updates"] == line["requested_updates"] == sum(epoch["train"]["steps"] for epoch in metrics)
    assert line["accuracy"] == metrics[-1]["validation"]["accuracy"]
    assert [point[2] for point in line["curve"]] == [
        pytest.approx(epoch["train"]["gradient_norm_p99"], rel=1e-2) for epoch in metrics
    ]
    assert line["changes"]["hidden"] == 48
    assert line["changes"]["rate_loss"] == 0.3
    assert not {"seed", "root", "reset"} & set(line["changes"])  # not settings, or equal to the base
    (trained / "result.json").unlink()
    with pytest.raises(RunError, match="--add requires a finished run"):
        smnist_screen.main(["--add", str(trained), "on a GPU", "--out", str(path)])


def test_figure_has_one_panel_per_variant(tmp_path):
    pytest.importorskip("matplotlib", reason="figures require matplotlib")
    entries = smnist_screen.read_entries(smnist_screen.RESULTS)
    figure = smnist_screen.draw_figure([*entries, {"variant": "stopped", "seed": 0, "updates": 0, "stopped": "NaN"}])
    panels = {axes.get_title("left").replace("\n", " "): axes for axes in figure.axes if axes.lines}
    assert set(panels) == {entry["variant"] for entry in entries}
    assert sum(len(axes.lines) for axes in panels.values()) == 2 * len(entries)
    (median, p99) = panels["base"].lines
    (base,) = (entry for entry in entries if entry["variant"] == "base")
    assert [list(median.get_ydata()), list(p99.get_ydata())] == [
        [p[1] for p in base["curve"]],
        [p[2] for p in base["curve"]],
    ]
    assert panels["fast"].get_ylim() == panels["base"].get_ylim() != panels["paper"].get_ylim()


def test_stored_figure_is_small_and_keeps_the_colours_of_all_seeds(tmp_path):
    pytest.importorskip("matplotlib", reason="figures require matplotlib")
    image = pytest.importorskip("PIL.Image", reason="the figure is compressed with Pillow")
    path = tmp_path / "norms.png"
    smnist_screen.main(["--figure", str(path)])
    assert path.stat().st_size < 300_000
    colours = [colour for _, colour in image.open(path).convert("RGB").getcolors()]
    for seed_colour in LIGHT.event[:3]:
        expected = [int(seed_colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert min(max(abs(a - b) for a, b in zip(colour, expected, strict=True)) for colour in colours) < 10


def test_study_contains_the_table():
    study = Path(__file__).parents[2] / "docs" / "results" / "smnist-study.md"
    assert smnist_screen.format_table(smnist_screen.read_entries(smnist_screen.RESULTS)) in study.read_text()
