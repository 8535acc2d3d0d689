"""Pages of sweeps and of their trials, from the folders that a sweep writes."""

import dataclasses
import math

import pytest
import torch

from egru import cli
from egru.report import read_runs
from egru.sweep import is_sweep, report, sweep, write_outcome
from egru.training import Run, RunError, Scores
from tests.report.parsing import Page
from tests.sweep.small import settings

pytest.importorskip("optuna", reason="requires Optuna: pip install 'egru[sweep]'")


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


def test_sweep_and_trials_have_pages(tmp_path, capsys):
    here = tmp_path / "here"
    study_settings = settings(here, trials=3, objectives=("quality", "macs"), pruner="none")
    study = sweep(study_settings, lambda message: None)
    assert is_sweep(here)
    assert not is_sweep(here / "trial-00000")
    written = write_outcome(study, study_settings)
    assert here / "report" / "index.html" in written
    text = " ".join(Page(here / "report" / "index.html").text.split())
    for trial in study.get_trials():
        accuracy = f"{100 * trial.values[0]:.2f} %"
        assert f"complete {accuracy}" in text
        assert f"{trial.params['threshold']:.4g}" in text
    best = max(study.best_trials, key=lambda trial: trial.values[0])
    assert f"The best accuracy is {100 * best.values[0]:.2f} %" in text
    assert "threshold.mean" in text

    before = (here / "report" / "index.html").read_text(encoding="utf-8").split("page written")[0]
    (here / "report" / "index.html").unlink()
    (here / "trials.csv").unlink()  # written at the end of a sweep only
    assert cli.main(["report", "here"]) == 0
    assert capsys.readouterr().out == "here/report/index.html\n"
    after = (here / "report" / "index.html").read_text(encoding="utf-8").split("page written")[0]
    assert after.replace("egru report here", "") == before.replace(f"egru report {here}", "").replace(str(here), "here")

    assert cli.main(["report", "here/trial-00001"]) == 0
    (run,) = read_runs(here / "trial-00001" / "report" / "report.json")
    assert run.split == "validation"
    assert run.accuracy == study.get_trials()[1].values[0]
    assert Run.open(here / "trial-00001").result() is None  # the test split is not scored
    assert "raster-1" in Page(here / "trial-00001" / "report" / "index.html").figures

    capsys.readouterr()
    assert cli.main(["report", "here", "here/trial-00001"]) == cli.ExitCode.USAGE_OR_MISSING_FILE
    assert "here is a sweep, whose page cannot be combined with other folders" in capsys.readouterr().err


def test_page_shows_stopped_trials_and_names_damaged_ones(tmp_path):
    here = tmp_path / "here"
    study_settings = settings(here, trials=3)
    sweep(study_settings, lambda message: None)
    metrics = here / "trial-00000" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    (here / "trial-00001" / "config.json").unlink()
    run = Run.open(here / "trial-00002")
    first, last = run.metrics()
    first = dataclasses.replace(first, validation=dataclasses.replace(first.validation, accuracy=0.9876))
    run.write_metrics([first, last])
    messages = []
    text = " ".join(Page(report(here, log=messages.append)).text.split())
    assert "0 stopped " in text
    assert "2 (front) complete 98.76 %" in text  # the best epoch, not the last one
    assert "2 trials" in text
    (message,) = messages
    assert message.startswith("trial-00001 is left out: ")
    assert message in text


def test_diverged_trials_have_no_quality(tmp_path):
    here = tmp_path / "here"
    sweep(settings(here, trials=2), lambda message: None)
    run = Run.open(here / "trial-00000")
    diverged = [Scores(math.nan, 0.1, math.nan), Scores(1e3, 0.1, math.inf)]
    run.write_metrics(
        [dataclasses.replace(line, validation=s) for line, s in zip(run.metrics(), diverged, strict=True)]
    )
    text = " ".join(Page(report(here)).text.split())
    assert "0 complete - " in text
    assert "1 (front) complete " in text


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(RunError, match=r"is not a sweep: it has no folders trial-\*/ with a config.json"):
        report(tmp_path)
