"""Tests of the page in Chromium: no console messages, every figure drawn, tooltips and zoom."""

import functools
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from egru.report import DARK, LIGHT, StepTime, page, write_report
from egru.report.sweep import write_sweep_report
from tests.helpers import PATIENCE
from tests.report import examples
from tests.report.test_sweep import SWEEP

FIGURES = ("quality", "computation", "layers-1", "raster-1", "raster-2", "activity-1", "sparsity-1", "curves")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    runs = [*examples.pair()[:1], examples.run("EGRU <i>&")]
    rasters = [examples.raster(T=30, hidden=24), examples.raster(inputs=5, image=False)]
    return write(tmp_path_factory.mktemp("page"), runs, rasters)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    """A page of five runs with long names: two dense ones, one derived by a search, two with a time per step."""
    name = "(a-recipe-with-a-long-name-seed0-20260101-1200)"
    config = {"data": "digits", "device": "cpu"} | {f"setting_{i}": i for i in range(40)}
    runs = [
        examples.run(f"EGRU 1350 {name}", config=config, changed=("device",)),
        examples.searched(f"EGRU 1351 {name}", config=config | {"device": "cuda"}),
        examples.run(f"EGRU 1352 {name}", config=config, step_time=StepTime(3e-6, "EventEngine", "a CPU")),
        examples.run(f"GRU 1350 {name}", config=config, step_time=StepTime(9e-6, "PyTorch", "a CPU")),
        examples.run(f"LSTM 1350 {name}", config=config | {"setting_1": 2.5}),
    ]
    return write(tmp_path_factory.mktemp("comparison"), runs, [examples.raster()])


def write(folder: Path, runs, rasters) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_png_files", lambda runs, rasters: {})
        return write_report(folder, "Digits & events", runs, rasters, command="c", config={"a": 1})


@functools.cache
def find_browser() -> str | None:
    """Return the path of a browser that starts. Some systems have a ``chromium-browser`` that only asks for a snap."""
    for path in filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        if subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    return None


def evaluate(path: Path, script: str, *, width: int = 1200, dark: bool = False):
    """Return the value of ``script`` on the page; fail if the browser logs anything to its console."""
    browser = find_browser()
    if browser is None:
        pytest.skip("requires Chromium (apt-get install chromium)")
    probe = path.with_name(f"probe-{width}-{dark}.html")
    statement = f"document.body.dataset.value = JSON.stringify((() => {{ {script} }})());"
    source = path.read_text(encoding="utf-8").replace("</body>", f"<script>{statement}</script></body>")
    probe.write_text(source, encoding="utf-8")
    page = probe
    if width < 500:  # Chromium has no narrower windows
        page = path.with_name(f"frame-{width}-{dark}.html")
        copy = "document.body.dataset.value = frames[0].document.body.dataset.value"
        page.write_text(
            f'<body><iframe src="{probe.name}" style="width:{width}px;height:900px;border:0" onload="{copy}"></iframe>'
        )
    options = [
        "--allow-file-access-from-files",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",  # containers have a small /dev/shm
        "--virtual-time-budget=2000",
        "--enable-logging=stderr",
    ]
    options += [f"--window-size={width},900", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # a used one may still be locked
        command = [browser, *options, f"--user-data-dir={profile}", "--dump-dom", f"file://{page}"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert [line for line in process.stderr.splitlines() if "CONSOLE" in line] == []
    match = re.search(r'<body\b[^>]* data-value="(.*?)"', process.stdout)
    assert match is not None, process.stdout[-2000:]
    return json.loads(html.unescape(match[1]))


INK = """
const ink = (canvas) => {  // fraction of pixels that are not transparent
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let drawn = 0;
  for (let i = 3; i < data.length; i += 4) drawn += data[i] > 0;
  return drawn / (data.length / 4);
};
"""


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_every_figure_is_drawn(report, width, dark):
    drawn = evaluate(
        report,
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
    assert [figure[0] for figure in drawn["figures"]] == list(FIGURES)
    kinds = ["scatter", "html", "html", "raster", "raster", "histogram", "lines", "lines"]
    assert [figure[1] for figure in drawn["figures"]] == kinds
    assert all(w > 150 and h > 100 for _, _, w, h in drawn["figures"])
    assert drawn["lines"] == 5  # loss and accuracy of two runs, sparsity of one
    assert drawn["bars"] >= 3
    assert all(0.01 < ink < 0.9 for ink in drawn["ink"])
    assert not drawn["wide"]
    theme = DARK if dark else LIGHT
    channels = ", ".join(str(int(theme.ink[i : i + 2], 16)) for i in (1, 3, 5))
    assert drawn["ink_colour"] == f"rgb({channels})"
    assert (drawn["paper"] == "rgb(17, 20, 24)") is dark


LAYOUT = """
const inside = (element, box) => {
  const a = element.getBoundingClientRect();
  return a.left >= box.left - 1 && a.right <= box.right + 1;
};
const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
for (const folded of document.querySelectorAll("details")) folded.open = true;
return {
  repeated: ids.filter((id, i) => ids.indexOf(id) !== i),
  wide: document.documentElement.scrollWidth > innerWidth,
  clipped: [...document.querySelectorAll("svg text")]
    .filter((text) => !inside(text, text.ownerSVGElement.getBoundingClientRect())).map((text) => text.textContent),
  outside: [...document.querySelectorAll("main h1, main h2, main h3, main p, main figcaption, main dd, main summary")]
    .filter((element) => !inside(element, document.querySelector("main").getBoundingClientRect()))
    .map((element) => element.textContent),
  tables: [...document.querySelectorAll("table")].map((table) => {
    const box = table.closest(".scroll"), left = (element) => element.getBoundingClientRect().left;
    return [inside(box, document.querySelector("main").getBoundingClientRect()),
      getComputedStyle(box).overflowX, left(table.rows[0].cells[0]) === left(box) + 1];
  }),
};
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_clipped_or_wider_than_the_page(comparison, width):
    layout = evaluate(comparison, LAYOUT, width=width)
    assert layout["repeated"] == []
    assert layout["clipped"] == []
    assert layout["outside"] == []
    assert not layout["wide"]
    assert len(layout["tables"]) == 4  # all numbers, before and after, trials, settings that differ
    assert all(table == [True, "auto", True] for table in layout["tables"])


@pytest.mark.parametrize("width", [1280, 390])
def test_page_of_a_sweep_is_drawn_and_fits(tmp_path, width):
    layout = evaluate(write_sweep_report(tmp_path, SWEEP), LAYOUT, width=width)
    assert (layout["repeated"], layout["clipped"], layout["outside"], layout["wide"]) == ([], [], [], False)
    assert layout["tables"] == [[True, "auto", True]]
    drawn = """return [...document.querySelectorAll("figure")].map((f) => [
      f.id, f.dataset.drawn, f.querySelectorAll(".panels > div > svg").length, f.querySelectorAll("circle").length]);"""
    figures = evaluate(tmp_path / "index.html", drawn, width=width)
    assert figures == [["pareto", "scatter", 1, 4], ["slices", "scatter", 2, 8]]


def test_points_of_runs_have_tooltips(comparison):
    tips = evaluate(
        comparison,
        """
        const tip = document.getElementById("tip");
        return [...document.querySelectorAll("#quality circle")].map((circle) => {
          circle.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 5, clientY: 5 }));
          return tip.textContent;
        });""",
    )
    assert len(tips) == 7  # five runs with MACs, two with a time
    assert sum("measured time per step 3 µs" in tip and "EventEngine, a CPU" in tip for tip in tips) == 1


POINTER = """
const canvas = document.querySelector("#raster-1 canvas.raster"), tip = document.getElementById("tip");
canvas.setPointerCapture = () => {};  // a synthetic pointer cannot be captured
const send = (target, type, x, y) => {
  target.scrollIntoView({ block: "center", behavior: "instant" });
  const box = target.getBoundingClientRect();
  target.dispatchEvent(new PointerEvent(type, {
    bubbles: true, pointerType: "mouse", button: 0, clientX: box.left + x, clientY: box.top + y }));
};
"""


def test_tooltip_names_the_unit_and_its_event(report):
    raster = examples.raster(T=30, hidden=24)
    most_active = int((raster.events != 0).sum(0).argmax())
    hidden, tips = evaluate(
        report,
        POINTER
        + """
        const before = tip.hidden, tips = [], width = canvas.clientWidth - 56;
        for (let t = 0; t < 30; t++) {  // along the first row: the most active unit
          send(canvas, "pointermove", 52 + width * (t + 0.5) / 30, 51);
          tips.push(tip.textContent);
        }
        send(canvas, "pointerleave", 0, 0);
        return [before && tip.hidden, tips];""",
    )
    assert hidden
    active = [t for t, tip in enumerate(tips) if tip.startswith(f"unit {most_active}event ") and f"at step {t}" in tip]
    assert active == (raster.events[:, most_active] != 0).nonzero()[0].tolist()
    assert f"active at {len(active)} of 30 steps" in tips[active[0]]


def test_tooltip_snaps_to_an_event_within_a_few_pixels(report):
    raster = examples.raster(T=30, hidden=24)
    most_active = int((raster.events != 0).sum(0).argmax())
    row = raster.events[:, most_active] != 0
    before = next(t for t in range(29) if row[t + 1] and not row[t])
    tip = evaluate(
        report,
        POINTER
        + f"""
        const width = canvas.clientWidth - 56;
        send(canvas, "pointermove", 52 + width * {before + 1} / 30 - 2, 51);  // two pixels to the left
        return tip.textContent;""",
    )
    assert f"unit {most_active}event " in tip
    assert f"at step {before + 1}" in tip


def test_raster_zooms_by_dragging_and_with_buttons(report):
    views = evaluate(
        report,
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
        press('data-zoom="0.5"'); press('data-move="0.5"'); press("data-reset");
        return views;""",
    )
    initial, dragged, double_clicked, zoomed, moved, reset = ([float(v) for v in view.split()] for view in views)
    assert initial == double_clicked == reset == [0, 30, 0, 24]
    assert dragged[:2] == pytest.approx([10, 20], abs=0.05)
    assert 0 < dragged[2] < dragged[3] < 24
    assert zoomed == [7.5, 22.5, 6, 18]
    assert moved == [15, 30, 6, 18]


def test_curves_and_histograms_have_tooltips(report):
    curve, bar = evaluate(
        report,
        POINTER
        + """
        const curve = document.querySelector("#curves .panels svg");
        send(curve, "pointermove", 52, 60);
        const first = tip.textContent;
        const bar = document.querySelector("#activity-1 rect");
        bar.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 5, clientY: 5 }));
        return [first, tip.textContent];""",
    )
    assert curve.startswith("epoch 1")
    assert "EGRU <i>&" in curve  # escaped
    assert re.search(r"\d+ units? of egru(active at|never active|always active)", bar)
