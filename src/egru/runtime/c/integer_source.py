"""C source of a network in integers: int8 weights, int16 state, tables for sigmoid and tanh.

A number is an integer times ``2 ** -fraction``. A vector is shortened to nine bits and a sign before it is multiplied
with int8 weights. Products are summed in 32 bits, and the sum of an output is multiplied by a scale in 64 bits.
"""

import math

import numpy as np
import numpy.typing as npt

from egru.runtime.c.common import assemble, biases, int8_rows, layer_flags, layer_lines, network_flags, step_calls
from egru.runtime.c.matrix import Floats, Matrix, flags, int8_arrays, layer_products, layer_weights, quantise
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


TYPES = {"VALUE_TYPE": "int16_t", "OUT_TYPE": "int32_t", "TRACE_TYPE": "int64_t"}


def integer_source(network: Network, name: str) -> dict[str, str]:
    """Return the text of the header and the source file by name.

    Raises:
        ValueError: If a number is outside the range of the integer form.
    """
    _check(network)
    fractions = [_state_fraction(layer, i) for i, layer in enumerate(network.layers)]
    input_fraction = INPUT_FRACTION
    arrays = tables()
    if network.embedding is not None:
        table = network.embedding.numpy()
        input_fraction = 15 - max(0, math.ceil(math.log2(max(float(np.abs(table).max()), 2.0**-10))) + 1)
        arrays += array("int16_t", "embedding", _fixed(table, input_fraction, 16))
    matrices: dict[str, Matrix] = {}
    below = input_fraction
    for i, layer in enumerate(network.layers):
        for key, weight in layer_weights(layer, i).items():
            fraction = below if key.startswith("w_") else fractions[i]
            matrices[key] = _matrix(key, weight, fraction, PRE_FRACTION, _gate_units(layer, key))
        arrays += _layer_arrays(layer, i, fractions[i])
        below = fractions[i]
    last = len(network.layers) - 1
    add_readout, output_fraction = "", below
    if network.readout is not None:
        output_fraction = _readout_fraction(network.readout.numpy(), below)
        matrices["readout"] = _matrix("readout", network.readout.numpy(), below, output_fraction)
        events = f"state->index_{last}, state->value_{last}, state->count_{last}"
        add_readout = matrices["readout"].product("sum", "MODEL_OUTPUTS", events)
    output_arrays, output_names = _output(network, output_fraction)
    conditions = network_flags(network) | flags([*matrices.values()])
    conditions |= {"INTEGER": True, "SKIP": False}
    conditions["LONG_SHIFT"] = conditions["DECAY"] or "shift_right_long" in output_names["OUTPUT"]
    int8_names = TYPES | {
        "SCALE_TYPE": "int32_t",
        "UNIT_TYPE": "scaling",
        "QUANTISE": "{quantise(value, count, drop, q), shift}",
    }
    names = {"PRE": str(PRE_FRACTION), "FIRED_FUNCTION": render("fired.c", {}, {}).strip()}
    code = [
        render("integer_kernels.c", conditions, names),
        int8_rows(conditions, int8_names),
        *(_layer_source(layer, i, fractions[i], matrices) for i, layer in enumerate(network.layers)),
        render(
            "integer_step.c",
            conditions,
            {
                "ADD_READOUT": add_readout,
                "LAST": str(last),
                "SAVED_LAYERS": str(4 * sum(layer.hidden for layer in network.layers)),
                **output_names,
                "STEP_LAYERS": "\n".join(f"    {call};" for call in step_calls(network)),
                **layer_lines(network, 2, "clear_state"),
            },
        ),
    ]
    event_fraction = "".join(f"(layer) == {i} ? {value} : " for i, value in enumerate(fractions[:-1]))
    constants = {
        "MODEL_INPUT_FRACTION_VALUE": str(input_fraction),
        "MODEL_EVENT_FRACTION_VALUE": f"{event_fraction}{fractions[-1]}" if last else f"(void)(layer), {fractions[0]}",
        "MODEL_OUTPUT_FRACTION_VALUE": str(OUTPUT_FRACTION),
    }
    return assemble(
        network, "integer", name, conditions, TYPES, 2, matrices, arrays + output_arrays, "".join(code), constants
    )


def _check(network: Network) -> None:
    """Raise ValueError if a layer has options that the integer form does not support."""
    for i, layer in enumerate(network.layers):
        for name, supported in (("cell", "gru"), ("events", "positive")):
            if getattr(layer, name) != supported:
                raise ValueError(
                    f"export_c: integer weights support {name}={supported!r} only; layer {i} has "
                    f"{getattr(layer, name)!r}; use float32 or int8 weights"
                )


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


def _gate_units(layer: Layer, name: str) -> Floats:
    """Return the unit of every output of a matrix in :data:`PRE_FRACTION` bits.

    The pre-activations of r and u have one bit less, and u has the opposite sign. If r is multiplied with the recurrent
    part of z, that has one bit more.
    """
    r, u, z = 0.5, -0.5, 1.0
    if name.startswith("w_"):
        gates = [r, u, z]
    elif layer.reset_gate == "after":
        gates = [2.0, r, u]
    else:
        gates = [r, u] if name.startswith("v_") else [z]
    return np.repeat(np.array(gates, np.float32), layer.hidden)


def _matrix(name: str, weight: Floats, from_fraction: int, to_fraction: int, units: Floats | None = None) -> Matrix:
    """Quantise a matrix that is multiplied with int16 values of ``from_fraction``.

    Args:
        name: Name of the array.
        weight: Weights ``(outputs, inputs)``.
        from_fraction: Fractional bits of the values.
        to_fraction: Fractional bits of the sums.
        units: Factors of the outputs.
    """
    scaled = weight if units is None else weight * units[:, None]
    error = f"export_c: {name} has weights up to {np.abs(weight).max():g}, too large for integer weights"
    if weight.shape[1] <= MAX_FLOAT32_INPUTS and name.startswith("w_"):
        # Few inputs: sixteen bits cost little. A product has 32 bits, and loses `shift` of them.
        bound = np.abs(scaled.astype(np.float64)).sum(1).max() * 2.0 ** (15 - from_fraction)
        if bound > MAX_PRE:
            raise ValueError(error)
        largest = max(float(np.abs(scaled).max()), 2.0**-10)
        fraction = math.floor(math.log2(32767 / largest))
        text = array("int16_t", name, _fixed(np.ascontiguousarray(scaled.T), fraction, 16))
        return Matrix(name, "int16", len(weight), text, shift=from_fraction + fraction - to_fraction)
    q, scale = _quantise_rows(scaled)
    kind, text = int8_arrays(name, q)
    drop = _drop(q)
    # The sum of a column is multiplied by its factor times 2^32, and the upper 32 bits are used.
    factors = scale.astype(np.float64) * 2.0 ** (drop - from_fraction + to_fraction)
    bound = factors * np.abs(q.astype(np.int64)).sum(1) * (_FULL >> drop) * 2.0**-to_fraction
    if factors.max() > 0.4999 or bound.max() > 2 * MAX_PRE:
        raise ValueError(error)
    # Factors have up to fifteen bits, which SSE2 can multiply.
    shift = min(16, math.floor(math.log2(0.4999 / max(factors.max(), 2.0**-20))))
    text += array("int32_t", f"{name}_scale", _fixed(factors, 16 + shift) << (16 - shift))
    return Matrix(name, kind, len(weight), text, drop, shift)


def _drop(q: npt.NDArray[np.signedinteger]) -> int:
    """Return how many bits int16 values lose so that their products with integer weights fit into 32 bits."""
    sums, drop = int(np.abs(q.astype(np.int64)).sum(1).max()), 0
    while sums * (_FULL >> drop) >= 2**31:
        drop += 1
    return drop


def _readout_fraction(weight: Floats, from_fraction: int) -> int:
    """Return the largest fraction of the readout's sums for which the factors of :func:`_matrix` are below a half."""
    q, scale = _quantise_rows(weight)
    return from_fraction - _drop(q) - math.ceil(math.log2(float(scale.max()) or 1.0)) - 1


def _quantise_rows(weight: Floats) -> tuple[npt.NDArray[np.signedinteger], Floats]:
    """Return int8 weights and the scale of each row: 0 for a row without weights, whose scale does not matter."""
    q, scale = quantise(weight)
    return q, np.where(q.any(1), scale, 0).astype(scale.dtype)


def _layer_arrays(layer: Layer, index: int, state: int) -> str:
    """Return the definitions of a layer's vectors."""
    bias, bias_q = biases(layer)
    if max(np.abs(values).max() for values in (bias, bias_q) if values is not None) > MAX_PRE:
        raise ValueError(
            f"export_c: layer {index} has biases up to {np.abs(bias).max():g}, too large for integer weights"
        )
    text = array("int32_t", f"bias_{index}", _fixed(bias * _gate_units(layer, f"w_{index}"), PRE_FRACTION))
    if bias_q is not None:
        text += array("int32_t", f"bias_q_{index}", _fixed(bias_q, PRE_FRACTION + 1))
    if layer.reset != "none":
        text += array("int16_t", f"rho_{index}", _fixed(layer.reset_scale.numpy(), _RHO_FRACTION, 16))
    # Rounded down: an integer state is above this number exactly if its real value is above the threshold.
    theta = np.clip(np.floor(layer.theta.numpy().astype(np.float64) * 2.0**state), -_FULL, _FULL - 1)
    return text + array("int16_t", f"theta_{index}", theta.astype(np.int64))


def _output(network: Network, fraction: int) -> tuple[str, dict[str, str]]:
    """Return the arrays of the outputs and the names of ``integer_step.c`` for sums of this fraction."""
    decay = network.decay
    decay_bits, trace_max = 0, 2**62 - 1
    if decay is not None and decay < 1:
        trace_max = math.ceil(2**31 / (1 - decay)) + 2
        decay_bits = min(30, 61 - math.ceil(math.log2(trace_max + 1)))
    bias, shift = network.readout_bias, fraction - OUTPUT_FRACTION
    value = f"shift_right_long(value, {shift})" if shift >= 0 else f"(int64_t)saturate(value) * {2**-shift}"
    return "" if bias is None else array("int32_t", "readout_bias", _fixed(bias.numpy(), OUTPUT_FRACTION)), {
        "OUTPUT": value if bias is None else f"(int64_t)saturate({value}) + readout_bias[j]",
        "DECAY_VALUE": str(round((decay or 0.0) * 2**decay_bits)),
        "DECAY_BITS": str(decay_bits),
        "TRACE_MAX": f"INT64_C({trace_max})",
    }


def _layer_source(layer: Layer, index: int, fraction: int, matrices: dict[str, Matrix]) -> str:
    names = {
        "LAYER": str(index),
        "HIDDEN": str(layer.hidden),
        "FRACTION": str(fraction),
        "KEEP_VALUE": str(min(round(layer.keep * 2**15), 2**15 - 1)),
    }
    return render("integer_layer.c", layer_flags(layer, None), names | layer_products(layer, index, matrices))
