"""Adapt the reference: short default values, named tuples without a second list of fields, colons in attributes."""

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring


def shorten_defaults(
    app: Sphinx, what: str, name: str, value: object, options: Any, signature: str | None, annotation: str | None
) -> tuple[str | None, str | None]:
    """Replace default values whose text fills lines, such as a whole theme, by their names."""
    if signature is not None:
        signature = re.sub(r"<built-in function (\w+)>", r"\1", signature)
        signature = re.sub(r"=Theme\(name='(\w+)'.*?'gray(?:_r)?'\)", lambda match: f"={match[1].upper()}", signature)
    return signature, annotation


def select_members(app: Sphinx, what: str, name: str, value: object, skip: bool, options: Any) -> bool | None:
    """Include methods without a docstring. Skip fields of named tuples, which the docstring of the class describes."""
    if (getattr(value, "__doc__", None) or "").startswith("Alias for field number"):
        return True
    is_method = callable(value) or isinstance(value, classmethod | staticmethod)
    return False if what == "class" and is_method and not name.startswith("_") else None


def read_attribute(self: Any) -> tuple[str, list[str]]:
    """Return no type and the whole docstring. Napoleon would take the words before the first colon for a type."""
    lines = self._consume_to_end()
    return "", GoogleDocstring(self._dedent(lines), self._config).lines()


def setup(app: Sphinx) -> dict[str, bool]:
    GoogleDocstring._consume_inline_attribute = read_attribute
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-skip-member", select_members)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
