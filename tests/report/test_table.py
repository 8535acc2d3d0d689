import sys

import pytest

from egru.report import print_table
from tests.report import examples


def test_table_shows_every_number(capsys, monkeypatch):
    pytest.importorskip("rich", reason="the table requires rich")
    monkeypatch.setenv("COLUMNS", "80")
    runs = examples.pair()
    print_table(runs)
    printed = capsys.readouterr().out
    for text in ("GRU", "EGRU", "98.2 %", "97.8 %", "70.0 %", "60.0 %", "3,532", "3,500", "2.5 s"):
        assert text in printed
    activity = runs[1].activity
    assert f"({100 * activity.forward_macs / activity.dense_forward_macs:.0f} %)" in printed
    assert f"({100 * activity.backward_macs / activity.dense_backward_macs:.0f} %)" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_backward_sparsity_of_dense_runs_is_a_dash(capsys):
    pytest.importorskip("rich", reason="the table requires rich")
    print_table([examples.run("GRU", accuracy=0.5)])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "test accuracy 50.0 %" in lines
    assert "backward sparsity (paper) -" in lines
    assert "backward sparsity (skippable) -" in lines


def test_run_names_are_not_interpreted_as_markup(capsys):
    pytest.importorskip("rich", reason="the table requires rich")
    print_table([examples.run("EGRU [bold]")])
    assert "EGRU [bold]" in capsys.readouterr().out


def test_runs_must_not_be_empty():
    with pytest.raises(ValueError, match="print_table: runs must contain at least one RunReport, got none"):
        print_table([])


def test_error_without_rich_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"pip install 'egru\[demo\]'"):
        print_table(examples.pair())
