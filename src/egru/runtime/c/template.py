"""Fill C templates: resolve conditions, replace names, format arrays."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

_CONDITION = re.compile(r"#if (\w+)$")


def render(file: str, flags: Mapping[str, bool], names: Mapping[str, str]) -> str:
    """Return a template with its conditions resolved and its names replaced.

    Args:
        file: Name of the template, in the folder of this module.
        flags: Values of the conditions: ``#if FLAG``, ``#else`` and ``#endif`` lines are resolved if FLAG is one of
            them. Other conditions are left to the compiler.
        names: Replacements of whole words.
    """
    kept: list[str] = []
    open_conditions: list[bool | None] = []  # the value of each enclosing condition, or None if it stays in the text
    for line in Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines():
        match = _CONDITION.match(line)
        if match and match[1] in flags:
            open_conditions.append(flags[match[1]])
            continue
        if line.startswith("#if"):
            open_conditions.append(None)
        elif line == "#else" and (value := open_conditions[-1]) is not None:
            open_conditions[-1] = not value
            continue
        elif line.startswith("#endif") and open_conditions.pop() is not None:
            continue
        if False not in open_conditions:
            kept.append(line)
    return replace_words("\n".join(kept) + "\n", names)


def replace_words(text: str, names: Mapping[str, str]) -> str:
    """Replace whole words; a word of ``names`` may also be the part of an identifier after its last underscore."""
    pattern = re.compile(r"(?<![^\W_])(" + "|".join(map(re.escape, names)) + r")\b")
    return pattern.sub(lambda match: names[match[1]], text) if names else text


def rename(text: str, name: str) -> str:
    """Replace the prefix ``model`` of public names and files."""
    if name == "model":
        return text
    text = re.sub(r"\bmodel(?=_|\.[ch]\b)", name, text)
    return re.sub(r"\bMODEL(?=_)", name.upper(), text)


def array(kind: str, name: str, values: npt.NDArray[np.generic]) -> str:
    """Return the definition of a constant array."""
    flat = values.reshape(-1)
    if flat.dtype.kind == "f":
        texts = [_float(value) for value in flat.tolist()]
    else:
        texts = list(map(str, flat.tolist()))
    return f"static const {kind} {name}[{flat.size}] = {{\n{lines(texts)}\n}};\n"


def lines(texts: list[str]) -> str:
    """Return the initialisers of an array in lines of at most 120 characters."""
    result = [""]
    for text in texts:
        if len(result[-1]) + len(text) > 116:
            result.append("")
        result[-1] += text + ","
    return "\n".join(result)


def _float(value: float) -> str:
    """Return a float32 constant; nine digits determine it."""
    return decimal(value, 9) + "f"


def decimal(value: float, digits: int = 17) -> str:
    """Return a floating-point constant with this many digits."""
    text = f"{value:.{digits}g}"
    return text if "." in text or "e" in text else text + ".0"
