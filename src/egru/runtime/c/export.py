"""Export a trained network as freestanding C."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from torch import nn

from egru.files import replace_files
from egru.layers import EventRNN, checks
from egru.runtime.c.float_source import float_source
from egru.runtime.c.integer_source import integer_source
from egru.runtime.engine import EventEngine
from egru.runtime.network import Network
from egru.types import C_WEIGHT_FORMATS, CWeightFormat

MAX_UNITS = 65_535
"""Indices have sixteen bits, and a sum of this many products of nine-bit and eight-bit numbers fits into 32 bits."""
_KEYWORD = re.compile(
    "auto|break|case|char|const|continue|default|do|double|else|enum|extern|float|for|goto|if|inline|int|long|register|"
    "restrict|return|short|signed|sizeof|static|struct|switch|typedef|union|unsigned|void|volatile|while"
)
_LAYER_FIELDS = {
    "weight_ih",
    "weight_hh",
    "bias_ih",
    "bias_hh",
    "theta",
    "reset",
    "reset_gate",
    "reset_scale",
    "keep",
    "cell",
    "compare",
    "events",
}


def export_c(
    model: EventEngine | nn.Module,
    path: str | os.PathLike[str],
    weights: CWeightFormat | None = None,
    *,
    name: str = "model",
) -> list[Path]:
    """Write a trained network as one C file and its header.

    The code is C99 without allocation, library calls or threads. ``docs/guides/deploy.md`` describes its functions.

    - ``"float32"`` and ``"int8"`` compute in float32. Their outputs have the same bits as those of
      :class:`egru.EventEngine` with these weights at its plain level, if the compiler rounds every operation.
    - ``"integer"`` computes in integers: int8 weights, int16 state, tables for sigmoid and tanh. Inputs, events and
      outputs are fixed-point numbers.

    Args:
        model: An engine, or a model that :class:`egru.EventEngine` or :meth:`egru.EventEngine.from_model` accepts. A
            model with a method ``streaming``, as :class:`egru.models.SequenceClassifier`, is exported as
            ``EventEngine(**model.streaming())``.
        path: Folder to write ``NAME.h`` and ``NAME.c`` to. It is created if needed, and the files are replaced.
        weights: Number format: ``"float32"``, ``"int8"`` or ``"integer"``. If None, that of the engine, or float32 for
            a model.
        name: Prefix of files, functions and types: a C identifier.

    Returns:
        The two files.

    Raises:
        TypeError: If the engine does not support ``model``.
        ValueError: If a parameter is not finite, a layer has more than 65,535 units or inputs, or an argument is out of
            range. Nothing is written.

    Example:
        >>> egru.runtime.export_c(egru.pretrained("smnist"), "firmware", weights="int8")
        [PosixPath('firmware/model.h'), PosixPath('firmware/model.c')]
    """
    engine = _engine(model)
    weights = checks.choice("export_c", "weights", engine.weights if weights is None else weights, C_WEIGHT_FORMATS)
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is None or _KEYWORD.fullmatch(name):
        raise ValueError(f"export_c: name must be a C identifier that starts with a letter, got {name!r}")
    network = engine._network
    _check(network)
    texts = integer_source(network, name) if weights == "integer" else float_source(network, weights, name)
    files = {Path(path) / file: text.encode() for file, text in texts.items()}
    Path(path).mkdir(parents=True, exist_ok=True)
    replace_files(files)
    return list(files)


def _engine(model: Any) -> EventEngine:
    if isinstance(model, EventEngine):
        return model
    streaming: Any = getattr(model, "streaming", None) if isinstance(model, nn.Module) else None
    if callable(streaming):
        parts: Any = streaming()
        return EventEngine(**parts)
    try:
        return EventEngine(model)
    except TypeError:
        if not isinstance(model, nn.Module) or isinstance(model, EventRNN):
            raise
        return EventEngine.from_model(model)


def _check(network: Network) -> None:
    """Raise ValueError if the network has something that the C code does not support."""
    for i, layer in enumerate(network.layers):
        for size, what in ((layer.hidden, "units"), (layer.inputs, "inputs")):
            if size > MAX_UNITS:
                raise ValueError(f"export_c: a layer may have up to {MAX_UNITS:,} {what}; layer {i} has {size:,}")
        for field in dataclasses.fields(layer):  # options that the engine supports and the C code does not
            value = getattr(layer, field.name)
            if field.name not in _LAYER_FIELDS and value != field.default:
                raise ValueError(
                    f"export_c: C code supports {field.name}={field.default!r} only; layer {i} has {value!r}"
                )
