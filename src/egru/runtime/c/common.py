"""What the float and the integer form share: the header, the functions that treat all layers in turn, the files."""

import zlib
from collections.abc import Mapping

import numpy as np
from torch import Tensor

import egru
from egru.runtime.c.matrix import Floats, Matrix
from egru.runtime.c.template import rename, render
from egru.runtime.network import Layer, Network


def title(network: Network, weights: str) -> str:
    """Return one line that describes the network."""
    sizes = [network.inputs, *(layer.hidden for layer in network.layers)]
    if network.readout is not None:
        sizes.append(network.outputs)
    return f"Event-based GRU network, {' -> '.join(map(str, sizes))}, {weights} weights"


def network_flags(network: Network) -> dict[str, bool]:
    """Return the conditions of the templates that depend on the network."""
    return {
        "BEFORE": any(layer.reset_gate == "before" for layer in network.layers),
        "DENSE_Y_ANY": any(needs_y(layer) for layer in network.layers),
        "TOKENS": network.embedding is not None,
        "READOUT": network.readout is not None,
        "TRACE": network.trace is not None,
        "MEAN": network.trace == "mean",
    }


def layer_flags(layer: Layer) -> dict[str, bool]:
    """Return the conditions of the templates of one layer."""
    return {
        "AFTER": layer.reset_gate == "after",
        "BEFORE": layer.reset_gate == "before",
        "OUTPUT": layer.reset == "output",
        "HARD": layer.reset == "hard",
        "THRESHOLD": layer.reset == "threshold",
        "KEEP": layer.keep != 0,
        "DENSE_Y": needs_y(layer),
    }


def needs_y(layer: Layer) -> bool:
    """Return whether the reset of a unit reads its last event."""
    return layer.reset in ("output", "hard")


def biases(layer: Layer) -> tuple[Floats, Floats]:
    """Return the bias of r, u, z, and that of the recurrent part of z if the reset gate acts after the product."""

    def values(bias: Tensor | None) -> Floats:
        return np.zeros(3 * layer.hidden, np.float32) if bias is None else bias.numpy().copy()

    bias, recurrent = values(layer.bias_ih), values(layer.bias_hh)
    bias_q = recurrent[2 * layer.hidden :].copy()
    if layer.reset_gate == "after":
        recurrent[2 * layer.hidden :] = 0
    return bias + recurrent, bias_q


def layer_lines(network: Network, value_bytes: int, clear: str, finite: str) -> dict[str, str]:
    """Return the lines of functions that treat all layers in turn.

    Args:
        network: The network.
        value_bytes: Size of a value in a saved state.
        clear: Name of the function that sets values to zero.
        finite: Text in front of the call of a layer's step.
    """
    steps: list[str] = []
    resets: list[str] = []
    events: list[str] = []
    saves: list[str] = []
    restores: list[str] = []
    source = "index, value, count"
    for i, layer in enumerate(network.layers):
        H, active = layer.hidden, f"state->index_{i}, state->value_{i}, state->count_{i}"
        steps.append(f"    {finite}step_{i}(state, {source});")
        source = active
        resets += [f"    {clear}(state->c_{i}, {H});", f"    state->count_{i} = 0;"]
        events += [
            f"    case {i}:",
            f"        *index = state->index_{i};",
            f"        *value = state->value_{i};",
            f"        return state->count_{i};",
        ]
        saves.append(f"    saved = put_layer(saved, state->c_{i}, {active}, {H});")
        restores += [
            f"    state->count_{i} = get_layer(saved, state->c_{i}, state->index_{i}, state->value_{i}, {H});",
            f"    saved += {2 * value_bytes * H};",
        ]
        if needs_y(layer):
            resets.append(f"    {clear}(state->y_{i}, {H});")
            restores.append(f"    spread(state->y_{i}, {active}, {H});")
    return {
        "STEP_LAYERS": "\n".join(steps),
        "RESET_LAYERS": "\n".join(resets),
        "EVENTS_OF_LAYERS": "\n".join(events),
        "SAVE_LAYERS": "\n".join(saves),
        "RESTORE_LAYERS": "\n".join(restores),
        "BYTES": render("bytes.c", {}, {}).strip(),
    }


def assemble(
    network: Network,
    weights: str,
    name: str,
    flags: Mapping[str, bool],
    types: Mapping[str, str],
    value_bytes: int,
    matrices: Mapping[str, Matrix],
    arrays: str,
    code: str,
    constants: Mapping[str, str],
) -> dict[str, str]:
    """Return the header and the source file by name.

    Args:
        network: The network.
        weights: Number format.
        name: Prefix of public names.
        flags: Conditions of the header.
        types: C types ``VALUE_TYPE`` of inputs and events, ``OUT_TYPE`` of sums and outputs, and ``TRACE_TYPE``.
        value_bytes: Size of a value in a saved state.
        matrices: Weights.
        arrays: Definitions of the other constant arrays.
        code: Functions.
        constants: Further names of the header.
    """
    layers = network.layers
    arrays = "".join(matrix.text for matrix in matrices.values()) + arrays
    fingerprint = f"0x{zlib.crc32((arrays + code).encode()):08x}u"
    saved = 8 + 2 * value_bytes * sum(layer.hidden for layer in layers)
    if network.trace is not None:
        saved += 8 * network.outputs + 8 * (network.trace == "mean")
    sums = [(4 if layer.reset_gate == "after" else 3) * layer.hidden for layer in layers]
    header = render(
        "header.h",
        flags,
        {
            "MODEL_TITLE": title(network, weights),
            "MODEL_VERSION": egru.__version__,
            "MODEL_FINGERPRINT_VALUE": fingerprint,
            "MODEL_LAYERS_VALUE": str(len(layers)),
            "MODEL_INPUTS_VALUE": str(network.inputs),
            "MODEL_OUTPUTS_VALUE": str(network.outputs),
            "MODEL_TOKENS_VALUE": str(network.tokens),
            "MODEL_SAVED_BYTES_VALUE": str(saved),
            "MODEL_STATE_FIELDS": "\n".join(_fields(layer, i, types["VALUE_TYPE"]) for i, layer in enumerate(layers)),
            "MODEL_SUM_SIZE": str(max(*sums, network.outputs)),
            "MODEL_UNITS_MAX": str(max(layer.hidden for layer in layers)),
            "MODEL_TOTAL_SIZE": str(
                max((-(-m.columns // 8) * 8 for m in matrices.values() if m.kind == "sparse"), default=0)
            ),
            "MODEL_LIST_MAX": str(max(network.inputs, *(layer.hidden for layer in layers))),
            **types,
            **constants,
        },
    )
    preamble = render("preamble.c", flags, {"MODEL_FINGERPRINT_VALUE": fingerprint})
    source = f"/* {title(network, weights)}; see model.h. */\n{preamble}{arrays}\n{code}"
    return {f"{name}.h": rename(header, name), f"{name}.c": rename(source, name)}


def _fields(layer: Layer, index: int, kind: str) -> str:
    H = layer.hidden
    y = f", y_{index}[{H}]" if needs_y(layer) else ""
    return (
        f"    {kind} c_{index}[{H}]{y}, value_{index}[{H}];\n    uint16_t index_{index}[{H}];\n    int count_{index};"
    )
