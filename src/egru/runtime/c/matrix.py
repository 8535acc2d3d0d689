"""Weight matrices as C arrays, with one row per input so that only the rows of active inputs are read."""

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt

from egru.runtime.c.template import array, lines
from egru.runtime.network import Layer

Floats = npt.NDArray[np.float32]
Kind = Literal["float32", "int16", "int8", "sparse"]
SPARSE_SHARE = 0.5
"""An int8 matrix with a larger share of zeros is stored without them."""


@dataclasses.dataclass
class Matrix:
    """A matrix as C arrays.

    Attributes:
        name: Name of the array.
        kind: Number format; ``"sparse"`` is int8 without the zeros.
        columns: Number of outputs.
        text: Definitions of the arrays.
        drop: Bits by which the integer form shortens values so that no sum overflows; None in other forms.
        shift: In the integer form, bits by which products are shifted (int16), or zeros before a scale (int8); else
            None.
    """

    name: str
    kind: Kind
    columns: int
    text: str
    drop: int | None = None
    shift: int | None = None

    def product(self, sum: str, columns: str, vector: str, start: str | None = None) -> str:
        """Return the statement that adds the product with a sparse vector to ``sum``, or to a copy of ``start``."""
        name, function = self.name, "add_rows" if self.kind == "float32" else f"add_rows_{self.kind}"
        starts_here = self.kind in ("float32", "int16")  # the functions of the other kinds add to `sum`
        arguments = [sum, columns, name]
        if starts_here:
            arguments.insert(1, start or "NULL")
        if self.kind == "sparse":
            arguments += [f"{name}_start", f"{name}_mask"]
        if self.kind in ("int8", "sparse"):
            arguments.append(f"{name}_scale")
        arguments += [str(bits) for bits in (self.drop, self.shift) if bits is not None]
        arguments.append(vector)
        if self.kind in ("int8", "sparse"):
            arguments.append("state->work.q")
        if self.kind == "sparse":
            arguments.append("state->work.total")
        call = f"{function}({', '.join(arguments)})"
        return call if start is None or starts_here else f"copy({sum}, {start}, {columns});\n    {call}"


def flags(matrices: list[Matrix]) -> dict[str, bool]:
    """Return the conditions of the templates that depend on the kinds of matrices."""
    kinds = {matrix.kind for matrix in matrices}
    return {
        "FLOAT32": "float32" in kinds,
        "INT16": "int16" in kinds,
        "DENSE": "int8" in kinds,
        "SPARSE": "sparse" in kinds,
        "INT8": bool(kinds & {"int8", "sparse"}),
    }


def quantise(weight: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Round the rows of a matrix to int8 as the engine does, and return one scale per row."""
    largest = np.abs(weight).max(1)
    scale = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    return np.rint(weight / scale[:, None]).astype(np.int8), scale


def int8_arrays(name: str, q: npt.NDArray[np.int8]) -> tuple[Kind, str]:
    """Return how a matrix ``(outputs, inputs)`` is stored, and its arrays."""
    rows = np.ascontiguousarray(q.T)
    if np.count_nonzero(rows) < (1 - SPARSE_SHARE) * rows.size:
        start = np.cumsum(np.count_nonzero(rows, 1)) - np.count_nonzero(rows, 1)
        mask = np.packbits(rows != 0, 1, "little")
        values = rows[rows != 0] if rows.any() else np.zeros(1, np.int8)  # C has no empty arrays
        text = array("int8_t", name, values) + array("uint32_t", f"{name}_start", start)
        return "sparse", text + array("uint8_t", f"{name}_mask", mask)
    # Groups of four columns, and four groups after the last row: blocks of sixteen columns and one more are read.
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))).reshape(-1, 4)
    groups = ["W({},{},{},{})".format(*group) for group in [*padded.tolist(), *4 * [[0, 0, 0, 0]]]]
    return "int8", f"static const weight {name}[] = {{\n{lines(groups)}\n}};\n"


def layer_weights(layer: Layer, index: int) -> dict[str, Floats]:
    """Return the matrices of a layer by name.

    ``w`` has the outputs r, u, z. If the reset gate acts after the product, ``v`` has z, r, u. Otherwise ``v`` has r
    and u, and ``g`` has z, which reads the gated events. For an LSTM, ``w`` and ``v`` have i, f, g, o.
    """
    weight, H = layer.weight_hh.numpy(), layer.hidden
    matrices = {f"w_{index}": layer.weight_ih.numpy()}
    if layer.cell == "lstm":
        return matrices | {f"v_{index}": weight}
    if layer.reset_gate == "after":
        return matrices | {f"v_{index}": np.concatenate((weight[2 * H :], weight[: 2 * H]))}
    return matrices | {f"v_{index}": weight[: 2 * H], f"g_{index}": weight[2 * H :]}


def layer_products(layer: Layer, index: int, matrices: dict[str, Matrix], receives: bool = False) -> dict[str, str]:
    """Return the statements of a layer's template that multiply with matrices.

    Args:
        layer: The layer.
        index: Its index.
        matrices: Weights by name.
        receives: Whether the input is a list of changes, which are added to the sum of earlier ones.
    """
    events, v = "active, active_value, active_count", matrices[f"v_{index}"]
    to = f"state->received_{index}" if receives else "sum"
    columns = f"{layer.gates} * hidden"
    start = None if receives else f"bias_{index}"
    products = {"ADD_INPUTS": matrices[f"w_{index}"].product(to, columns, "index, value, count", start)}
    if layer.events == "delta":
        return products | {"ADD_RECURRENT": v.product("total", columns, events)}
    if layer.cell == "lstm":
        return products | {"ADD_RECURRENT": v.product("sum", columns, events)}
    if layer.reset_gate == "after":
        return products | {"ADD_RECURRENT": v.product("sum - hidden", columns, events)}
    gated = events.replace("active_value", "state->work.gated")
    return products | {
        "ADD_RECURRENT": v.product("sum", "2 * hidden", events),
        "ADD_GATED": matrices[f"g_{index}"].product("sum + 2 * hidden", "hidden", gated),
    }
