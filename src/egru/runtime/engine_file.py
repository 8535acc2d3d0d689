"""Engine files: the network of an engine and its options, in the safetensors format.

The tensors are the parameters of :class:`~egru.runtime.network.Network`. Matrices that the engine rounds are stored in
its number format, other tensors in float32. :mod:`egru.runtime.stored_weights` describes the entries of a matrix. An
embedding that has the weights of the readout, as the engine rounds them, is not stored again. The metadata hold the
format, its version, everything that is not a tensor as JSON, and the SHA-256 of all of it.

Version 1 stored all tensors in float32. Version 2 stored all weights of a matrix, and every embedding. Version 3 is the
one described here; versions 2 and 3 are read.
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
from egru.runtime.stored_weights import BLOCKS_SUFFIX, LARGEST, is_part, load_matrix, matrix_keys, store_matrix
from egru.types import WeightFormat

FORMAT, VERSION, READABLE = "egru.EventEngine", "3", ("2", "3")
_LAYER_TENSORS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "theta", "reset_scale")
_LAYER_OPTIONS = ("reset", "reset_gate", "keep", "cell", "compare", "events")
_NETWORK_TENSORS = ("embedding", "readout", "readout_bias")


def write_engine(path: Path, network: Network, options: Options) -> None:
    """Write an engine file, atomically."""
    tensors = {name: value for name in _NETWORK_TENSORS if (value := getattr(network, name)) is not None}
    for i, layer in enumerate(network.layers):
        parts = {f"layers.{i}.{name}": getattr(layer, name) for name in _LAYER_TENSORS}
        tensors |= {name: value for name, value in parts.items() if value is not None}
    encoded = {name: _encode(name, tensor, options.weights) for name, tensor in tensors.items()}
    tied = network.embedding is not None and network.readout is not None
    if tied and torch.equal(load_matrix("readout", encoded["readout"]), tensors["embedding"]):
        del encoded["embedding"]
    else:
        tied = False
    tensors = {key: value for entries in encoded.values() for key, value in entries.items()}
    description = json.dumps(
        {
            "layers": [{name: getattr(layer, name) for name in _LAYER_OPTIONS} for layer in network.layers],
            "groups": [dataclasses.asdict(group) for group in network.groups],
            "trace": network.trace,
            "tied": tied,
            "options": dataclasses.asdict(options),
        }
    )
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "description": description,
        "sha256": digest(tensors, VERSION + description),
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
    if metadata.get("version") not in READABLE:
        raise ValueError(
            f"EventEngine.load: {path} has version {metadata.get('version')!r}; this version of egru reads "
            f"{' and '.join(READABLE)}"
        )
    description = metadata.get("description", "")
    covered = description if metadata["version"] == "2" else VERSION + description
    if metadata.get("sha256") != digest(tensors, covered):
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
    if tensor.dim() < 2:
        return {name: tensor}
    return store_matrix(tensor, format if is_rounded else "float32").entries(name)


def _to_float32(name: str, entries: dict[str, Tensor]) -> Tensor:
    """Return weights that an engine rounds to those of the file again."""
    dtype = entries[name if name in entries else name + BLOCKS_SUFFIX].dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.int8):
        raise ValueError(f"{name} is {dtype}, expected float32, bfloat16 or int8")
    values = load_matrix(name, entries)
    if values.dtype != torch.float32:
        raise KeyError(name + LARGEST)
    return finite_copy(name, values)  # a copy: the file may change


def _decode(entries: dict[str, Tensor], description: dict[str, Any]) -> tuple[Network, Options]:
    names = {name.removesuffix(BLOCKS_SUFFIX) for name in entries if not is_part(name)}
    tensors = {name: _to_float32(name, entries) for name in names}
    if unknown := entries.keys() - {key for name in names for key in matrix_keys(name, entries)}:
        raise ValueError(f"{min(unknown)} is not part of the network")
    if description.get("tied"):
        tensors["embedding"] = tensors["readout"].clone()
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
