"""The page in Chromium: mouse, touch and keyboard, scores, raster and counters."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from egru.demo import PAGE
from tests.demo.chromium import PROGRAM, Tab, open_tab
from tests.demo.strokes import strokes_of

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="requires Chromium: apt-get install chromium")
DONE = "document.body.dataset.state === 'done'"
INK = """(() => {
    const raster = document.getElementById("raster"), columns = new Set(), rows = new Set();
    const pixels = raster.getContext("2d").getImageData(0, 0, raster.width, raster.height);
    for (let k = 0; k < pixels.data.length; k += 4)
        if (pixels.data[k + 3]) {
            columns.add(Math.floor(((k / 4) % raster.width) * 784 / raster.width));
            rows.add(Math.floor(k / 4 / raster.width));
        }
    return [columns.size, rows.size];
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def test_stored_digit_drawn_with_the_mouse_is_read_pixel_by_pixel(tab: Tab) -> None:
    with np.load(Path(__file__).parents[1] / "mnist-sample.npz") as stored:
        image, label = stored["images"][0].astype(np.float32) / 255, int(stored["labels"][0])
    tab.open(PAGE)
    assert tab.evaluate(INK) == [0, 0]
    left, top, width, _ = tab.box("#pad")
    for stroke in strokes_of(image):
        (x, y), *rest = [(left + width * x / 28, top + width * y / 28) for x, y in stroke]
        tab.mouse("Pressed", x, y)
        for x, y in rest:
            tab.mouse("Moved", x, y)
        tab.mouse("Released", x, y)
    tab.wait_for("document.body.dataset.state === 'reading'")
    tab.wait_for(DONE)
    assert tab.evaluate("document.body.dataset.digit") == str(label)
    assert f"The network reads {label} (" in tab.evaluate("document.getElementById('answer').textContent")
    columns, rows = tab.evaluate(INK)
    assert columns > 700  # some unit is active at most pixels
    assert rows > 100
    events, macs = (int(tab.evaluate(f"document.body.dataset.{name}")) for name in ("events", "macs"))
    assert 1_000 < events < 0.1 * 784 * 590
    assert macs < 0.1 * 784 * 1_050_000
    bars = [
        tab.evaluate(f"parseFloat(document.getElementById('{name}').style.width)") for name in ("macs-bar", "dense-bar")
    ]
    assert 0 < bars[0] < 10 < bars[1] == 100
    assert tab.problems() == []


def test_touch_on_a_phone_draws_and_the_page_does_not_scroll_sideways(tab: Tab) -> None:
    tab.open(PAGE, width=390, height=800, mobile=True, prefers_reduced_motion="reduce")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    left, top, width, height = tab.box("#pad")
    x = left + width / 2
    tab.touch("Start", [(x, top + 0.2 * height)])
    for i in range(1, 9):
        tab.touch("Move", [(x, top + (0.2 + 0.07 * i) * height)])
    tab.touch("End", [])
    tab.wait_for(DONE)
    assert tab.evaluate("document.body.dataset.digit") == "1"
    small = "[...document.querySelectorAll('button')].filter(b => b.getBoundingClientRect().height < 44).length"
    assert tab.evaluate(small) == 0
    assert tab.problems() == []


def test_keyboard_draws_reads_and_clears(tab: Tab) -> None:
    tab.open(PAGE, prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    tab.evaluate("document.getElementById('pad').focus()")
    for key in ("ArrowUp",) * 9 + (" ",) + ("ArrowDown",) * 20 + (" ", "Enter"):
        tab.key(key)
    tab.wait_for(DONE)
    assert tab.evaluate("document.body.dataset.digit") == "1"
    tab.key("Escape")
    assert tab.evaluate("document.body.dataset.state") == "idle"
    assert tab.evaluate(INK) == [0, 0]
    tab.key("7")  # draws an example
    tab.wait_for(DONE)
    assert tab.evaluate("document.body.dataset.digit") == "7"
    assert tab.problems() == []


def test_every_control_has_a_name_and_text_has_contrast(tab: Tab) -> None:
    tab.call("Accessibility.enable")
    for scheme in ("light", "dark"):
        tab.open(PAGE, prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
        nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "image", "list", "heading", "status", "region"}
        named = [node for node in nodes if node.get("role", {}).get("value") in roles and not node["ignored"]]
        assert len(named) > 12
        unnamed = [node["role"]["value"] for node in named if not node.get("name", {}).get("value")]
        assert set(unnamed) <= {"status"}
        contrast = tab.evaluate(
            """(() => {
            const hasText = (e) =>
                e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
            const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const light = (c) => rgb(c).map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
                .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
            const behind = (e) => { for (; e; e = e.parentElement) {
                const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; } };
            return Math.min(...[...document.querySelectorAll("body *")].filter((e) => hasText(e)).map((e) => {
                const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
                return (a + 0.05) / (b + 0.05); }));
            })()"""
        )
        assert contrast >= 4.5  # WCAG AA
