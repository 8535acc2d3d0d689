"""Engine files: the network of an engine and its options, in the safetensors format.

The tensors are the parameters of :class:`~egru.runtime.network.Network`. Matrices that the engine rounds are stored in
its number format; int8 matrices have the largest magnitude of each row, 127 times its scale, in ``NAME.largest``. All
other tensors are float32. The metadata hold the format, its version, everything that is not a tensor as JSON, and the
SHA-256 of all of it.

Version 1 stored all tensors in float32. Version 2 is the one described here.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from egru.files import replace_file
from egru.runtime.network import Group, Layer, Network, check_network, finite_copy
from egru.runtime.options import Options
from egru.runtime.reference import MAX_FLOAT32_INPUTS
from egru.runtime.shards import digest
from egru.types import WeightFormat

FORMAT, VERSION = "egru.EventEngine", "2"
_LAYER_TENSORS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "theta", "reset_scale")
_LAYER_OPTIONS = ("reset", "reset_gate", "keep", "cell", "compare", "events")
_NETWORK_TENSORS = ("embedding", "readout", "readout_bias")
_LARGEST = ".largest"


def write_engine(path: Path, network: Network, options: Options) -> None:
    """Write an engine file, atomically."""
    tensors = {name: value for name in _NETWORK_TENSORS if (value := getattr(network, name)) is not None}
    for i, layer in enumerate(network.layers):
        parts = {f"layers.{i}.{name}": getattr(layer, name) for name in _LAYER_TENSORS}
        tensors |= {name: value for name, value in parts.items() if value is not None}
    tensors = {
        key: value for name, tensor in tensors.items() for key, value in _encode(name, tensor, options.weights).items()
    }
    description = json.dumps(
        {
            "layers": [{name: getattr(layer, name) for name in _LAYER_OPTIONS} for layer in network.layers],
            "groups": [dataclasses.asdict(group) for group in network.groups],
            "trace": network.trace,
            "options": dataclasses.asdict(options),
        }
    )
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "description": description,
        "sha256": digest(tensors, description),
    }
    replace_file(path, safetensors.torch.save(tensors, metadata))


def read_engine(path: Path) -> tuple[Network, Options]:
    """Read an engine file and return its network and options.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not an engine file, has another version, or is damaged. The message names the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"EventEngine.load: there is no file {path}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own exception class
        raise ValueError(f"EventEngine.load: {path} is damaged or not an engine file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"EventEngine.load: {path} is not an engine file; create one with EventEngine.save")
    if metadata.get("version") != VERSION:
        raise ValueError(
            f"EventEngine.load: {path} has version {metadata.get('version')!r}; this version of egru reads {VERSION}"
        )
    description = metadata.get("description", "")
    if metadata.get("sha256") != digest(tensors, description):
        raise ValueError(f"EventEngine.load: {path} is damaged: its SHA-256 differs from the recorded one")
    try:
        network, options = _decode(tensors, json.loads(description))
        check_network(network)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"EventEngine.load: {path} does not describe a valid network ({reason})") from error
    return network, options


def _encode(name: str, tensor: Tensor, format: WeightFormat) -> dict[str, Tensor]:
    """Return a tensor as an engine with weights in ``format`` uses it."""
    kind = name.rpartition(".")[2]
    is_rounded = kind in ("weight_hh", "readout") or (kind == "weight_ih" and tensor.shape[1] > MAX_FLOAT32_INPUTS)
    if not is_rounded or format == "float32":
        return {name: tensor}
    if format == "bfloat16":
        return {name: tensor.to(torch.bfloat16)}
    largest = tensor.abs().amax(1)
    return {name: (tensor / _scale(largest)).round().to(torch.int8), name + _LARGEST: largest}


def _scale(largest: Tensor) -> Tensor:
    """Return the scales of int8 rows, ``(rows, 1)``, as the engine computes them."""
    return torch.where(largest > 0, largest / 127, 1.0)[:, None]


def _to_float32(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return weights that an engine rounds to ``tensor`` again."""
    if tensor.dtype == torch.int8:
        largest = finite_copy(name + _LARGEST, tensors[name + _LARGEST])
        # The product 127 * scale may differ from the largest magnitude by rounding, which would change the scale.
        values = torch.where(tensor.abs() == 127, largest[:, None] * tensor.sign(), tensor * _scale(largest))
        return finite_copy(name, values)
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} is {tensor.dtype}, expected float32, bfloat16 or int8")
    return finite_copy(name, tensor)  # a copy: the file may change


def _decode(tensors: dict[str, Tensor], description: dict[str, Any]) -> tuple[Network, Options]:
    rows = {name + _LARGEST for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    tensors = {name: _to_float32(name, tensor, tensors) for name, tensor in tensors.items() if name not in rows}
    layers = tuple(
        Layer(
            **{name: tensors.pop(f"layers.{i}.{name}", None) for name in _LAYER_TENSORS},
            **{name: options[name] for name in _LAYER_OPTIONS},
        )
        for i, options in enumerate(description["layers"])
    )
    groups = tuple(Group(**group) for group in description["groups"])
    parts = {name: tensors.pop(name, None) for name in _NETWORK_TENSORS}
    if tensors:
        raise ValueError(f"{next(iter(tensors))} is not part of the network")
    return Network(layers, groups, trace=description["trace"], **parts), Options(**description["options"])
