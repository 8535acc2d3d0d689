"""C source of a network with float32 state: float32 or int8 weights, bit-identical to the engine's plain level."""

import dataclasses

import numpy as np

from egru.runtime.c.common import (
    Floats,
    assemble,
    biases,
    layer_flags,
    layer_lines,
    network_flags,
    quantise,
    recurrent_rows,
)
from egru.runtime.c.template import array, decimal, render
from egru.runtime.network import Layer, Network
from egru.runtime.reference import MAX_FLOAT32_INPUTS
from egru.types import CWeightFormat


@dataclasses.dataclass
class Matrix:
    """A matrix as C arrays, with one row per input so that only the rows of active inputs are read.

    Attributes:
        name: Name of the array.
        columns: Number of outputs.
        int8: Whether the weights are int8, with one scale per column in the array ``{name}_scale``.
        text: Definitions of the arrays.
    """

    name: str
    columns: int
    int8: bool
    text: str

    def product(self, sum: str, first: str, columns: str, vector: str) -> str:
        """Return the statement that adds the product of a sparse vector with some columns to ``sum``."""
        offset = "" if first == "0" else f" + {first}"
        rows = f"{self.name}{offset}, {self.columns}"
        if self.int8:
            return f"add_rows_int8({sum}, {columns}, {rows}, {self.name}_scale{offset}, {vector}, state->work.q)"
        return f"add_rows({sum}, {columns}, {rows}, {vector})"


def float_source(network: Network, weights: CWeightFormat, name: str) -> dict[str, str]:
    """Return the text of the header and the source file by name."""
    parts = [_layer_arrays(layer, i, weights) for i, layer in enumerate(network.layers)]
    readout = None if network.readout is None else _matrix("readout", network.readout.numpy(), weights)
    matrices = [matrix for _, w, v in parts for matrix in (w, v)] + ([readout] if readout else [])
    last = len(network.layers) - 1
    flags = network_flags(network) | {
        "INTEGER": False,
        "FLOAT32": any(not matrix.int8 for matrix in matrices),
        "INT8": any(matrix.int8 for matrix in matrices),
    }
    arrays = "".join(text for text, _, _ in parts)
    if network.embedding is not None:
        arrays += array("float", "embedding", network.embedding.numpy())
    if readout is not None:
        bias = network.readout_bias
        values = np.zeros(network.outputs, np.float32) if bias is None else bias.numpy()
        arrays += readout.text + array("float", "readout_bias", values)
    active = f"state->index_{last}, state->value_{last}, state->count_{last}"
    step = render(
        "float_step.c",
        flags,
        {
            "ADD_READOUT": readout.product("out", "0", "MODEL_OUTPUTS", active) if readout else "",
            "LAST": str(last),
            "DECAY_VALUE": decimal(network.decay or 0.0),
            "TRACE_OUTPUT": ("scale * trace" if flags["MEAN"] else "trace")
            + (" + (double)readout_bias[j]" if readout else ""),
            "SAVED_FLOATS": str(2 * sum(layer.hidden for layer in network.layers)),
            **layer_lines(network, 4, "clear", "finite &= "),
        },
    )
    code = [
        render("float_kernels.c", flags, {}),
        *(_layer_source(layer, i, *parts[i][1:]) for i, layer in enumerate(network.layers)),
        step,
    ]
    types = {"VALUE_TYPE": "float", "OUT_TYPE": "float", "TRACE_TYPE": "double"}
    return assemble(network, weights, name, flags, types, 4, arrays, "".join(code), {})


def _matrix(name: str, weight: Floats, weights: CWeightFormat) -> Matrix:
    if weights == "float32":
        return Matrix(name, len(weight), False, array("float", name, np.ascontiguousarray(weight.T)))
    q, scale = quantise(weight)
    text = array("int8_t", name, np.ascontiguousarray(q.T)) + array("float", f"{name}_scale", scale)
    return Matrix(name, len(weight), True, text)


def _layer_arrays(layer: Layer, index: int, weights: CWeightFormat) -> tuple[str, Matrix, Matrix]:
    """Return the definitions of a layer's arrays, and its matrices: w has columns r, u, z and v has z, r, u."""
    w = _matrix(f"w_{index}", layer.weight_ih.numpy(), "float32" if layer.inputs <= MAX_FLOAT32_INPUTS else weights)
    v = _matrix(f"v_{index}", recurrent_rows(layer), weights)
    bias, bias_q = biases(layer)
    text = w.text + v.text + array("float", f"bias_{index}", bias)
    if layer.reset_gate == "after":
        text += array("float", f"bias_q_{index}", bias_q)
    if layer.reset != "none":
        text += array("float", f"rho_{index}", layer.reset_scale.numpy())
    return text + array("float", f"theta_{index}", layer.theta.numpy()), w, v


def _layer_source(layer: Layer, index: int, w: Matrix, v: Matrix) -> str:
    active = f"state->index_{index}, state->value_{index}, state->count_{index}"
    gated = f"state->index_{index}, state->work.gated, state->count_{index}"
    after = layer.reset_gate == "after"
    recurrent = ("sum - hidden", "0", "3 * hidden") if after else ("sum", "hidden", "2 * hidden")
    return render(
        "float_layer.c",
        layer_flags(layer),
        {
            "LAYER": str(index),
            "HIDDEN": str(layer.hidden),
            "KEEP_VALUE": decimal(np.float32(layer.keep).item(), 9) + "f",
            "ADD_INPUTS": w.product("sum", "0", "3 * hidden", "index, value, count"),
            "ADD_RECURRENT": v.product(*recurrent, active),
            "ADD_GATED": v.product("sum + 2 * hidden", "0", "hidden", gated),
        },
    )
