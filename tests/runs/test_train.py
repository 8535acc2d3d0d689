"""``runs.train``: what exists is handed over to the report page, and the result does not depend on the page."""

import dataclasses
import errno
import sys

import pytest
import torch

from egru import cli, files
from egru.experiments import build, find, load_data, smoke
from egru.report import page
from egru.runs import report, resume, train
from egru.training import Run

SMALL = dataclasses.replace(smoke(find("digits").make()), hidden=8, epochs=2, limit=60)


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(page, "_png_files", lambda runs, rasters: {})  # tested in tests/report


def test_data_and_model_are_built_once(tmp_path, monkeypatch):
    calls = []
    for module in ("train", "load"):
        for function in (load_data, build):
            monkeypatch.setattr(
                sys.modules[f"egru.runs.{module}"],
                function.__name__,
                lambda *arguments, function=function: calls.append(function.__name__) or function(*arguments),
            )
    train("digits", SMALL, tmp_path / "run", log=lambda message: None)
    assert calls == ["load_data", "build"]
    assert 'id="raster-1"' in (tmp_path / "run" / "report" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device", "index.html"), KeyError("a bug")])
def test_result_is_returned_if_the_page_cannot_be_written(error, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise error

    messages = []
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["egru.runs.report"], "write_report", fail)
        result = train("digits", SMALL, tmp_path / "run", messages.append)
    assert result == Run.open(tmp_path / "run").result()
    (message,) = messages
    assert message.startswith("the report page was not written (")
    assert message.endswith(f"`egru report {tmp_path / 'run'}` writes it")
    assert not (tmp_path / "run" / "report").exists()
    assert resume(tmp_path / "run", messages.append) == result
    assert messages[1:] == [f"{tmp_path / 'run'} is finished; its report page is written again"]
    assert (tmp_path / "run" / "report" / "index.html").exists()


def test_kill_while_the_page_is_written_is_repaired_by_resume(tmp_path, monkeypatch):
    original, calls = files.replace_file, []

    def stop(path, data, **options):
        calls.append(path.name)
        if path.name == "index.html":
            raise KeyboardInterrupt
        original(path, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(page, "replace_file", stop)
        with pytest.raises(KeyboardInterrupt):
            train("digits", SMALL, tmp_path / "run", lambda message: None)
    assert calls == ["report.json", "index.html"]
    result = Run.open(tmp_path / "run").result()
    assert resume(tmp_path / "run", lambda message: None) == result is not None
    assert (tmp_path / "run" / "report" / "index.html").exists()


def test_damaged_environment_does_not_lose_the_scores(tmp_path, capsys, monkeypatch):
    original = Run.write_result

    def write_result(run, result):
        (run.folder / "environment.json").write_text("{")
        original(run, result)

    monkeypatch.setattr(Run, "write_result", write_result)
    monkeypatch.chdir(tmp_path)
    options = ["--smoke", "--hidden", "8", "--epochs", "2", "--limit", "60", "--out", "run"]
    assert cli.main(["train", "digits", *options]) == 0
    *_, message, scores, _energy, last = capsys.readouterr().out.splitlines()
    assert message.startswith("the report page was not written (ValueError: run/environment.json: not a JSON file: ")
    assert scores.startswith("test, epoch ")
    assert last == "run folder: run"
    assert cli.main(["report", "run"]) == 1
    assert capsys.readouterr().err.startswith("egru: run/environment.json: not a JSON file: ")


def test_page_after_training_equals_that_of_the_report_command(tmp_path):
    train("digits", SMALL, tmp_path / "run", log=lambda message: None)
    after_training = (tmp_path / "run" / "report" / "index.html").read_text(encoding="utf-8")
    assert report([tmp_path / "run"], tmp_path / "again").read_text(encoding="utf-8") == after_training
