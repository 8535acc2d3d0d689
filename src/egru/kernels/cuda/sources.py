"""CUDA C++ of a kernel: constants, argument structs, then the source files it is made of."""

import pathlib
from collections.abc import Mapping, Sequence

from egru.kernels.cuda.arguments import KEEP, SURROGATE
from egru.kernels.cuda.structs import ArgumentStruct, definitions
from egru.types import RESETS, Reset, ResetGate

PRECISIONS = ("", "bfloat16", "float16")
"""Operand types of the products, in the order of the constant LOW."""
RECURSION = ("operand.cuh", "element.cuh", "reserve.cuh")
"""Source files shared by all kernels of the recursion."""
_FOLDER = pathlib.Path(__file__).parent / "source"


def option_constants(reset: Reset, reset_gate: ResetGate, precision: str) -> dict[str, int]:
    """Return the constants that select a problem's options in the source."""
    return {
        "RESET": RESETS.index(reset),
        "AFTER": int(reset_gate == "after"),
        "LOW": PRECISIONS.index(precision),
    }


def assemble(
    constants: Mapping[str, int], structs: Sequence[ArgumentStruct], files: Sequence[str], generated: str = ""
) -> str:
    """Return the source of one compilation unit.

    Args:
        constants: Preprocessor constants: sizes and options that are compiled in.
        structs: Argument structs of its kernels.
        files: Names of source files, in order.
        generated: Functions generated on the host, placed before the files.
    """
    return "".join(
        [
            *[f"#define {name} {value}\n" for name, value in constants.items()],
            _read("types.cuh"),
            definitions([KEEP, SURROGATE, *structs]),
            generated,
            *[_read(name) for name in files],
        ]
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text()
