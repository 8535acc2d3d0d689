"""Check the documentation: links lead somewhere, examples run, the README stays short."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import egru
from egru.data import Classification
from tests.helpers import mnist_sample

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown renderer derives from the headings of ``page``."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for target in targets:
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name} links to {target}, and {path.name} has no such heading"


def test_paths_named_in_the_documentation_exist() -> None:
    roots = "benchmarks|csrc|docs|examples|src|tests"
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for path in re.findall(rf"`((?:{roots})/[\w./-]+)`", page.read_text())
        if not (ROOT / path).exists()
    ]
    assert not missing


def test_readme_has_at_most_130_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_readme_examples_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    layer, engine = blocks
    exec(compile(layer, "README.md", "exec"), {})
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    assert row.startswith("rnn (EGRU)")
    assert header.split()[2:5] == ["sparse", "backward", "skippable"]
    sparse, backward, skippable = (float(value) for value in re.findall(r"([\d.]+) %", row)[:3])
    # The README says that both passes are sparse.
    assert sparse > 50
    assert backward > 10
    assert skippable > 10
    digits = Classification("some digits", 10, *[mnist_sample()] * 3)
    monkeypatch.setattr(egru.data, "sequential_mnist", lambda: digits)
    exec(compile(engine, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("7 7 ")


def test_examples_of_the_conversion_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The examples themselves check that the converted models compute the same outputs."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    reader, tagger = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/convert.md").read_text(), re.DOTALL)
    values: dict[str, Any] = {}
    exec(compile(reader, "convert.md", "exec"), values)
    assert values["result"].after.events < 0.22
    assert values["scores"].shape == (2,)
    assert "activity" in capsys.readouterr().out
    exec(compile(tagger, "convert.md", "exec"), values)
    assert values["scores"].shape == (20, 3)
    assert (tmp_path / "firmware" / "tagger.c").is_file()


def test_lines_of_prose_have_at_most_120_characters() -> None:
    """Tables and code may be longer."""
    too_long = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
        if len(line) > 120 and not line.startswith(("|", "    "))
    ]
    assert not too_long
