"""Check in Chromium that all texts of the site have the contrast that WCAG 2.1 requires (level AA), light and dark."""

import os
from pathlib import Path

import pytest

from tests.report.test_browser import evaluate

SITE = Path(os.environ.get("EGRU_SITE", "build/docs"))
pytestmark = pytest.mark.skipif("EGRU_SITE" not in os.environ, reason="run by make docs, after it has built the site")
PAGES = (
    "index",
    "comparison",
    "concepts/unit",
    "guides/deploy",
    "reference/layers",
    "results/experiments",
    "tutorials/first-network",
)
CONTRAST = """
const parse = (text) => {
  const parts = text.match(/[\\d.]+/g).map(Number);
  if (text.startsWith("color(")) return [...parts.slice(0, 3).map((x) => 255 * x), parts[3] ?? 1];
  return [...parts, 1].slice(0, 4);
};
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const background = (element) => {
  if (!element) return [255, 255, 255, 1];
  const own = parse(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own : over(own, background(element.parentElement));
};
const luminance = (color) => {
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = color.slice(0, 3).map((x) => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const low = {};
let count = 0;
for (const element of document.querySelectorAll("body *")) {
  const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent.trim()).join("");
  const style = getComputedStyle(element);
  if (!text || !element.getClientRects().length || style.visibility === "hidden") continue;
  if (element.closest(".headerlink, .copybtn, .visually-hidden, .skip-to-content, script, svg")) continue;
  const behind = background(element);
  const front = over(parse(style.color), behind);
  const [light, dark] = [luminance(front), luminance(behind)].sort((a, b) => b - a);
  const ratio = (light + 0.05) / (dark + 0.05);
  const size = parseFloat(style.fontSize);
  count += 1;
  if (ratio < (size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5))
    low[`${element.tagName} ${element.className} ${style.color} on ${behind.map(Math.round)}`] = [ratio, text];
}
return [count, low];
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_texts_have_enough_contrast(name: str, dark: bool) -> None:
    page = SITE.resolve() / f"{name}.html"
    try:
        count, low = evaluate(page, CONTRAST, dark=dark)
    finally:
        page.with_name(f"probe-1200-{dark}.html").unlink(missing_ok=True)
    assert count > 30
    assert not low
