"""C source of a network with float32 state: float32 or int8 weights, bit-identical to the engine's plain level."""

import dataclasses
import zlib

import numpy as np
import numpy.typing as npt
from torch import Tensor

import egru
from egru.runtime.c.template import array, decimal, rename, render
from egru.runtime.network import Layer, Network
from egru.runtime.reference import MAX_FLOAT32_INPUTS
from egru.types import CWeightFormat

Floats = npt.NDArray[np.float32]


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
    layers, last = network.layers, len(network.layers) - 1
    flags = {
        "FLOAT32": any(not matrix.int8 for matrix in matrices),
        "INT8": any(matrix.int8 for matrix in matrices),
        "BEFORE": any(layer.reset_gate == "before" for layer in layers),
        "DENSE_Y_ANY": any(_needs_y(layer) for layer in layers),
        "TOKENS": network.embedding is not None,
        "READOUT": readout is not None,
        "TRACE": network.trace is not None,
        "MEAN": network.trace == "mean",
    }
    arrays = "".join(text for text, _, _ in parts)
    if network.embedding is not None:
        arrays += array("float", "embedding", network.embedding.numpy())
    if readout is not None:
        bias = network.readout_bias
        arrays += readout.text + array(
            "float", "readout_bias", _zeros(network.outputs) if bias is None else bias.numpy()
        )
    floats = 2 * sum(layer.hidden for layer in layers)
    fingerprint = f"0x{zlib.crc32(f'{arrays}{network.trace}{[layer.keep for layer in layers]}'.encode()):08x}u"
    header = render(
        "float.h",
        flags,
        {
            "MODEL_TITLE": title(network, weights),
            "MODEL_VERSION": egru.__version__,
            "MODEL_FINGERPRINT_VALUE": fingerprint,
            "MODEL_LAYERS_VALUE": str(len(layers)),
            "MODEL_INPUTS_VALUE": str(network.inputs),
            "MODEL_OUTPUTS_VALUE": str(network.outputs),
            "MODEL_TOKENS_VALUE": str(network.tokens),
            "MODEL_SAVED_BYTES_VALUE": str(8 + 4 * floats + 8 * network.outputs * flags["TRACE"] + 8 * flags["MEAN"]),
            "MODEL_STATE_FIELDS": "\n".join(_fields(layer, i) for i, layer in enumerate(layers)),
            "MODEL_SUM_SIZE": str(max((4 if layer.reset_gate == "after" else 3) * layer.hidden for layer in layers)),
            "MODEL_UNITS_MAX": str(max(layer.hidden for layer in layers)),
            "MODEL_LIST_MAX": str(max(network.inputs, *(layer.hidden for layer in layers))),
        },
    )
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
            "SAVED_FLOATS": str(floats),
            **{key: "\n".join(lines) for key, lines in _layer_lines(network).items()},
        },
    )
    body = [
        f"/* {title(network, weights)}; see model.h. */\n",
        render("preamble.c", flags, {"MODEL_FINGERPRINT_VALUE": fingerprint}),
        arrays,
        "\n",
        render("float_kernels.c", flags, {}),
        *(_layer_source(layer, i, w, v) for i, (layer, (_, w, v)) in enumerate(zip(layers, parts, strict=True))),
        step,
    ]
    return {f"{name}.h": rename(header, name), f"{name}.c": rename("".join(body), name)}


def title(network: Network, weights: str) -> str:
    """Return one line that describes the network."""
    sizes = [network.inputs, *(layer.hidden for layer in network.layers)]
    if network.readout is not None:
        sizes.append(network.outputs)
    return f"Event-based GRU network, {' -> '.join(map(str, sizes))}, {weights} weights"


def quantise(weight: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Round the rows of a matrix to int8 as the engine does, and return one scale per row."""
    largest = np.abs(weight).max(1)
    scale = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    return np.rint(weight / scale[:, None]).astype(np.int8), scale


def _matrix(name: str, weight: Floats, weights: CWeightFormat) -> Matrix:
    if weights == "float32":
        return Matrix(name, len(weight), False, array("float", name, np.ascontiguousarray(weight.T)))
    q, scale = quantise(weight)
    text = array("int8_t", name, np.ascontiguousarray(q.T)) + array("float", f"{name}_scale", scale)
    return Matrix(name, len(weight), True, text)


def _layer_arrays(layer: Layer, index: int, weights: CWeightFormat) -> tuple[str, Matrix, Matrix]:
    """Return the definitions of a layer's arrays, and its matrices: w has columns r, u, z and v has z, r, u."""
    H = layer.hidden
    v_rows = layer.weight_hh.numpy()
    w = _matrix(f"w_{index}", layer.weight_ih.numpy(), "float32" if layer.inputs <= MAX_FLOAT32_INPUTS else weights)
    v = _matrix(f"v_{index}", np.concatenate((v_rows[2 * H :], v_rows[: 2 * H])), weights)
    bias, bias_q = biases(layer)
    text = w.text + v.text + array("float", f"bias_{index}", bias)
    if layer.reset_gate == "after":
        text += array("float", f"bias_q_{index}", bias_q)
    if layer.reset != "none":
        text += array("float", f"rho_{index}", layer.reset_scale.numpy())
    return text + array("float", f"theta_{index}", layer.theta.numpy()), w, v


def biases(layer: Layer) -> tuple[Floats, Floats]:
    """Return the bias of r, u, z, and that of the recurrent part of z if the reset gate acts after the product."""

    def values(bias: Tensor | None) -> Floats:
        return _zeros(3 * layer.hidden) if bias is None else bias.numpy().copy()

    bias, recurrent = values(layer.bias_ih), values(layer.bias_hh)
    bias_q = recurrent[2 * layer.hidden :].copy()
    if layer.reset_gate == "after":
        recurrent[2 * layer.hidden :] = 0
    return bias + recurrent, bias_q


def _zeros(count: int) -> Floats:
    return np.zeros(count, np.float32)


def _needs_y(layer: Layer) -> bool:
    """Return whether the reset of a unit reads its last event."""
    return layer.reset in ("output", "hard")


def _layer_source(layer: Layer, index: int, w: Matrix, v: Matrix) -> str:
    after = layer.reset_gate == "after"
    active = f"state->index_{index}, state->value_{index}, state->count_{index}"
    gated = f"state->index_{index}, state->work.gated, state->count_{index}"
    recurrent = ("sum - hidden", "0", "3 * hidden") if after else ("sum", "hidden", "2 * hidden")
    return render(
        "float_layer.c",
        {
            "AFTER": after,
            "BEFORE": not after,
            "OUTPUT": layer.reset == "output",
            "HARD": layer.reset == "hard",
            "THRESHOLD": layer.reset == "threshold",
            "KEEP": layer.keep != 0,
            "DENSE_Y": _needs_y(layer),
        },
        {
            "LAYER": str(index),
            "HIDDEN": str(layer.hidden),
            "KEEP_VALUE": decimal(np.float32(layer.keep).item(), 9) + "f",
            "ADD_INPUTS": w.product("sum", "0", "3 * hidden", "index, value, count"),
            "ADD_RECURRENT": v.product(*recurrent, active),
            "ADD_GATED": v.product("sum + 2 * hidden", "0", "hidden", gated),
        },
    )


def _fields(layer: Layer, index: int) -> str:
    H = layer.hidden
    y = f", y_{index}[{H}]" if _needs_y(layer) else ""
    return f"    float c_{index}[{H}]{y}, value_{index}[{H}];\n    uint16_t index_{index}[{H}];\n    int count_{index};"


def _layer_lines(network: Network) -> dict[str, list[str]]:
    """Return the lines of functions that treat all layers in turn."""
    steps, resets, events, saves, restores = [], [], [], [], []
    source = "index, value, count"
    for i, layer in enumerate(network.layers):
        H, active = layer.hidden, f"state->index_{i}, state->value_{i}, state->count_{i}"
        steps.append(f"    finite &= step_{i}(state, {source});")
        source = active
        resets += [f"    clear(state->c_{i}, {H});", f"    state->count_{i} = 0;"]
        events += [
            f"    case {i}:",
            f"        *index = state->index_{i};",
            f"        *value = state->value_{i};",
            f"        return state->count_{i};",
        ]
        saves.append(f"    saved = put_layer(saved, state->c_{i}, {active}, {H});")
        restores += [
            f"    state->count_{i} = get_layer(saved, state->c_{i}, state->index_{i}, state->value_{i}, {H});",
            f"    saved += {8 * H};",
        ]
        if _needs_y(layer):
            resets.append(f"    clear(state->y_{i}, {H});")
            restores.append(f"    spread(state->y_{i}, {active}, {H});")
    return {
        "STEP_LAYERS": steps,
        "RESET_LAYERS": resets,
        "EVENTS_OF_LAYERS": events,
        "SAVE_LAYERS": saves,
        "RESTORE_LAYERS": restores,
    }
