"""Run the code of the tutorials with two epochs each. ``make docs`` runs them in full."""

import re
from pathlib import Path

import matplotlib as mpl
import pytest
import torch

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
NAMES = ("continuous-time", "convert-a-gru", "extend", "first-network", "sparser", "streaming")
"""All but those that run shell commands."""


@pytest.mark.parametrize("name", NAMES)
def test_tutorial_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    mpl.use("Agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", plt.close)
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)  # restored by the fixture of all tests
    text = (TUTORIALS / f"{name}.md").read_text()
    cells = re.findall(r"^```\{code-cell\} python\n(?:---\n.*?\n---\n)?(.*?)^```", text, re.DOTALL | re.MULTILINE)
    code = "\n".join(cells)
    assert "plt.show()" in code
    exec(compile(re.sub(r"\b(epochs|updates)( ?= ?)\d+", r"\1\g<2>2", code), f"{name}.md", "exec"), {})


def test_every_tutorial_is_listed() -> None:
    pages = {path.stem for path in TUTORIALS.glob("*.md")}
    assert pages == {*NAMES, "index", "reproduce"}
