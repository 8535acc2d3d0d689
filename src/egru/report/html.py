"""Parts of a page: the document with its style and scripts, tables, lists and folded sections."""

import dataclasses
import importlib.resources
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from egru.report.figures import Figure
from egru.report.theme import DARK, LIGHT, Theme

SCRIPTS = ("common", "lines", "histogram", "scatter", "raster", "page")
"""The scripts of a page, in the order in which they are joined."""
FOLD = 12
"""Lists and tables of settings with more entries than this are folded."""


def document(title: str, parts: Iterable[str], figures: Iterable[Figure]) -> str:
    """Return a page that contains its data, style and scripts and loads nothing else.

    Args:
        title: Title of the window.
        parts: HTML of the sections.
        figures: The figures in ``parts``, whose data the scripts draw.
    """
    data = {figure.name: figure.data for figure in figures if figure.data is not None}
    numbers = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/").replace("<!", "<\\u0021")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    script = "\n".join(_read_file(f"script/{name}.js") for name in SCRIPTS)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{colour_variables()}{_read_file('page.css')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + '\n</main>\n<div id="tip" role="status" hidden></div>\n'
        + f'<script type="application/json" id="numbers">{numbers}</script>\n'
        + f'<script>\n(() => {{\n"use strict";\n{script}}})();\n</script>\n</body>\n</html>\n'
    )


def _read_file(name: str) -> str:
    return importlib.resources.files("egru.report").joinpath(name).read_text(encoding="utf-8")


def colour_variables() -> str:
    """Return the colours of both themes as CSS variables."""

    def variables(theme: Theme) -> str:
        values = {
            "ink": theme.ink,
            "muted": theme.muted,
            "faint": theme.faint,
            "dense": theme.dense,
            "alarm": theme.alarm,
        }
        values |= {f"hue{i}": value for i, value in enumerate(theme.event)}
        values |= {f"value{i}": value for i, value in enumerate(theme.value_colours)}
        return " ".join(f"--{name}: {value};" for name, value in values.items())

    return f":root {{ {variables(LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}\n"


def figure_grid(figures: Sequence[Figure]) -> str:
    """Return figures side by side, or nothing if there are none."""
    return f'<div class="figures">{"".join(figure.html() for figure in figures)}</div>' if figures else ""


def small(text: str) -> str:
    """Return a paragraph in small print."""
    return f'<p class="small">{escape(text)}</p>'


def table(
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    marked: Sequence[bool] = (),
    corner: str = "",
    *,
    narrow: bool = False,
) -> str:
    """Return a table in a box that scrolls sideways if the table is wider.

    Args:
        columns: Names of the columns after the first.
        rows: Label and cells of each row.
        marked: Whether each column is emphasised. Empty if none is.
        corner: Name of the first column.
        narrow: Whether columns are as narrow as their text, for tables with short labels.
    """
    marks = [" class=event" if mark else "" for mark in marked or [False] * len(columns)]
    names = "".join(f'<th scope="col"{m}>{escape(name)}</th>' for m, name in zip(marks, columns, strict=True))
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f"<td{m}>{escape(cell)}</td>" for m, cell in zip(marks, cells, strict=True))
        + "</tr>"
        for label, cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table{" class=narrow" if narrow else ""}><thead><tr>'
        f'<th scope="col">{escape(corner)}</th>{names}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def definition_list(entries: Mapping[str, str]) -> str:
    """Return names and values, in two columns."""
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in entries.items())}</dl>"


def folded(summary: str, content: str) -> str:
    """Return a section that opens with a click on its summary."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def json_value(value: Any) -> Any:
    """Convert a value to JSON. Values that JSON cannot represent become text, also NaN and infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(entry) for entry in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def format_value(value: Any) -> str:
    """Format a JSON value on one line. Equal numbers have the same text: 2.0 and 2 are "2"."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)
