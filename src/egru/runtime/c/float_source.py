"""C source of a network with float32 state: float32 or int8 weights, bit-identical to the engine's plain level."""

import numpy as np

from egru.runtime.c.common import assemble, biases, layer_flags, layer_lines, network_flags
from egru.runtime.c.matrix import Floats, Matrix, flags, int8_arrays, layer_products, layer_weights, quantise
from egru.runtime.c.template import array, decimal, render
from egru.runtime.network import Layer, Network
from egru.runtime.reference import MAX_FLOAT32_INPUTS
from egru.types import CWeightFormat

TYPES = {"VALUE_TYPE": "float", "OUT_TYPE": "float", "TRACE_TYPE": "double"}


def float_source(network: Network, weights: CWeightFormat, name: str) -> dict[str, str]:
    """Return the text of the header and the source file by name."""
    matrices: dict[str, Matrix] = {}
    arrays = ""
    for i, layer in enumerate(network.layers):
        for key, weight in layer_weights(layer, i).items():
            stays_float32 = key.startswith("w_") and layer.inputs <= MAX_FLOAT32_INPUTS
            matrices[key] = _matrix(key, weight, "float32" if stays_float32 else weights)
        arrays += _layer_arrays(layer, i)
    if network.embedding is not None:
        arrays += array("float", "embedding", network.embedding.numpy())
    last = len(network.layers) - 1
    add_readout = ""
    if network.readout is not None:
        matrices["readout"] = _matrix("readout", network.readout.numpy(), weights)
        bias = network.readout_bias
        values = np.zeros(network.outputs, np.float32) if bias is None else bias.numpy()
        arrays += array("float", "readout_bias", values)
        events = f"state->index_{last}, state->value_{last}, state->count_{last}"
        add_readout = matrices["readout"].product("out", "MODEL_OUTPUTS", events)
    conditions = network_flags(network) | flags([*matrices.values()]) | {"INTEGER": False}
    step = render(
        "float_step.c",
        conditions,
        {
            "ADD_READOUT": add_readout,
            "LAST": str(last),
            "DECAY_VALUE": decimal(network.decay or 0.0),
            "TRACE_OUTPUT": ("scale * trace" if conditions["MEAN"] else "trace")
            + (" + (double)readout_bias[j]" if add_readout else ""),
            "SAVED_FLOATS": str(2 * sum(layer.hidden for layer in network.layers)),
            **layer_lines(network, 4, "clear", "finite &= "),
        },
    )
    int8_names = TYPES | {"SCALE_TYPE": "float", "UNIT_TYPE": "float", "QUANTISE": "quantise(value, count, q)"}
    code = [
        render("float_kernels.c", conditions, {}),
        render("int8_rows.c", conditions, int8_names),
        *(_layer_source(layer, i, matrices) for i, layer in enumerate(network.layers)),
        step,
    ]
    return assemble(network, weights, name, conditions, TYPES, 4, matrices, arrays, "".join(code), {})


def _matrix(name: str, weight: Floats, weights: CWeightFormat) -> Matrix:
    if weights == "float32":
        return Matrix(name, "float32", len(weight), array("float", name, np.ascontiguousarray(weight.T)))
    q, scale = quantise(weight)
    kind, text = int8_arrays(name, q)
    return Matrix(name, kind, len(weight), text + array("float", f"{name}_scale", scale))


def _layer_arrays(layer: Layer, index: int) -> str:
    """Return the definitions of a layer's vectors."""
    bias, bias_q = biases(layer)
    text = array("float", f"bias_{index}", bias)
    if layer.reset_gate == "after":
        text += array("float", f"bias_q_{index}", bias_q)
    if layer.reset != "none":
        text += array("float", f"rho_{index}", layer.reset_scale.numpy())
    return text + array("float", f"theta_{index}", layer.theta.numpy())


def _layer_source(layer: Layer, index: int, matrices: dict[str, Matrix]) -> str:
    names = {
        "LAYER": str(index),
        "HIDDEN": str(layer.hidden),
        "KEEP_VALUE": decimal(np.float32(layer.keep).item(), 9) + "f",
    }
    return render("float_layer.c", layer_flags(layer), names | layer_products(layer, index, matrices))
