"""The page in a real browser: nothing goes wrong, every figure is there, and it answers the pointer."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from egru.report import DARK, LIGHT, page, write_report
from tests.report import examples

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")

FIGURES = ("work", "layers-1", "raster-1", "raster-2", "activity-1", "silence-1", "curves")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    runs = [*examples.pair()[:1], examples.run("EGRU <i>&")]
    rasters = [examples.raster(T=30, hidden=24), examples.raster(inputs=5, image=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_pictures", lambda runs, rasters: {})  # nobody looks at the files here
        return write_report(
            tmp_path_factory.mktemp("page"), "Digits & events", runs, rasters, command="c", config={"a": 1}
        )


def visit(path: Path, script: str, *, width: int = 1200, dark: bool = False):
    """What ``script``, run on the page, returns; fails if the browser's console says anything."""
    assert BROWSER is not None
    probe = path.with_name(f"probe-{width}-{dark}.html")
    inside = f"document.body.dataset.found = JSON.stringify((() => {{ {script} }})());"
    source = path.read_text(encoding="utf-8").replace("</body>", f"<script>{inside}</script></body>")
    probe.write_text(source, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--enable-logging=stderr"]
    options += [f"--user-data-dir={path.parent / 'profile'}", f"--window-size={width},900"]
    options.append(f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", f"file://{probe}"], capture_output=True, text=True, timeout=120, check=True
    )
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    found = re.search(r'<body data-found="(.*?)"', done.stdout)
    assert found is not None, done.stdout[-2000:]
    return json.loads(html.unescape(found[1]))


INK = """
const ink = (canvas) => {  // share of pixels that are not empty
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let drawn = 0;
  for (let i = 3; i < data.length; i += 4) drawn += data[i] > 0;
  return drawn / (data.length / 4);
};
"""


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (520, False)])
def test_every_figure_is_there(written, width, dark):
    found = visit(
        written,
        INK
        + """
        const figures = [...document.querySelectorAll("figure")].map((f) => {
          const box = f.querySelector(".plot").getBoundingClientRect();
          return [f.id, f.dataset.drawn ?? "html", box.width, box.height];
        });
        return {
          figures,
          lines: document.querySelectorAll("#curves path.line").length,
          bars: document.querySelectorAll("#activity-1 rect").length,
          ink: [...document.querySelectorAll("canvas.raster")].map(ink),
          paper: getComputedStyle(document.body).backgroundColor,
          ink_colour: getComputedStyle(document.body).color,
          wide: document.documentElement.scrollWidth > innerWidth,
        };""",
        width=width,
        dark=dark,
    )
    assert [figure[0] for figure in found["figures"]] == list(FIGURES)
    kinds = ["html", "html", "raster", "raster", "histogram", "lines", "lines"]
    assert [figure[1] for figure in found["figures"]] == kinds
    assert all(w > 150 and h > 100 for _, _, w, h in found["figures"])
    assert found["lines"] == 5  # loss and accuracy of two runs, silence of one
    assert found["bars"] >= 3
    assert all(0.01 < ink < 0.9 for ink in found["ink"])
    assert not found["wide"]
    theme = DARK if dark else LIGHT
    channels = ", ".join(str(int(theme.ink[i : i + 2], 16)) for i in (1, 3, 5))
    assert found["ink_colour"] == f"rgb({channels})"
    assert (found["paper"] == "rgb(17, 20, 24)") is dark


POINTER = """
const canvas = document.querySelector("#raster-1 canvas.raster"), tip = document.getElementById("tip");
canvas.setPointerCapture = () => {};  // a made-up pointer cannot be captured
const send = (target, type, x, y) => {
  target.scrollIntoView({ block: "center", behavior: "instant" });
  const box = target.getBoundingClientRect();
  target.dispatchEvent(new PointerEvent(type, {
    bubbles: true, pointerType: "mouse", button: 0, clientX: box.left + x, clientY: box.top + y }));
};
"""


def test_pointing_at_a_unit_names_it(written):
    raster = examples.raster(T=30, hidden=24)
    busiest = int((raster.events != 0).sum(0).argmax())
    silent, found = visit(
        written,
        POINTER
        + """
        const before = tip.hidden, said = [], width = canvas.clientWidth - 56;
        for (let t = 0; t < 30; t++) {  // along the first row, which is the busiest unit's
          send(canvas, "pointermove", 52 + width * (t + 0.5) / 30, 51);
          said.push(tip.textContent);
        }
        send(canvas, "pointerleave", 0, 0);
        return [before && tip.hidden, said];""",
    )
    assert silent
    spoke = [t for t, text in enumerate(found) if f"units, unit {busiest}sends" in text and f"at step {t}" in text]
    assert spoke == (raster.events[:, busiest] != 0).nonzero()[0].tolist()
    assert f"speaks at {len(spoke)} of 30 steps" in found[spoke[0]]


def test_pointing_beside_an_event_finds_it(written):
    raster = examples.raster(T=30, hidden=24)
    busiest = int((raster.events != 0).sum(0).argmax())
    row = raster.events[:, busiest] != 0
    before = next(t for t in range(29) if row[t + 1] and not row[t])
    said = visit(
        written,
        POINTER
        + f"""
        const width = canvas.clientWidth - 56;
        send(canvas, "pointermove", 52 + width * {before + 1} / 30 - 2, 51);  // two pixels early
        return tip.textContent;""",
    )
    assert f"unit {busiest}sends" in said
    assert f"at step {before + 1}" in said


def test_a_raster_zooms_by_dragging_and_by_its_buttons(written):
    views = visit(
        written,
        POINTER
        + """
        const views = [canvas.dataset.view], width = canvas.clientWidth - 56;
        const press = (name) => {
          document.querySelector(`#raster-1 [${name}]`).click();
          views.push(canvas.dataset.view);
        };
        send(canvas, "pointerdown", 52 + width / 3, 60);
        send(canvas, "pointermove", 52 + 2 * width / 3, 120);
        send(canvas, "pointerup", 52 + 2 * width / 3, 120);
        views.push(canvas.dataset.view);
        canvas.dispatchEvent(new MouseEvent("dblclick"));
        views.push(canvas.dataset.view);
        press('data-zoom="0.5"'); press('data-move="0.5"'); press("data-whole");
        return views;""",
    )
    whole, dragged, again, nearer, later, last = ([float(v) for v in view.split()] for view in views)
    assert whole == again == last == [0, 30, 0, 24]
    assert dragged[:2] == pytest.approx([10, 20], abs=0.05)
    assert 0 < dragged[2] < dragged[3] < 24
    assert nearer == [7.5, 22.5, 6, 18]
    assert later == [15, 30, 6, 18]


def test_curves_and_histograms_answer(written):
    curve, bar = visit(
        written,
        POINTER
        + """
        const curve = document.querySelector("#curves svg");
        send(curve, "pointermove", 52, 60);
        const first = tip.textContent;
        const bar = document.querySelector("#activity-1 rect");
        bar.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 5, clientY: 5 }));
        return [first, tip.textContent];""",
    )
    assert curve.startswith("epoch 1")
    assert "EGRU <i>&" in curve  # shown as it is, not as a tag
    assert re.search(r"\d+ units? of egru(speak|never|always)", bar)
