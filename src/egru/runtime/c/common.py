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
    cells = " and ".join(sorted({layer.cell.upper() for layer in network.layers}))
    return f"Event-based {cells} network, {' -> '.join(map(str, sizes))}, {weights} weights"


def network_flags(network: Network) -> dict[str, bool]:
    """Return the conditions of the templates that depend on the network."""
    layers = network.layers
    held_output = layers[-1].events == "delta"
    return {
        "BEFORE": any(is_before(layer) for layer in layers),
        "AFTER_ANY": any(layer.cell == "gru" and not is_before(layer) for layer in layers),
        "SPARSE_Y_ANY": any(needs_y(layer) for layer in layers),
        "DELTA_ANY": any(layer.events == "delta" for layer in layers),
        "GRU_ANY": any(layer.cell == "gru" for layer in layers),
        "LSTM_ANY": any(layer.cell == "lstm" for layer in layers),
        "MAGNITUDE": any(layer.events != "positive" for layer in layers),
        "HELD_OUTPUT": held_output,
        "HELD_READOUT": held_output and network.readout is not None,
        "TOKENS": network.embedding is not None,
        "READOUT": network.readout is not None,
        "TRACE": network.trace is not None,
        "MEAN": network.trace == "mean",
        "DECAY": network.decay not in (None, 1.0),
    }


def layer_flags(layer: Layer, below: Layer | None) -> dict[str, bool]:
    """Return the conditions of the templates of one layer."""
    delta = layer.events == "delta"
    return {
        "LSTM": layer.cell == "lstm",
        "AFTER": layer.cell == "gru" and layer.reset_gate == "after",
        "BEFORE": is_before(layer),
        "OUTPUT": layer.reset == "output",
        "HARD": layer.reset == "hard",
        "THRESHOLD": layer.reset == "threshold",
        "KEEP": layer.keep != 0,
        "SIGNED": layer.events == "signed",
        "DELTA": delta,
        "RECEIVES": below is not None and below.events == "delta",
        "COMPARE_OUTPUT": layer.cell == "lstm" and layer.compare == "output",
        "SPARSE_Y": needs_y(layer),
        "DENSE_Y": needs_y(layer) or delta,
    }


def is_before(layer: Layer) -> bool:
    """Return whether the reset gate acts before the recurrent product."""
    return layer.cell == "gru" and layer.reset_gate == "before"


def needs_y(layer: Layer) -> bool:
    """Return whether the reset of a unit reads its last event."""
    return layer.reset in ("output", "hard")


def biases(layer: Layer) -> tuple[Floats, Floats | None]:
    """Return the bias of all gates, and that of the recurrent part of z if the reset gate acts after the product."""

    def values(bias: Tensor | None) -> Floats:
        return np.zeros(layer.gates * layer.hidden, np.float32) if bias is None else bias.numpy().copy()

    bias, recurrent = values(layer.bias_ih), values(layer.bias_hh)
    if layer.cell == "lstm" or layer.reset_gate == "before":
        return bias + recurrent, None
    bias_q = recurrent[2 * layer.hidden :].copy()
    recurrent[2 * layer.hidden :] = 0
    return bias + recurrent, bias_q


def step_calls(network: Network) -> list[str]:
    """Return the calls that compute a step of each layer from the list of its inputs."""
    lists = ["index, value, count"]
    lists += [f"state->index_{i}, state->value_{i}, state->count_{i}" for i in range(len(network.layers) - 1)]
    return [f"step_{i}(state, {source})" for i, source in enumerate(lists)]


def accumulated(network: Network) -> dict[str, int]:
    """Return the sizes of the state's fields that exist because of delta events: held outputs and sums of changes."""
    fields: dict[str, int] = {}
    for i, layer in enumerate(network.layers):
        if layer.events == "delta":
            fields |= {f"y_{i}": layer.hidden, f"recurrent_{i}": layer.gates * layer.hidden}
        if i > 0 and network.layers[i - 1].events == "delta":
            fields[f"received_{i}"] = layer.gates * layer.hidden
    if network.layers[-1].events == "delta" and network.readout is not None:
        fields["readout_sum"] = network.outputs
    return fields


def layer_lines(network: Network, value_bytes: int, clear: str) -> dict[str, str]:
    """Return the lines of functions that treat all layers in turn.

    Args:
        network: The network.
        value_bytes: Size of a value in a saved state.
        clear: Name of the function that sets values to zero.
    """
    resets: list[str] = []
    events: list[str] = []
    saves: list[str] = []
    restores: list[str] = []
    for i, layer in enumerate(network.layers):
        H, active = layer.hidden, f"state->index_{i}, state->value_{i}, state->count_{i}"
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
    for field, size in accumulated(network).items():
        saves.append(f"    saved = put_floats(saved, state->{field}, {size});")
        restores.append(f"    saved = get_floats(saved, state->{field}, {size});")
    resets += [
        f"    {clear}(state->y_{i}, {layer.hidden});"
        for i, layer in enumerate(network.layers)
        if layer.events == "delta"
    ]
    return {
        "RESET_LAYERS": "\n".join(resets),
        "EVENTS_OF_LAYERS": "\n".join(events),
        "SAVE_LAYERS": "\n".join(saves),
        "RESTORE_LAYERS": "\n".join(restores),
        "BYTE_FUNCTIONS": render("bytes.c", {}, {}).strip(),
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
    extra = accumulated(network)
    saved = 8 + 2 * value_bytes * sum(layer.hidden for layer in layers) + 4 * sum(extra.values()) + 8 * bool(extra)
    if network.trace is not None:
        saved += 8 * network.outputs + 8 * (network.trace == "mean")
    sums = [(3 if is_before(layer) else 4) * layer.hidden for layer in layers]
    fields = [_fields(layer, i, types["VALUE_TYPE"]) for i, layer in enumerate(layers)]
    fields += [f"    float {name}[{size}];" for name, size in extra.items() if name != "readout_sum"]
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
            "MODEL_STATE_FIELDS": "\n".join(fields),
            "EVENT_NOTE": " Values of delta events are changes." if flags["DELTA_ANY"] else "",
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


def int8_rows(flags: Mapping[str, bool], names: Mapping[str, str]) -> str:
    """Return the functions that add rows of int8 weights, with a loop for every kind of processor."""
    loops = {"NEON_ROWS": "int8_rows_neon.c", "THUMB_ROWS": "int8_rows_thumb.c"}
    return render("int8_rows.c", flags, {**names, **{key: render(f, flags, names).strip() for key, f in loops.items()}})
