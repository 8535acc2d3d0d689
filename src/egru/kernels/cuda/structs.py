"""Structs that are filled in Python and read by a CUDA kernel, both from one table of fields."""

import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_POINTER = "P"
_FORMATS = {"float": "f", "int": "i", "i64": "q"}


class ArgumentStruct:
    """A struct passed to a kernel, described by its fields.

    Args:
        name: The struct's name in C++.
        fields: ``(name, C++ type)`` in order of declaration. A type is a pointer, ``float``, ``int``, ``i64`` or
            another struct.
    """

    def __init__(self, name: str, fields: "Sequence[tuple[str, str | ArgumentStruct]]") -> None:
        self.name = name
        self.fields = dict(fields)
        if len(self.fields) != len(fields):
            raise ValueError(f"{name}: field names must be unique, got {[field for field, _ in fields]}")
        self.alignment = 1
        self.offsets: dict[str, int] = {}
        format, end = "", 0
        for field, ctype in fields:
            inner, size, alignment = _layout(ctype)
            gap = -end % alignment
            self.offsets[field] = end + gap
            format += f"{gap}x{inner}" if gap else inner
            end += gap + size
            self.alignment = max(self.alignment, alignment)
        gap = -end % self.alignment
        self.format = f"{format}{gap}x" if gap else format
        self.size = end + gap
        packer = struct.Struct(self.format)
        if packer.size != self.size:
            raise ValueError(f"{name}: struct packs {packer.size} bytes, C++ expects {self.size}")
        self._unpack = packer.unpack
        self.pack = packer.pack
        """Pack values in table order, with those of nested structs in place. The fastest way to fill the struct."""

    def pack_named(self, **values: Any) -> bytes:
        """Pack values by field name; nested structs take a tuple.

        Raises:
            TypeError: If a field is missing or unknown.
        """
        if values.keys() != self.fields.keys():
            missing = [field for field in self.fields if field not in values]
            unknown = [field for field in values if field not in self.fields]
            raise TypeError(f"{self.name}: missing fields {missing}, unknown fields {unknown}")
        flat: list[Any] = []
        for field, ctype in self.fields.items():
            flat.extend(values[field]) if isinstance(ctype, ArgumentStruct) else flat.append(values[field])
        return self.pack(*flat)

    def unpack(self, data: bytes) -> dict[str, Any]:
        """Return the values of a packed struct by field name; nested structs are dictionaries."""
        return self._named(iter(self._unpack(data)))

    def _named(self, values: Iterator[Any]) -> dict[str, Any]:
        return {
            field: ctype._named(values) if isinstance(ctype, ArgumentStruct) else next(values)
            for field, ctype in self.fields.items()
        }

    @property
    def nested(self) -> "list[ArgumentStruct]":
        """The structs among the fields."""
        return [ctype for ctype in self.fields.values() if isinstance(ctype, ArgumentStruct)]

    @property
    def definition(self) -> str:
        """The C++ definition, followed by a check of its size."""
        lines = [
            f"  {ctype.name if isinstance(ctype, ArgumentStruct) else ctype} {field};\n"
            for field, ctype in self.fields.items()
        ]
        check = f'static_assert(sizeof({self.name}) == {self.size}, "{self.name}: differs from arguments.py");\n'
        return f"struct {self.name} {{\n{''.join(lines)}}};\n{check}"


class PackedArguments:
    """A packed struct whose fields can be changed between launches.

    Example:
        >>> pair = ArgumentStruct("Pair", [("t", "int"), ("x", "float")])
        >>> packed = PackedArguments(pair, t=0, x=0.5)
        >>> set_step = packed.setter("t")
        >>> set_step(3)
        >>> pair.unpack(bytes(packed.data))
        {'t': 3, 'x': 0.5}
    """

    def __init__(self, described: ArgumentStruct, **values: Any) -> None:
        self._described = described
        self.data = bytearray(described.pack_named(**values))

    def setter(self, field: str) -> Callable[..., None]:
        """Return a function that changes one field; for a nested struct it takes all its values."""
        format, _, _ = _layout(self._described.fields[field])
        return functools.partial(struct.Struct(format).pack_into, self.data, self._described.offsets[field])


def _layout(ctype: str | ArgumentStruct) -> tuple[str, int, int]:
    """Return the ``struct`` format, size and alignment of a C++ type."""
    if isinstance(ctype, ArgumentStruct):
        return ctype.format, ctype.size, ctype.alignment
    if ctype.endswith("*"):
        format = _POINTER
    elif ctype in _FORMATS:
        format = _FORMATS[ctype]
    else:
        raise ValueError(f"argument types are pointers, structs, {', '.join(_FORMATS)}; got {ctype!r}")
    size = struct.calcsize(format)
    return format, size, size


def definitions(structs: Sequence[ArgumentStruct]) -> str:
    """Return the C++ definitions of ``structs``, each once and after those that it contains."""
    ordered: dict[str, str] = {}

    def add(described: ArgumentStruct) -> None:
        for inner in described.nested:
            add(inner)
        ordered[described.name] = described.definition

    for described in structs:
        add(described)
    return "".join(ordered.values())
