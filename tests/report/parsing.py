"""A parser of pages that checks their structure."""

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "source", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Text, addresses and figures of a page.

    Fails on tags that are not closed, on repeated ids, and on tables outside a box that scrolls.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.figures: list[str] = []
        self.described = 0
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value or "" for key, value in attrs if key == "id"]
        assert tag != "table" or self.classes[-1] == "scroll"
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]
        self.described += dict(attrs).get("role") == "img" and bool(dict(attrs).get("aria-label"))
        if tag == "figure":
            self.figures.append(dict(attrs)["id"] or "")
        if tag not in VOID:
            self.open.append(tag)
            self.classes.append(dict(attrs).get("class") or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.classes.pop()

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += f"{data}\n"
