"""JSON records of dataclasses: one format number, one codec, one way to read and write them.

A record stores measured numbers only. Numbers that follow from them (MACs, energy, overall sparsity) are properties of
the dataclasses, so that a stored record never disagrees with the code that reads it.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from egru.files import replace_file

FORMAT = 3
"""Format number of every record this version writes, and the only one it reads. ``CHANGELOG.md`` lists the formats."""

T = TypeVar("T")


class FormatError(ValueError):
    """A record with a missing or unsupported format number."""


class JSONRecord:
    """Base class of dataclasses that are stored as JSON with a format number.

    ``from_dict(to_dict(x)) == x`` holds for every subclass, also after ``json.dumps`` and ``json.loads``.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, preceded by the format number."""
        return {"format": FORMAT, **to_plain(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], source: str | Path | None = None) -> Self:
        """Return the record that :meth:`to_dict` converted.

        Args:
            plain: The result of :meth:`to_dict`.
            source: File that ``plain`` was read from, for error messages. If None, the class name is used.

        Raises:
            FormatError: If the format number is missing or unsupported.
            ValueError: If a field is missing, unknown or has the wrong type. The message names ``source``.
        """
        source = cls.__name__ if source is None else source
        fields = without_format(plain, source)
        try:
            return from_plain(cls, fields, use_defaults=False)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def write(self, path: Path) -> None:
        """Write the record to ``path``, atomically."""
        replace_file(path, f"{dumps(self.to_dict())}\n".encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the record in ``path``; raises as :meth:`from_dict` does."""
        return cls.from_dict(_load(path), path)


OPTIONAL = {"optional": True}
"""Metadata of a dataclass field that is not stored if it is None."""


def to_plain(value: Any) -> Any:
    """Convert dataclasses, mappings, tuples and lists to JSON values.

    Args:
        value: The value to convert.

    Returns:
        Dicts, lists, texts, numbers, booleans and None.

    Example:
        >>> egru.training.to_plain(egru.training.ClassifierTraining(epochs=3))["epochs"]
        3
    """
    if dataclasses.is_dataclass(value):
        entries = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {f.name: to_plain(entry) for f, entry in entries if entry is not None or "optional" not in f.metadata}
    if isinstance(value, Mapping):
        return {name: to_plain(entry) for name, entry in value.items()}
    return [to_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def from_plain(cls: type[T], plain: Mapping[str, Any], *, use_defaults: bool = True) -> T:
    """Return the dataclass that :func:`to_plain` converted, following its type annotations.

    Args:
        cls: Dataclass to construct.
        plain: Field values by name, for example read from JSON.
        use_defaults: Whether a missing field takes its default value. If False, a missing field is an error.

    Raises:
        ValueError: If a field is unknown, missing without a default, or has a value of the wrong type.

    Returns:
        An instance of ``cls``.

    Example:
        >>> egru.training.from_plain(egru.training.Scores, {"loss": 0.2, "accuracy": 0.95})
        Scores(loss=0.2, accuracy=0.95, perplexity=None)
    """
    fields = _fields(cls)
    if unknown := sorted(plain.keys() - fields.keys()):
        raise ValueError(f"{cls.__name__}: unknown field {unknown[0]!r}; known fields: {', '.join(sorted(fields))}")
    for name, (_, has_default) in fields.items():
        if name not in plain and not (use_defaults and has_default) and name not in _optional(cls):
            raise ValueError(f"{cls.__name__}: field {name!r} is missing")
    values: dict[str, Any] = {}
    for name, value in plain.items():
        try:
            values[name] = _convert(fields[name][0], value, use_defaults)
        except _WrongType as error:
            raise ValueError(f"{cls.__name__}: {name} must be {error}, got {_shorten(value)}") from None
    return cls(**values)


class _WrongType(Exception):
    """A value of another type than expected. The message is the expected type in words."""


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@functools.cache
def _optional(cls: Any) -> frozenset[str]:
    """Return the names of the fields with the metadata :data:`OPTIONAL`."""
    return frozenset(field.name for field in dataclasses.fields(cls) if "optional" in field.metadata)


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field and whether it has a default. Cached: a run has thousands of records."""
    hints = typing.get_type_hints(cls)
    defaults = [
        (field.name, (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING))
        for field in dataclasses.fields(cls)
    ]
    return {name: (hints[name], has_default) for name, has_default in defaults}


def _convert(hint: Any, value: Any, use_defaults: bool) -> Any:
    """Convert a JSON value to the type that ``hint`` names.

    Raises:
        _WrongType: If the value has another type.
        ValueError: If a field of a nested dataclass is not valid.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        expected: list[str] = []
        for part in arguments:
            try:
                if part is not type(None):
                    return _convert(part, value, use_defaults)
            except _WrongType as error:
                expected.append(str(error))
        raise _WrongType(" or ".join(expected))
    if hint in _SCALARS:
        name, accepted = _SCALARS[hint]
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            raise _WrongType(name)
        try:
            return hint(value)
        except OverflowError:  # an int that no float can represent
            raise _WrongType(name) from None
    if origin is typing.Literal:
        if value not in arguments:
            raise _WrongType(f"one of {', '.join(map(str, arguments))}")
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _WrongType("an object")
        return from_plain(typing.cast(type, hint), value, use_defaults=use_defaults)
    if origin is tuple:
        length = None if arguments[-1] is Ellipsis else len(arguments)
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            raise _WrongType("a list" if length is None else f"a list of {length}")
        hints = arguments if length is not None else [arguments[0]] * len(value)
        return tuple(_convert(part, entry, use_defaults) for part, entry in zip(hints, value, strict=True))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _WrongType("an object")
        return {name: _convert(arguments[1], entry, use_defaults) for name, entry in value.items()}
    return value


_SCALARS: dict[Any, tuple[str, Any]] = {
    int: ("an int", int),
    str: ("a string", str),
    bool: ("true or false", bool),
    float: ("a number", (int, float)),
}
"""Description and accepted JSON types of the types that are stored as they are."""


def without_format(plain: Mapping[str, Any], source: str | Path) -> dict[str, Any]:
    """Check the format number of a record and return the other entries.

    Raises:
        FormatError: If the number is missing or is not :data:`FORMAT`. The message names ``source``.
        ValueError: If ``plain`` is not a mapping.
    """
    if not isinstance(plain, Mapping):
        raise ValueError(f"{source}: expected a JSON object, got {_shorten(plain)}")
    if "format" not in plain:
        raise FormatError(f"{source}: the record has no format number; this version of egru reads format {FORMAT}")
    if plain["format"] != FORMAT:
        raise FormatError(
            f"{source}: the record has format {plain['format']!r}; this version of egru reads format {FORMAT}"
        )
    return {name: value for name, value in plain.items() if name != "format"}


def read_json(path: Path) -> dict[str, Any]:
    """Read the record in ``path`` and return its entries without the format number.

    Raises:
        FormatError: If the format number is missing or unsupported.
    """
    return without_format(_load(path), path)


def write_json(path: Path, plain: Mapping[str, Any], *, exclusive: bool = False) -> None:
    """Write ``plain`` with the format number to ``path``, as :func:`egru.files.replace_file` does."""
    replace_file(path, f"{dumps({'format': FORMAT, **plain})}\n".encode(), exclusive=exclusive)


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError includes UnicodeDecodeError
        raise ValueError(f"{path}: not a JSON file: {error}") from error


def dumps(value: Any, indent: str = "") -> str:
    """Return indented JSON that keeps lists of numbers and strings on one line."""
    inner = f"{indent}  "
    if isinstance(value, Mapping) and value:
        entries = [f"{json.dumps(name)}: {dumps(entry, inner)}" for name, entry in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
        entries = [dumps(entry, inner) for entry in value]
        opening, closing = "[", "]"
    else:
        return json.dumps(value)
    return f"{opening}\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}{closing}"
