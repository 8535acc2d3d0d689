import base64
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import egru
from egru.report import format, page, read_runs, write_report
from tests.report import examples

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")
matplotlib.use("Agg")

VOID = {"meta", "img", "source", "br", "hr", "link", "input"}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def blank(monkeypatch):
    """Figures that take no time to draw, for tests of all that is around them."""
    monkeypatch.setattr(page, "_png", lambda figure: PNG)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A report with its figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "DPI", 30)
        return write(tmp_path_factory.mktemp("drawn") / "deep" / "report")


class Page(HTMLParser):
    """Text, addresses and images of a page; fails on tags that do not close."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.missing_alt = 0
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]
        self.missing_alt += tag == "img" and not dict(attrs).get("alt")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += f"{data}\n"


def write(folder: Path, runs=None, rasters=None, **changes) -> Path:
    options = {"command": "egru demo --seed 3", "config": {"hidden_size": 32}} | changes
    rasters = [examples.raster()] if rasters is None else rasters
    return write_report(folder, "Digits & events", runs or examples.pair(), rasters, **options)


def test_the_page_holds_everything(drawn):
    assert drawn.parts[-3:] == ("deep", "report", "index.html")
    parsed = Page(drawn)
    names = ["activity-egru.png", "index.html", "macs.png", "raster-1.png", "report.json", "training.png"]
    assert sorted(p.name for p in drawn.parent.iterdir()) == names
    assert parsed.tags.count("figure") == parsed.tags.count("img") == parsed.tags.count("figcaption") == 4
    assert parsed.missing_alt == 0
    run = examples.run()
    expected = (
        *("Digits & events", "97.8 %", "98.2 %", "0.4 points below GRU", "3,532", "egru demo --seed 3", "hidden_size"),
        *(format.times(run.forward_saving), format.times(run.backward_saving), run.activity.energy.assumption),
        *(torch.__version__, f"{100 * run.activity.activity_sparsity:.0f} %", "70.0 %", "60.0 %"),
    )
    for text in expected:
        assert text in parsed.text


def test_the_page_loads_nothing(drawn):
    addresses = Page(drawn).addresses
    assert len(addresses) == 8  # four figures, light and dark
    for address in addresses:
        kind, data = address.split(",", 1)
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(PNG)
    source = drawn.read_text(encoding="utf-8")
    for word in ("http:", "https:", "url(", "@import", "<script", "<link"):  # none can occur in base64
        assert word not in source


def test_the_files_beside_it_are_the_figures_on_white(drawn):
    import matplotlib.image

    embedded = [base64.b64decode(address.split(",", 1)[1]) for address in Page(drawn).addresses]
    for file in drawn.parent.glob("*.png"):
        assert file.read_bytes() in embedded
        assert matplotlib.image.imread(file)[0, 0].tolist() == [1, 1, 1, 1]


def test_json_round_trips(tmp_path):
    path = write(
        tmp_path, config={"threshold": egru.Threshold("clamp"), "rate": math.inf, "where": Path("runs"), "n": [1]}
    )
    stored = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert read_runs(tmp_path / "report.json") == tuple(examples.pair())
    assert stored["command"] == "egru demo --seed 3"
    assert stored["config"]["threshold"]["kind"] == "clamp"
    assert (stored["config"]["rate"], stored["config"]["where"], stored["config"]["n"]) == ("inf", "runs", [1])
    assert set(stored["environment"]) == {"egru", "python", "torch", "machine", "date"}
    assert "kind clamp" in Page(path).text


def test_text_is_escaped(tmp_path):
    path = write(tmp_path, [examples.run("EGRU <b>")], [], command="a < b && c", config={"<i>": "<u>"})
    parsed = Page(path)
    assert "a < b && c" in parsed.text
    assert "EGRU <b>" in parsed.text
    assert "<u>" in parsed.text
    assert not {"i", "u"} & set(parsed.tags)


def test_dense_runs_alone(tmp_path):
    parsed = Page(write(tmp_path, [examples.run("GRU", accuracy=0.5)], []))
    assert "No run here has event layers" in parsed.text
    assert "GRU 50.0 %" in parsed.text
    assert "Solid lines have events" not in parsed.text
    assert parsed.tags.count("figure") == 2


def test_events_alone_and_twice(tmp_path):
    parsed = Page(write(tmp_path, [examples.run("EGRU a"), examples.run("EGRU b")], []))
    assert "EGRU a skipped" in parsed.text
    assert "EGRU b skipped" in parsed.text
    assert "points" not in parsed.text
    assert {p.name for p in tmp_path.glob("activity-*")} == {"activity-egru-a.png", "activity-egru-b.png"}


def test_names_that_differ_in_punctuation_keep_their_own_files(tmp_path):
    write(tmp_path, [examples.run("EGRU+"), examples.run("EGRU-")], [])
    assert len(list(tmp_path.glob("activity-*.png"))) == 2


def test_a_baseline_of_another_size_is_named(tmp_path):
    large = examples.run("GRU", activity=examples.dense_activity(64))
    assert "a step; GRU 12.7K" in Page(write(tmp_path, [large, examples.run()], [])).text


def test_a_failure_leaves_the_old_report_alone(tmp_path, monkeypatch):
    path = write(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="runs is empty"):
        write_report(tmp_path, "t", [], [], command="", config={})

    def fail(raster, *, theme):
        raise RuntimeError("no ink")

    with monkeypatch.context() as patch:
        patch.setattr(page, "event_raster", fail)
        with pytest.raises(RuntimeError, match="no ink"):
            write(tmp_path, [examples.run(accuracy=0.1)])
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, [examples.run(accuracy=0.1)])
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert path in before


def test_a_second_report_replaces_the_first(tmp_path):
    write(tmp_path)
    assert "12.3 %" in Page(write(tmp_path, [examples.run(accuracy=0.123)])).text
    assert not list(tmp_path.glob(".*"))


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "report").write_text("mine")
    with pytest.raises(NotADirectoryError, match="folder must be a directory or not exist yet"):
        write(tmp_path / "report")
    assert (tmp_path / "report").read_text() == "mine"
