"""benchmarks/scaling.py and its table in the documentation."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_documentation_contains_the_printed_table(capsys, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(sys, "argv", ["scaling.py"])
    runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"), run_name="__main__")
    printed = capsys.readouterr().out.strip()
    assert printed.count("\n") > 10
    assert printed in (ROOT / "docs" / "guides" / "scaling.md").read_text(encoding="utf-8")


def test_all_reduce_time_in_closed_form():
    script = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"))
    links = script["Links"](inside=100.0, between=10.0, latency=0.0)
    assert script["all_reduce"](400.0, 8, links) == pytest.approx(2 * 7 / 8 * 400 / 100)
    assert script["all_reduce"](400.0, 16, links) == pytest.approx(2 * 7 / 8 * 400 / 100 + 2 * 1 / 2 * 400 / 8 / 10)
