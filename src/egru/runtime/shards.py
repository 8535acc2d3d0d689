"""Save weights in a compact format, split into files of limited size, and load them again.

A folder contains ``weights-1-of-4.safetensors`` and so on. Matrices are split by rows: the entry ``name@100`` has the
rows from 100 on. int8 matrices have one scale per row in ``name@100.scale``. Vectors are stored as they are. The
metadata of each file include the number of files and the SHA-256 of its tensors.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from egru.types import WEIGHT_FORMATS, WeightFormat

_HEADER = 1 << 16
"""Bytes reserved for names and shapes."""


class ShardError(ValueError):
    """A weight file is missing, unreadable or modified."""


def save_shards(
    weights: Mapping[str, Tensor], folder: Path, format: WeightFormat = "bfloat16", max_bytes: int = 16 << 20
) -> list[Path]:
    """Write weights into files of at most ``max_bytes`` bytes.

    An :class:`egru.EventEngine` with int8 weights gives the same output for a model loaded from int8 files as for the
    original model, except that the files also quantise the embedding.

    Args:
        weights: Tensors by name, such as ``model.state_dict()``.
        folder: Where to write the files. It is created if necessary.
        format: Number format of matrices, as in :class:`egru.EventEngine`. Vectors and integers keep their dtype.
        max_bytes: Maximum size of a file.

    Returns:
        The paths of the files.

    Raises:
        ValueError: If ``format`` or ``max_bytes`` is not supported, or a name contains ``@``.
    """
    if format not in WEIGHT_FORMATS:
        raise ValueError(f"save_shards: format must be one of {', '.join(WEIGHT_FORMATS)}; got {format!r}")
    if max_bytes <= 2 * _HEADER:
        raise ValueError(f"save_shards: max_bytes must be greater than {2 * _HEADER}, got {max_bytes}")
    shards: list[dict[str, Tensor]] = [{}]
    room = max_bytes - _HEADER
    for name, weight in weights.items():
        if "@" in name:
            raise ValueError(f"save_shards: names must not contain '@', got {name!r}")
        rows = len(weight) if weight.dim() > 1 else 1
        row_bytes = sum(x.nbytes for x in _entries(name, weight, 0, 1, format).values())
        if row_bytes > max_bytes - _HEADER:
            raise ValueError(
                f"save_shards: max_bytes must be greater than {row_bytes + _HEADER} because a row of {name} takes "
                f"{row_bytes} bytes, got {max_bytes}"
            )
        start = 0
        while start < rows:
            if row_bytes > room:
                shards.append({})
                room = max_bytes - _HEADER
            stop = min(rows, start + max(1, room // max(row_bytes, 1)))
            entries = _entries(name, weight, start, stop, format)
            shards[-1] |= entries
            room -= sum(x.nbytes for x in entries.values())
            start = stop
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, tensors in enumerate(shards, 1):
        metadata = {"part": f"{i}", "parts": f"{len(shards)}", "kind": format, "sha256": digest(tensors)}
        data = safetensors.torch.save(tensors, metadata)
        assert len(data) <= max_bytes
        paths.append(folder / f"weights-{i}-of-{len(shards)}.safetensors")
        paths[-1].write_bytes(data)
    return paths


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Load the weights that :func:`save_shards` wrote.

    Returns:
        Tensors by name; floating-point tensors are float32.

    Raises:
        ShardError: If a file is missing, unreadable or modified.
    """
    paths = find_shards(folder)
    if not paths:
        raise ShardError(f"{folder} contains no weights-*.safetensors")
    entries: dict[str, Tensor] = {}
    count = int(paths[0].stem.rsplit("-", 1)[1])
    for i in range(1, count + 1):
        path = folder / f"weights-{i}-of-{count}.safetensors"
        if path not in paths:
            raise ShardError(f"{path} is missing: all {count} files are required")
        try:
            with safetensors.safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors raises its own exception class
            raise ShardError(f"{path} cannot be read: {error}") from error
        if metadata.get("sha256") != digest(tensors):
            raise ShardError(f"{path} was modified or damaged: its SHA-256 differs from the recorded one")
        entries |= tensors
    try:
        return _join(entries)
    except (RuntimeError, ValueError) as error:
        raise ShardError(f"the weights in {folder} do not fit together: {error}") from error


def find_shards(folder: Path) -> list[Path]:
    """Return the files that :func:`save_shards` wrote to ``folder``, or an empty list."""
    return [p for p in sorted(folder.glob("weights-*.safetensors")) if re.fullmatch(r"weights-\d+-of-\d+", p.stem)]


def _entries(name: str, weight: Tensor, start: int, stop: int, format: WeightFormat) -> dict[str, Tensor]:
    """Encode rows ``start`` to ``stop`` of a matrix, or a complete vector."""
    if weight.dim() < 2:
        return {name: weight.detach().cpu().clone().contiguous()}
    rows = weight[start:stop].detach().cpu().contiguous()
    key = f"{name}@{start}"
    if not rows.is_floating_point():
        return {key: rows.clone()}
    if format != "int8":
        return {key: rows.to(getattr(torch, format), copy=True)}
    largest = rows.float().flatten(1).abs().amax(1)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    shape = (-1, *[1] * (rows.dim() - 1))
    return {key: (rows.float() / scale.view(shape)).round().to(torch.int8), f"{key}.scale": scale}


def _join(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Decode entries and concatenate the rows of each matrix."""
    blocks: dict[str, dict[int, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for key, value in entries.items():
        name, _, start = key.partition("@")
        if not start:
            weights[name] = value.float() if value.is_floating_point() else value
        elif not start.endswith(".scale"):
            scale = entries.get(f"{key}.scale")
            if scale is not None:
                value = value.float() * scale.view(-1, *[1] * (value.dim() - 1))
            blocks.setdefault(name, {})[int(start)] = value.float() if value.is_floating_point() else value
    for name, rows in blocks.items():
        weights[name] = torch.cat([rows[start] for start in sorted(rows)])
    return weights


def digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 of tensors, their names and a text."""
    sha256 = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        sha256.update(name.encode())
        sha256.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()
