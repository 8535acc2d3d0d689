"""Check the built site. ``make docs`` runs these tests on ``EGRU_SITE``, the folder that it has built."""

import os
import re
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("EGRU_SITE", "build/docs"))
pytestmark = pytest.mark.skipif("EGRU_SITE" not in os.environ, reason="run by make docs, after it has built the site")

LOADED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}
"""Elements that make a browser request another file, and the attribute with its address."""
ALIASES = ("egru.activity", "egru.compress", "egru.layers", "egru.runs", "egru.runtime")
"""Modules with names that are documented as names of ``egru``."""


class Page(HTMLParser):
    """Addresses that a page loads, links of the page, its identifiers, headings, and images without a text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.identifiers: set[str] = set()
        self.headings: list[int] = []
        self.images_without_text: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if (
            (attribute := LOADED.get(tag))
            and attribute in values
            and values.get("rel") not in ("canonical", "next", "prev")
        ):
            self.loaded.append(values[attribute])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "img" and not values.get("alt"):
            self.images_without_text.append(values.get("src", ""))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.identifiers |= {values[name] for name in ("id", "name") if name in values}


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(SITE.rglob("*.html")) if "_static" not in path.parts}


def test_site_has_every_page(pages: dict[Path, Page]) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    missing = [str(source) for source in sources if SITE / source.with_suffix(".html") not in pages]
    assert not missing


def test_pages_load_nothing_from_other_hosts(pages: dict[Path, Page]) -> None:
    external = [f"{path}: {address}" for path, page in pages.items() for address in page.loaded if "//" in address]
    styles = [
        f"{path}: {address}"
        for path in SITE.rglob("*.css")
        for address in re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", path.read_text())
    ]
    assert not external + styles


def test_links_lead_to_existing_pages_and_headings(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urllib.parse.urldefrag(link)
            if urllib.parse.urlsplit(link).scheme:
                continue
            file = (path.parent / urllib.parse.unquote(target)).resolve() if target else path.resolve()
            if not file.exists():
                broken.append(f"{path}: {link}")
            elif anchor and file.suffix == ".html":
                identifiers = pages[SITE / file.relative_to(SITE.resolve())].identifiers
                if urllib.parse.unquote(anchor) not in identifiers:
                    broken.append(f"{path}: {link}")
    assert not broken


def test_images_have_alternative_texts(pages: dict[Path, Page]) -> None:
    assert not [f"{path}: {source}" for path, page in pages.items() for source in page.images_without_text]


def test_headings_do_not_skip_levels(pages: dict[Path, Page]) -> None:
    wrong = [
        str(path)
        for path, page in pages.items()
        if page.headings
        and (page.headings[0] != 1 or any(b > a + 1 for a, b in zip(page.headings, page.headings[1:], strict=False)))
    ]
    assert not wrong


def test_every_public_object_is_in_the_reference(pages: dict[Path, Page]) -> None:
    documented = {name for path, page in pages.items() if path.parent.name == "reference" for name in page.identifiers}
    missing = []
    for line in (ROOT / "tests" / "api.txt").read_text().splitlines():
        name = re.sub(r"^\s*(?:class |def |value |module )?(egru[\w.]*).*", r"\1", line)
        module = next((alias for alias in ALIASES if name.startswith(alias + ".")), None)
        names = {name, f"module-{name}", name.replace(module, "egru", 1) if module else name}
        if not names & documented:
            missing.append(name)
    assert not missing


def test_attributes_have_whole_descriptions() -> None:
    """Types come from annotations. A field "Type" would be the first words of a description, up to a colon."""
    pages = sorted((SITE / "reference").glob("*.html"))
    assert not [page.name for page in pages if 'Type<span class="colon">' in page.read_text()]
