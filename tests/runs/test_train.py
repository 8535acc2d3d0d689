"""``runs.train``: what exists is handed over to the report page."""

import dataclasses
import sys

import pytest
import torch

from egru.experiments import build, find, load_data, smoke
from egru.report import page
from egru.runs import report, train

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


def test_page_after_training_equals_that_of_the_report_command(tmp_path):
    train("digits", SMALL, tmp_path / "run", log=lambda message: None)
    after_training = (tmp_path / "run" / "report" / "index.html").read_text(encoding="utf-8")
    assert report([tmp_path / "run"], tmp_path / "again").read_text(encoding="utf-8") == after_training
