"""Report pages of runs: what is read from their folders, and what the page says if something is missing."""

import dataclasses
import json
import shutil
import sys

import numpy as np
import pytest
import torch

from egru.data import Classification, Split, Text
from egru.experiments import RECIPES, build, find, load_data, smoke
from egru.experiments.config import ClassifierConfig, LanguageConfig
from egru.report import page, read_runs
from egru.runs import report, train
from egru.runs.command import train_command
from egru.runs.raster import draw_rasters
from egru.runs.timing import recorded_step_time
from egru.training import Run, RunError, checkpoint


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def no_files(monkeypatch):
    monkeypatch.setattr(page, "_png_files", lambda runs, rasters: {})  # tested in tests/report


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Finished runs of an EGRU and a GRU with two epochs each."""
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_png_files", lambda runs, rasters: {})
        for name in ("digits", "digits-gru"):
            small = dataclasses.replace(smoke(find(name).make()), hidden=8, epochs=2, limit=60)
            train(name, small, folder / name, log=lambda text: None)
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def test_finished_run_has_a_page(runs):
    source = (runs / "digits" / "report" / "index.html").read_text(encoding="utf-8")
    assert "digits, EGRU 8" in source
    assert 'id="raster-2"' in source
    assert "egru train digits --epochs 2 --batch 20 --evaluation-batch 120 --hidden 8 --limit 60" in source
    (run,) = read_runs(runs / "digits" / "report" / "report.json")
    result = Run.open(runs / "digits").result()
    assert result is not None
    assert run.accuracy == result.test.accuracy
    assert run.activity == result.activity
    assert [epoch.epoch for epoch in run.history] == [1, 2]
    assert run.config["threshold.mean"] == -4.0
    assert "root" not in run.config
    assert run.environment == Run.open(runs / "digits").environment()


def test_several_runs_are_shown_side_by_side(runs, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = report([runs / "digits", runs / "digits-gru"])
    assert path.resolve() == (tmp_path / "report" / "index.html").resolve()
    source = path.read_text(encoding="utf-8")
    assert "2 runs: EGRU 8, GRU 8" in source
    assert "Settings that differ" in source
    assert "points" in source  # against the GRU
    assert 'id="raster-1"' in source


def test_runs_of_equal_size_have_distinct_names(runs, tmp_path):
    shutil.copytree(runs / "digits", runs / "again")
    source = report([runs / "digits", runs / "again"], tmp_path / "out").read_text(encoding="utf-8")
    assert "EGRU 8 (digits)" in source
    assert "EGRU 8 (again)" in source
    assert "EGRU 8 (again): Events while reading class" in source
    source = report([runs / n for n in ("digits", "again", "digits-gru")], tmp_path / "out").read_text(encoding="utf-8")
    assert "3 runs: EGRU 8 (digits), EGRU 8 (again), GRU 8<" in source


def test_page_names_missing_checkpoints(runs):
    shutil.rmtree(runs / "digits" / "checkpoints")
    source = report([runs / "digits"]).read_text(encoding="utf-8")
    assert "The events of EGRU 8 are not drawn: the run has no checkpoints." in source
    assert 'id="raster-1"' not in source
    assert 'id="curves"' in source


def test_page_names_missing_data(runs, monkeypatch):
    def missing(config):
        raise FileNotFoundError("no digits under EGRU_DATA")

    monkeypatch.setattr(sys.modules["egru.runs.load"], "load_data", missing)
    source = report([runs / "digits"]).read_text(encoding="utf-8")
    assert "The events of EGRU 8 are not drawn: no digits under EGRU_DATA." in source


def test_events_of_a_gpu_run_are_drawn_on_the_cpu(runs):
    path = runs / "digits" / "config.json"
    plain = json.loads(path.read_text())
    plain["config"] |= {"device": "cuda", "precision": "bfloat16"}
    path.write_text(json.dumps(plain))
    assert 'id="raster-1"' in report([runs / "digits"]).read_text(encoding="utf-8")


def test_run_without_a_result_shows_its_validation_scores(runs):
    """A trial of a sweep, or a run that is not finished: the test split is not scored."""
    (runs / "digits" / "result.json").unlink()
    messages = []
    source = report([runs / "digits"], log=messages.append).read_text(encoding="utf-8")
    run, (page_run,) = Run.open(runs / "digits"), read_runs(runs / "digits" / "report" / "report.json")
    best = next(line for line in run.metrics() if line.epoch == run.best_epoch())
    assert page_run.split == "validation"
    assert page_run.accuracy == best.validation.accuracy
    assert page_run.activity.forward_macs == pytest.approx(best.activity.forward_macs)
    assert "The test split was not scored: the numbers of EGRU 8 are on validation." in source
    assert messages == [f"{runs / 'digits'} has no result: scoring epoch {best.epoch} on the validation split"]
    assert run.result() is None


def test_folder_without_epochs_is_refused(runs):
    (runs / "digits" / "result.json").unlink()
    (runs / "digits" / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="digits has no finished epoch yet; continue it with `egru train --resume"):
        report([runs / "digits"])
    with pytest.raises(RunError, match="is not a run"):
        report([runs])
    with pytest.raises(ValueError, match="at least one run"):
        report([])


def test_dense_runs_have_no_settings_of_events(runs):
    report([runs / "digits-gru"])
    (run,) = read_runs(runs / "digits-gru" / "report" / "report.json")
    assert not [name for name in run.config if name.startswith(("threshold", "surrogate", "reset"))]
    assert set(run.changed) == {"epochs", "batch", "evaluation_batch", "hidden", "limit"}


def test_many_names_are_shortened_in_the_title(runs, tmp_path):
    for i in range(4):
        shutil.copytree(runs / "digits", runs / f"copy{i}")
    folders = [runs / "digits", *(runs / f"copy{i}" for i in range(4))]
    source = report(folders, tmp_path / "out").read_text(encoding="utf-8")
    title = ", ".join(f"EGRU 8 ({folder.name})" for folder in folders[:4])
    assert f"<title>5 runs: {title}, 1 more</title>" in source


def test_time_per_step_is_measured_and_recorded(runs, tmp_path):
    folders = [runs / "digits", runs / "digits-gru"]
    report(folders, tmp_path / "out")
    assert [run.step_time for run in read_runs(tmp_path / "out" / "report.json")] == [None, None]
    source = report(folders, tmp_path / "out", time=True).read_text(encoding="utf-8")
    measured = [run.step_time for run in read_runs(tmp_path / "out" / "report.json")]
    assert [time.method.split(",")[0] for time in measured if time is not None] == ["EventEngine", "PyTorch"]
    assert "against measured time per step" in source
    report(folders, tmp_path / "again")  # reads the record
    assert [run.step_time for run in read_runs(tmp_path / "again" / "report.json")] == measured


def test_time_per_word_of_the_streaming_benchmark_is_read(tmp_path):
    assert recorded_step_time(tmp_path) is None
    record = {"contestants": {"engine float32": {"microseconds_per_word": 700.0}}, "machine": "a CPU, 2 cores"}
    (tmp_path / "engine.json").write_text(json.dumps(record))
    time = recorded_step_time(tmp_path)
    assert time is not None
    assert (time.seconds, time.machine) == (pytest.approx(7e-4), "a CPU, 2 cores")


def test_unmeasured_layer_sparsity_is_empty(runs):
    stored = Run.open(runs / "digits")
    first, second = stored.metrics()
    layers = {"layer0": dataclasses.replace(first.layers["layer0"], activity_sparsity=0.75)}
    stored.write_metrics([dataclasses.replace(first, layers=layers), dataclasses.replace(second, layers={})])
    report([runs / "digits"])
    (run,) = read_runs(runs / "digits" / "report" / "report.json")
    assert [epoch.layer_sparsity for epoch in run.history] == [{"layer0": 0.75}, {}]


def test_train_command_names_changed_fields():
    config = find("digits").make()
    assert train_command("digits", config) == "egru train digits"
    changed = dataclasses.replace(
        config,
        hidden=64,
        normalise=False,
        root="/somewhere",
        tensorboard=True,
        betas=(0.5, 0.9),
        threshold=dataclasses.replace(config.threshold, mean=-3.0, trainable=False),
    )
    words = train_command("digits", changed)
    assert set(words.split(" --")) == {
        *("egru train digits", "hidden 64", "no-normalise", "tensorboard", "betas 0.5 0.9"),
        *("threshold.mean -3.0", "threshold.no-trainable"),
    }
    tyro = pytest.importorskip("tyro", reason="options need tyro")
    again = tyro.cli(ClassifierConfig, default=config, args=words.split()[3:])
    assert again == dataclasses.replace(changed, root=None)


def test_raster_has_the_events_of_the_model():
    config = dataclasses.replace(smoke(find("digits").make()), hidden=8, layers=2)
    data = load_data(config)
    assert isinstance(data, Classification)
    model, _ = build(config, data)
    first, second = draw_rasters(model, config, data)
    assert first.layers == (("layer0", 8), ("layer1", 8))
    y, _ = model.get_submodule("layer0")(data.validation.x[:1].transpose(0, 1))
    np.testing.assert_array_equal(first.events[:, :8], y[:, 0].detach().numpy())
    np.testing.assert_array_equal(first.image, data.validation.x[0].reshape(8, 8))
    assert first.title != second.title
    assert f"class {int(data.validation.y[0])}" in first.title
    dense = dataclasses.replace(config, cell="gru", uniform_gates=False, zoneout=0.0)
    assert draw_rasters(build(dense, data)[0], dense, data) == []
    permuted = dataclasses.replace(config, data="permuted-digits")
    assert draw_rasters(model, permuted, data)[0].image is None


def test_rasters_show_frames_and_text():
    config = ClassifierConfig(data="dvs", hidden=4)
    split = Split(torch.rand(3, 5, 2, 32, 32), torch.tensor([1, 1, 0]))
    data = Classification("film", 2, split, split, split)
    first, second = draw_rasters(build(config, data)[0], config, data)
    assert first.input.shape == (5, 2048)
    assert second.image is not None
    np.testing.assert_allclose(second.image, split.x[2].sum(1), rtol=1e-6)
    words = LanguageConfig(hidden=6, embedding=5, layers=2)
    ids = torch.arange(400) % 3
    text = Text("t", ["a", "b", "c"], ids, ids, ids)
    (raster,) = draw_rasters(build(words, text)[0], words, text)
    assert raster.words[:4] == ("a", "b", "c", "a")
    assert raster.layers == (("layer0", 6), ("layer1", 5))
    assert raster.input.shape == (160, 5)


def test_page_names_a_damaged_checkpoint(runs):
    for folder in (runs / "digits" / "checkpoints").iterdir():
        (folder / checkpoint.WEIGHTS).write_bytes(b"")
    source = report([runs / "digits"], log=lambda text: None).read_text(encoding="utf-8")
    assert "The events of EGRU 8 are not drawn" in source
    assert "no intact checkpoint" in source


def test_train_command_of_a_recipe_has_no_options():
    assert all(train_command(name, recipe.make()) == f"egru train {name}" for name, recipe in RECIPES.items())
