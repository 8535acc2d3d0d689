"""Kernel arguments: one field table per struct, from which the CUDA and the Python side are both generated.

A kernel receives a single struct. Its table below lists every field with its C++ type. The table yields the C++
definition that :mod:`egru.kernels.cuda.sources` puts in front of the kernel, and the packer that fills the struct.
To add an argument, add a row here and pass its value where the kernel is launched.

Sizes in the comments: ``T`` steps, ``B`` sequences, ``H`` units, ``HP`` units rounded up to a multiple of 8, ``I``
input features, ``IP`` features rounded up to a multiple of 8. A pointer is null (0 in Python) if the value is absent.
"""

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
        >>> arguments = PackedArguments(KEEP, p=0, t=0, b=0, h=0)
        >>> set_step = arguments.setter("t")
        >>> set_step(3)
        >>> KEEP.unpack(bytes(arguments.data))["t"]
        3
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


KEEP = ArgumentStruct(
    "Keep",  # zoneout: a (T, B, H) array by strides
    [("p", "const float*"), ("t", "i64"), ("b", "i64"), ("h", "i64")],
)

SURROGATE = ArgumentStruct(
    "Surrogate",  # the triangular pseudo-derivative
    [("inverse_width", "float"), ("height", "float"), ("bounded", "int")],
)

STEP_FORWARD = ArgumentStruct(
    "StepForward",  # stepwise.cu: one step
    [
        ("projected", "const float*"),  # (T, B, 3, HP): x W without bias
        ("product", "const float*"),  # (B, 3 HP): y V; "before": (B, 2 HP) for r and u, then (B, HP) for z
        ("bias_ih", "const float*"),
        ("bias_hh", "const float*"),
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("c_last", "float*"),  # (B, H), updated in place, as are the next two
        ("y_last", "float*"),
        ("fired", "unsigned char*"),
        ("operand", "Operand*"),  # (B, HP): the input of the next product
        ("y", "float*"),  # (T, B, H)
        ("c", "float*"),  # (T, B, H)
        ("gate_r", "float*"),  # (B, H), "before" only
        ("gate_u", "float*"),  # (B, H), "before" only
        ("reserve", "Reserve*"),  # see reserve.cuh; null if nothing is saved
        ("T", "int"),
        ("t", "int"),
        ("B", "int"),
        ("H", "int"),
        ("HP", "int"),
    ],
)

STEP_BACKWARD = ArgumentStruct(
    "StepBackward",  # stepwise.cu: one step
    [
        ("c", "const float*"),  # (T, B, H)
        ("c0", "const float*"),  # (B, H)
        ("y0", "const float*"),  # (B, H)
        ("reserve", "const Reserve*"),
        ("grad_y", "const float*"),
        ("grad_c", "const float*"),
        ("product", "const float*"),  # (B, HP): the gradient through the weights; null at the last step
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("dc", "float*"),  # (B, H), updated in place, as are the next three
        ("dy", "float*"),  # the element-wise path only
        ("de", "float*"),
        ("dtheta", "float*"),
        ("gates", "Operand*"),  # (T, B, 4, HP): the gradient that multiplies V_z, then a_r, a_u, a_z
        ("source", "Operand*"),  # (T, B, HP): y of the previous step
        ("source_z", "Operand*"),  # (T, B, HP): r times y of the previous step, "before" only
        ("surrogate", SURROGATE),
        ("T", "int"),
        ("t", "int"),
        ("B", "int"),
        ("H", "int"),
        ("HP", "int"),
    ],
)

SEQUENCE_FORWARD = ArgumentStruct(
    "SequenceForward",  # forward.cu
    [
        ("projected", "const float*"),  # (T, B, 3, HP): x W without bias; null if the input has one feature
        ("input", "const float*"),  # (T, B), only if the input has one feature
        ("weight_ih", "const float*"),  # (3 H,), only if the input has one feature
        ("weights", "const char*"),  # packed recurrent weights, see pack.py
        ("bias_ih", "const float*"),
        ("bias_hh", "const float*"),
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("c0", "const float*"),
        ("y0", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("exchange", "char*"),  # see group.cuh
        ("counter", "u32*"),  # the groups' barriers
        ("y", "float*"),
        ("c", "float*"),
        ("c_last", "float*"),
        ("y_last", "float*"),
        ("reserve", "Reserve*"),  # see reserve.cuh; null if nothing is saved
        ("error", "int*"),  # set to 1 by a kernel that timed out
        ("T", "int"),
        ("B", "int"),
        ("b0", "int"),  # the first sequence of this launch
        ("state_stride", "int"),  # between rows of c0 and y0: H, or 0 if all rows share one
    ],
)

SMALL_BATCH = ArgumentStruct(
    "SmallBatch",  # small_batch.cu
    [
        ("projected", "const float*"),  # (T, B, 3, STRIDE): x W without bias; null if the input has one feature
        ("input", "const float*"),  # (T, B), used if the input has one feature
        ("weight_ih", "const float*"),  # (3 H,), used if the input has one feature
        ("weights", "const float*"),  # (3 H, H), recurrent, as in torch
        ("bias_ih", "const float*"),
        ("bias_hh", "const float*"),
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("c0", "const float*"),
        ("y0", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("exchange", "u64*"),  # [2][group][word][unit], zero at the start
        ("y", "float*"),
        ("c", "float*"),
        ("c_last", "float*"),
        ("y_last", "float*"),
        ("reserve", "Reserve*"),  # see reserve.cuh; null if nothing is saved
        ("error", "int*"),  # set to 1 by a kernel that timed out
        ("T", "int"),
        ("B", "int"),
        ("b0", "int"),  # the first sequence of this launch
        ("state_stride", "int"),  # between rows of c0 and y0: H, or 0 if all rows share one
    ],
)

SEQUENCE_BACKWARD = ArgumentStruct(
    "SequenceBackward",  # backward.cu
    [
        ("c", "const float*"),
        ("c0", "const float*"),
        ("y0", "const float*"),
        ("reserve", "const Reserve*"),
        ("grad_y", "const float*"),
        ("grad_c", "const float*"),
        ("grad_c_last", "const float*"),
        ("grad_y_last", "const float*"),
        ("input", "const float*"),  # (T, B), only if the input has one feature
        ("weights", "const char*"),  # packed recurrent weights, see pack.py
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("exchange", "char*"),  # see group.cuh
        ("counter", "u32*"),  # the groups' barriers
        # Low precision, two values per word. The fourth block of `gates` is written only if GRAD_INPUT, that is if a
        # product over time reads it.
        ("gates", "u32*"),  # (T, B, 4, HP): the gradient that multiplies V_z, then a_r, a_u, a_z
        ("source", "u32*"),  # (T, B, HP + 8): y of the previous step, 1, the input of a one-feature layer, zeros
        ("source_z", "u32*"),  # (T, B, HP): r times y of the previous step, "before" only
        ("dc0", "float*"),
        ("dy0", "float*"),
        ("sums", "float*"),  # (groups * 8 warps, SUMS, HP)
        ("error", "int*"),  # set to 1 by a kernel that timed out
        ("surrogate", SURROGATE),
        ("T", "int"),
        ("B", "int"),
        ("b0", "int"),  # the first sequence of this launch
        ("group0", "int"),  # the first group of this launch
        ("state_stride", "int"),  # between rows of c0 and y0: H, or 0 if all rows share one
    ],
)

PACK = ArgumentStruct(
    "Pack",
    [
        ("weight", "const float*"),  # (3, H, H)
        ("out", "uint4*"),
        ("H", "int"),
        ("k_chunks", "int"),  # k8-chunks of one gate
        ("multiple", "int"),  # k8-chunks are padded to a multiple of this
        ("tiles", "int"),
        ("blocks", "int"),
        ("after", "int"),
    ],
)

PAD = ArgumentStruct(
    "Pad",
    [
        ("in", "const float*"),  # (blocks, rows, columns)
        ("out", "uint4*"),  # (blocks, rows_out, columns_out) in low precision, padded with zeros
        ("blocks", "int"),
        ("rows", "int"),
        ("columns", "int"),
        ("rows_out", "int"),
        ("columns_out", "int"),
    ],
)

PREPARE = ArgumentStruct(
    "Prepare",  # prepare.cu
    [
        ("pack", PACK),  # no blocks if the weights stay as they are
        ("input", PAD),  # null if no product needs it
        ("weight_ih", PAD),  # null if no product needs it
        ("workspace", "uint4*"),  # set to zero
        ("words", "i64"),  # of 16 bytes
        ("backward", "int"),
    ],
)

GATHER = ArgumentStruct(
    "Gather",  # gather.cu
    [
        ("hh", "const float*"),  # (3 or 2, HP, width): V_z ("after" only), r, u; columns: V, sums, inputs
        ("hh_z", "const float*"),  # (HP, HP), "before" only
        ("ih", "const float*"),  # (3, HP, IP); null if there is nothing to gather
        ("sums", "const float*"),  # (parts, quantities, HP): theta, a_z, a_z times the input
        ("weight_hh", "float*"),
        ("weight_ih", "float*"),
        ("bias_ih", "float*"),
        ("bias_hh", "float*"),
        ("theta", "float*"),
        ("H", "int"),
        ("HP", "int"),
        ("width", "int"),
        ("I", "int"),
        ("IP", "int"),
        ("quantities", "int"),  # 3 if the input has one feature, else 2
        ("parts", "int"),
        ("after", "int"),
    ],
)
