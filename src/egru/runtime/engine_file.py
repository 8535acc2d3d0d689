"""Engine files: the network of an engine and its options, in the safetensors format.

The tensors are the float32 parameters of :class:`~egru.runtime.network.Network`. The metadata hold the format, its
version, everything that is not a tensor as JSON, and the SHA-256 of all of it.
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
from egru.runtime.shards import digest

FORMAT, VERSION = "egru.EventEngine", "1"
_LAYER_TENSORS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "theta", "reset_scale")
_LAYER_OPTIONS = ("reset", "reset_gate", "keep")
_NETWORK_TENSORS = ("embedding", "readout", "readout_bias")


def write_engine(path: Path, network: Network, options: Options) -> None:
    """Write an engine file, atomically."""
    tensors = {name: value for name in _NETWORK_TENSORS if (value := getattr(network, name)) is not None}
    for i, layer in enumerate(network.layers):
        parts = {f"layers.{i}.{name}": getattr(layer, name) for name in _LAYER_TENSORS}
        tensors |= {name: value for name, value in parts.items() if value is not None}
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


def _decode(tensors: dict[str, Tensor], description: dict[str, Any]) -> tuple[Network, Options]:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}, expected float32")
        tensors[name] = finite_copy(name, tensor)  # a copy: the file may change
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
