"""C source of a network with float32 state: float32 or int8 weights, bit-identical to the engine's plain level."""

import numpy as np

from egru.runtime.c.common import (
    accumulated,
    assemble,
    biases,
    int8_rows,
    layer_flags,
    layer_lines,
    network_flags,
    step_calls,
)
from egru.runtime.c.matrix import Floats, Matrix, flags, int8_arrays, layer_products, layer_weights, quantise
from egru.runtime.c.template import array, decimal, render
from egru.runtime.network import Layer, Network
from egru.runtime.reference import MAX_FLOAT32_INPUTS, REFRESH_STEPS
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
        add_readout = matrices["readout"].product("sum", "MODEL_OUTPUTS", "index, value, count")
    conditions = network_flags(network) | flags([*matrices.values()])
    conditions |= {"INTEGER": False, "SKIP": network.embedding is None}
    units = sum(layer.hidden for layer in network.layers)
    step = render(
        "float_step.c",
        conditions,
        {
            "ADD_READOUT": add_readout,
            "LAST": str(last),
            "DECAY_VALUE": decimal(network.decay or 0.0),
            "TRACE_OUTPUT": ("scale * trace" if conditions["MEAN"] else "trace")
            + (" + (double)readout_bias[j]" if add_readout else ""),
            "SAVED_FLOATS": str(2 * units + sum(accumulated(network).values())),
            "REFRESH": str(REFRESH_STEPS["int8" if weights == "int8" else "float32"]),
            "HELD_VALUES": "state->readout_sum" if add_readout else f"state->y_{last}",
            "STEP_LAYERS": "\n".join(f"    finite &= {call} >= 0;" for call in step_calls(network)),
            **_skip_lines(network),
            **layer_lines(network, 4, "clear"),
        },
    )
    int8_names = TYPES | {"SCALE_TYPE": "float", "UNIT_TYPE": "float", "QUANTISE": "quantise(value, count, q)"}
    code = [
        render("float_kernels.c", conditions, {"FIRED_FUNCTION": render("fired.c", {}, {}).strip()}),
        int8_rows(conditions, int8_names),
        *(_layer_source(network, i, matrices) for i in range(len(network.layers))),
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
    if bias_q is not None:
        text += array("float", f"bias_q_{index}", bias_q)
    if layer.reset != "none":
        text += array("float", f"rho_{index}", layer.reset_scale.numpy())
    return text + array("float", f"theta_{index}", layer.theta.numpy())


def _layer_source(network: Network, index: int, matrices: dict[str, Matrix]) -> str:
    layer, below = network.layers[index], network.layers[index - 1] if index > 0 else None
    conditions = layer_flags(layer, below) | {"SKIP": network.embedding is None}
    compared = "value" if conditions["COMPARE_OUTPUT"] else "next"
    names = {
        "LAYER": str(index),
        "BELOW": str(index - 1),
        "HIDDEN": str(layer.hidden),
        "GATES": str(layer.gates),
        "GATE_BLOCKS": "i, f, g, o" if conditions["LSTM"] else "r, u, z",
        "FIRST_SUM": str(int(conditions["AFTER"])),
        "COMPARED": compared,
        "COMPARED_VALUE": "value" if conditions["COMPARE_OUTPUT"] or not conditions["LSTM"] else "c[j]",
        "IS_EVENT": {"positive": compared, "signed": f"magnitude({compared})", "delta": "magnitude(change)"}[
            layer.events
        ],
        "KEEP_VALUE": decimal(np.float32(layer.keep).item(), 9) + "f",
    }
    products = layer_products(layer, index, matrices, conditions["RECEIVES"])
    return render("float_layer.c", conditions, names | products)


def _skip_lines(network: Network) -> dict[str, str]:
    """Return the lines of ``model_skip`` that treat all layers in turn."""
    first: list[str] = []
    skip: list[str] = []
    for i, (layer, call) in enumerate(zip(network.layers, step_calls(network), strict=True)):
        first += [
            f"    first = first_event_{i}(state, limit);",
            "    limit = first < limit ? first : limit;",
        ]
        if i > 0:
            skip += ["    if (ordinary && steps > 1)", f"        relax_{i}(state, steps - 1);"]
        skip += [
            f"    events = ordinary ? {call} : advance_{i}(state, steps);",
            "    finite &= events >= 0;",
            "    ordinary |= events != 0;",
        ]
        if layer.events == "delta":
            skip.append("    changed |= events != 0;")
    active = " || ".join(f"state->count_{i} != 0" for i in range(len(network.layers)))
    return {"FIRST_EVENTS": "\n".join(first), "SKIP_LAYERS": "\n".join(skip), "IS_ACTIVE": active}
