"""The table of expected scaling is what its script prints."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parents[2]


def test_the_page_holds_what_the_script_prints(capsys, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(sys, "argv", ["scaling.py"])
    runpy.run_path(str(HERE / "benchmarks" / "scaling.py"), run_name="__main__")
    printed = capsys.readouterr().out.strip()
    assert printed.count("\n") > 10
    assert printed in (HERE / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_an_all_reduce_by_hand():
    script = runpy.run_path(str(HERE / "benchmarks" / "scaling.py"))
    links = script["Links"](inside=100.0, between=10.0, latency=0.0)
    assert script["all_reduce"](400.0, 8, links) == pytest.approx(2 * 7 / 8 * 400 / 100)
    assert script["all_reduce"](400.0, 16, links) == pytest.approx(2 * 7 / 8 * 400 / 100 + 2 * 1 / 2 * 400 / 8 / 10)
