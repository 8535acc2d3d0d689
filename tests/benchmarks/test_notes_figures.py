"""benchmarks/notes_figures.py and its figures in the documentation."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_figures_of_the_documentation_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["notes_figures.py", "--out", str(tmp_path)])
    runpy.run_path(str(ROOT / "benchmarks" / "notes_figures.py"), run_name="__main__")
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"digits.png", "gpu-speed.png"}
    pages = "".join((ROOT / "docs" / "results" / page).read_text() for page in ("digits.md", "gpu-notes.md"))
    assert not [name for name in written if f"](images/{name})" not in pages]
