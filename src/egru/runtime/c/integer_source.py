"""C source of a network in integers: int8 weights, int16 state, tables for sigmoid and tanh.

A number is an integer times ``2 ** -fraction``. Products are summed in 32 bits; values are shortened by as many bits as
the largest possible sum requires. The sum of an output is multiplied by a scale in 64 bits.
"""

import dataclasses
import math

import numpy as np
import numpy.typing as npt

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
from egru.runtime.c.template import array, render
from egru.runtime.network import Layer, Network
from egru.runtime.reference import MAX_FLOAT32_INPUTS

PRE_FRACTION = 12
INPUT_FRACTION = 12
OUTPUT_FRACTION = 16
MAX_PRE = 2.0**16
"""Bound of the parts of a pre-activation: the sum of four of them must fit into 32 bits."""
_RHO_FRACTION, _MAX_RHO = 12, 8.0
_FULL = 2**15
"""The largest magnitude of an int16 value."""


@dataclasses.dataclass
class Matrix:
    """A matrix as C arrays, with one row per input.

    Attributes:
        name: Name of the array.
        kind: ``"int8"``, or ``"int16"`` for matrices with few inputs.
        columns: Number of outputs.
        drop: Bits by which values are shortened so that no sum overflows.
        unit: Real value of an integer of each column's sum.
        largest: Bound of the sums.
        shift: The scale of column j is ``{name}_scale[j] / 2 ** shift``.
        text: Definitions of the arrays.
    """

    name: str
    kind: str
    columns: int
    drop: int
    unit: npt.NDArray[np.float64]
    largest: int
    shift: int
    text: str

    def product(self, sum: str, first: str, columns: str, vector: str, scaled: bool = True) -> str:
        """Return the statement that adds the product of a sparse vector with some columns to ``sum``."""
        offset = "" if first == "0" else f" + {first}"
        rows = f"{sum}, {columns}, {self.name}{offset}, {self.columns}"
        if scaled:
            return f"add_rows_{self.kind}({rows}, {self.name}_scale{offset}, {self.shift}, {vector}, {self.drop})"
        return f"accumulate_{self.kind}({rows}, {vector}, {self.drop})"


def integer_source(network: Network, name: str) -> dict[str, str]:
    """Return the text of the header and the source file by name.

    Raises:
        ValueError: If a number is outside the range of the integer form.
    """
    fractions = [_state_fraction(layer, i) for i, layer in enumerate(network.layers)]
    input_fraction = INPUT_FRACTION
    arrays = tables()
    if network.embedding is not None:
        table = network.embedding.numpy()
        input_fraction = 15 - max(0, math.ceil(math.log2(max(float(np.abs(table).max()), 2.0**-10))) + 1)
        arrays += array("int16_t", "embedding", _fixed(table, input_fraction, 16))
    matrices: list[tuple[Matrix, Matrix]] = []
    fraction = input_fraction
    for i, layer in enumerate(network.layers):
        text, w, v = _layer_arrays(layer, i, fraction, fractions[i])
        arrays += text
        matrices.append((w, v))
        fraction = fractions[i]
    readout = None
    if network.readout is not None:
        readout = _matrix("readout", network.readout.numpy(), fraction, OUTPUT_FRACTION)
        arrays += readout.text
    output_arrays, output_names = _output(network, readout, fraction)
    flags = network_flags(network) | {"INTEGER": True, "INT8": False, "DECAY": network.decay not in (None, 1.0)}
    last = len(network.layers) - 1
    active = f"state->index_{last}, state->value_{last}, state->count_{last}"
    used = [*(matrix for pair in matrices for matrix in pair)]
    kinds = sorted({matrix.kind for matrix in used} | ({"int8"} if readout else set()))
    code = [
        render("integer_kernels.c", flags, {"PRE": str(PRE_FRACTION)}),
        *(
            render(
                "integer_rows.c", {"SCALED": any(m.kind == kind for m in used)}, {"TYPE": kind, "TYPE_t": f"{kind}_t"}
            )
            for kind in kinds
        ),
        *(_layer_source(layer, i, fractions[i], *matrices[i]) for i, layer in enumerate(network.layers)),
        render(
            "integer_step.c",
            flags,
            {
                "ADD_READOUT": readout.product("sum", "0", "MODEL_OUTPUTS", active, False) if readout else "",
                "LAST": str(last),
                "SAVED_LAYERS": str(4 * sum(layer.hidden for layer in network.layers)),
                **output_names,
                **layer_lines(network, 2, "clear_state", ""),
            },
        ),
    ]
    types = {"VALUE_TYPE": "int16_t", "OUT_TYPE": "int32_t", "TRACE_TYPE": "int64_t"}
    event_fraction = "".join(f"(layer) == {i} ? {value} : " for i, value in enumerate(fractions[:-1]))
    constants = {
        "MODEL_INPUT_FRACTION_VALUE": str(input_fraction),
        "MODEL_EVENT_FRACTION_VALUE": f"{event_fraction}{fractions[-1]}" if last else f"(void)(layer), {fractions[0]}",
        "MODEL_OUTPUT_FRACTION_VALUE": str(OUTPUT_FRACTION),
    }
    return assemble(network, "integer", name, flags, types, 2, arrays + output_arrays, "".join(code), constants)


def _fixed(values: npt.ArrayLike, fraction: int, bits: int = 32) -> npt.NDArray[np.int64]:
    """Round numbers to fixed point; those out of range become the nearest number in range."""
    limit = 2 ** (bits - 1)
    return np.clip(np.rint(np.asarray(values, np.float64) * 2.0**fraction), -limit, limit - 1).astype(np.int64)


def tables() -> str:
    """Return the tables of sigmoid and tanh."""
    x = np.arange(-256, 257)
    sigmoid, tanh = 1 / (1 + np.exp(-x / 16)), np.tanh(x / 32)
    return array("int16_t", "sigmoid_table", _fixed(sigmoid, 15, 16)) + array(
        "int16_t", "tanh_table", _fixed(tanh, 15, 16)
    )


def _state_fraction(layer: Layer, index: int) -> int:
    """Return the fraction of a layer's state, from a bound of its magnitude. Larger states saturate."""
    rho, theta = float(layer.reset_scale.max()), float(layer.theta.abs().max())
    if rho > _MAX_RHO and layer.reset != "none":
        raise ValueError(f"export_c: integer weights support reset_scale up to {_MAX_RHO:g}; layer {index} has {rho:g}")
    bound = {"none": 1.0, "hard": max(1.0, rho - 1), "output": 1 + rho, "threshold": 1 + rho * theta}[layer.reset]
    return 15 - math.ceil(math.log2(bound))


def _matrix(name: str, weight: Floats, from_fraction: int, to_fraction: int) -> Matrix:
    """Quantise a matrix that is multiplied with int16 values of ``from_fraction``."""
    if weight.shape[1] <= MAX_FLOAT32_INPUTS and name.startswith("w_"):
        # Few inputs: sixteen bits cost little. Sums of magnitudes below 2^16 times 2^15 fit into 32 bits.
        sums = np.abs(weight.astype(np.float64)).sum(1)
        scale = np.maximum(np.where(sums > 0, sums, 1.0) / 65000, np.abs(weight).max(1) / 32000.0)
        kind, q = "int16", np.rint(weight / scale[:, None]).astype(np.int16)
    else:
        q, scale = quantise(weight)
        kind = "int8"
    sums = int(np.abs(q.astype(np.int64)).sum(1).max())
    drop = 0
    while sums * (_FULL >> drop) >= 2**31:
        drop += 1
    largest = sums * (_FULL >> drop)
    unit = scale.astype(np.float64) * 2.0 ** (drop - from_fraction)
    factors = unit * 2.0**to_fraction
    shift = min(62, 30 - math.floor(math.log2(factors.max())))
    if shift < 1 or float((unit * largest).max()) > MAX_PRE:
        raise ValueError(f"export_c: {name} has weights up to {np.abs(weight).max():g}, too large for integer weights")
    text = array(f"{kind}_t", name, np.ascontiguousarray(q.T))
    if name != "readout":  # that of the readout depends on the trace: see _output
        text += array("int32_t", f"{name}_scale", _fixed(factors, shift))
    return Matrix(name, kind, len(weight), drop, unit, largest, shift, text)


def _layer_arrays(layer: Layer, index: int, inputs: int, state: int) -> tuple[str, Matrix, Matrix]:
    """Return the definitions of a layer's arrays, and its matrices: w has columns r, u, z and v has z, r, u."""
    w = _matrix(f"w_{index}", layer.weight_ih.numpy(), inputs, PRE_FRACTION)
    v = _matrix(f"v_{index}", recurrent_rows(layer), state, PRE_FRACTION)
    bias, bias_q = biases(layer)
    if max(np.abs(bias).max(), np.abs(bias_q).max()) > MAX_PRE:
        raise ValueError(
            f"export_c: layer {index} has biases up to {np.abs(bias).max():g}, too large for integer weights"
        )
    text = w.text + v.text + array("int32_t", f"bias_{index}", _fixed(bias, PRE_FRACTION))
    if layer.reset_gate == "after":
        text += array("int32_t", f"bias_q_{index}", _fixed(bias_q, PRE_FRACTION))
    if layer.reset != "none":
        text += array("int32_t", f"rho_{index}", _fixed(layer.reset_scale.numpy(), _RHO_FRACTION))
    # Rounded down: an integer state is above this number exactly if its real value is above the threshold.
    theta = np.clip(np.floor(layer.theta.numpy().astype(np.float64) * 2.0**state), -_FULL, _FULL - 1)
    return text + array("int16_t", f"theta_{index}", theta.astype(np.int64)), w, v


def _output(network: Network, readout: Matrix | None, fraction: int) -> tuple[str, dict[str, str]]:
    """Return the arrays of the outputs and the names of ``integer_step.c`` that depend on the range of their sums."""
    largest = _FULL if readout is None else readout.largest
    decay = network.decay
    drop, decay_bits, trace_max = 0, 0, 2**62 - 1
    if decay is not None and decay < 1:
        trace_max = math.ceil(largest / (1 - decay)) + 2
        drop = max(0, math.ceil(math.log2((trace_max + 1) / 2**31)))
        decay_bits = min(30, 61 - math.ceil(math.log2(trace_max + 1)))
    elif decay == 1 and network.trace != "mean":
        drop = 16  # a sum has no bound: outputs of more than 2^47 units saturate
    unit = np.full(network.outputs, 2.0**-fraction) if readout is None else readout.unit
    factors = unit * 2.0 ** (OUTPUT_FRACTION + drop)
    shift = min(62, 30 - math.floor(math.log2(factors.max())))
    text = array("int32_t", "output_scale", _fixed(factors, shift))
    bias = network.readout_bias
    if bias is not None:
        text += array("int32_t", "readout_bias", _fixed(bias.numpy(), OUTPUT_FRACTION))
    return text, {
        "OUTPUT_SCALE": "output_scale[j]",
        "OUTPUT_SHIFT": str(shift),
        "OUTPUT_DROP": str(drop),
        "OUTPUT_BIAS": "" if bias is None else " + readout_bias[j]",
        "DECAY_VALUE": str(round((decay or 0.0) * 2**decay_bits)),
        "DECAY_BITS": str(decay_bits),
        "TRACE_MAX": f"INT64_C({trace_max})",
    }


def _layer_source(layer: Layer, index: int, fraction: int, w: Matrix, v: Matrix) -> str:
    active = f"state->index_{index}, state->value_{index}, state->count_{index}"
    gated = f"state->index_{index}, state->work.gated, state->count_{index}"
    after = layer.reset_gate == "after"
    recurrent = ("sum - hidden", "0", "3 * hidden") if after else ("sum", "hidden", "2 * hidden")
    return render(
        "integer_layer.c",
        layer_flags(layer),
        {
            "LAYER": str(index),
            "HIDDEN": str(layer.hidden),
            "FRACTION": str(fraction),
            "KEEP_VALUE": str(min(round(layer.keep * 2**15), 2**15 - 1)),
            "ADD_INPUTS": w.product("sum", "0", "3 * hidden", "index, value, count"),
            "ADD_RECURRENT": v.product(*recurrent, active),
            "ADD_GATED": v.product("sum + 2 * hidden", "0", "hidden", gated),
        },
    )
