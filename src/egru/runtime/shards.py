"""Save weights in a compact format, split into files of limited size, and load them again.

A folder contains ``weights-1-of-4.safetensors`` and so on. Matrices are split by rows: ``name@100`` is the key of the
rows from 100 on. :mod:`egru.runtime.stored_weights` describes the entries of a key. Vectors are stored as they are. The
metadata of each file include the format, the number of files and the SHA-256 of its tensors.

Format 2 is the one described here. Files of format 1 have no entry ``format``; they store all weights of a matrix, and
scales of int8 rows in ``name@100.scale``. Both are read.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from egru.runtime.stored_weights import BLOCKS_SUFFIX, is_part, load_matrix, store_matrix
from egru.types import WEIGHT_FORMATS, WeightFormat

FORMAT = "2"
_SCALE = ".scale"
"""End of the key of the scales of int8 rows in files of format 1."""
_HEADER = 1 << 16
"""Bytes reserved for names and shapes."""


class ShardError(ValueError):
    """A weight file is missing, unreadable or modified."""


def save_shards(
    weights: Mapping[str, Tensor], folder: Path, format: WeightFormat = "bfloat16", max_bytes: int = 16 << 20
) -> list[Path]:
    """Write weights into files of at most ``max_bytes`` bytes.

    Matrices with enough zeros are stored without them, in blocks of 16 or 8 rows or one by one.

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

    Example:
        >>> layer = egru.EGRU(4, 8)
        >>> files = egru.runtime.save_shards(layer.state_dict(), Path("shards"), format="int8")
        >>> weights = egru.runtime.load_shards(Path("shards"))
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
        if weight.dim() < 2:
            vector = weight.detach().cpu().clone().contiguous()
            _require_room(name, vector.nbytes, max_bytes)
            if vector.nbytes > room:
                shards.append({})
                room = max_bytes - _HEADER
            shards[-1][name] = vector
            room -= vector.nbytes
            continue
        matrix = store_matrix(weight, format)
        _require_room(name, int(matrix.row_bytes.max()), max_bytes)
        ends = matrix.row_bytes.cumsum(0)  # bytes of the matrix up to and including each group of rows
        start, stored = 0, 0
        while start < len(ends):
            stop = int((ends - stored <= room).sum())
            if stop == start:
                shards.append({})
                room = max_bytes - _HEADER
                continue
            shards[-1] |= matrix.entries(f"{name}@{start * matrix.group}", start * matrix.group, stop * matrix.group)
            room -= int(ends[stop - 1]) - stored
            start, stored = stop, int(ends[stop - 1])
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, tensors in enumerate(shards, 1):
        metadata = {"format": FORMAT, "part": f"{i}", "parts": f"{len(shards)}", "kind": format}
        metadata["sha256"] = digest(tensors)
        data = safetensors.torch.save(tensors, metadata)
        assert len(data) <= max_bytes
        paths.append(folder / f"weights-{i}-of-{len(shards)}.safetensors")
        paths[-1].write_bytes(data)
    return paths


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Load the weights that :func:`save_shards` wrote.

    Args:
        folder: The folder of the files.

    Returns:
        Tensors by name; floating-point tensors are float32.

    Raises:
        ShardError: If a file is missing, unreadable or modified.

    Example:
        >>> layer = egru.EGRU(4, 8)
        >>> files = egru.runtime.save_shards(layer.state_dict(), Path("weights"))
        >>> layer.load_state_dict(egru.runtime.load_shards(Path("weights")))
        <All keys matched successfully>
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
        if metadata.get("format", "1") not in ("1", FORMAT):
            raise ShardError(f"{path} has format {metadata['format']!r}; this version of egru reads 1 and {FORMAT}")
        if metadata.get("sha256") != digest(tensors):
            raise ShardError(f"{path} was modified or damaged: its SHA-256 differs from the recorded one")
        entries |= tensors
    try:
        return _join(entries)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ShardError(f"the weights in {folder} do not fit together: {error}") from error


def find_shards(folder: Path) -> list[Path]:
    """Return the files that :func:`save_shards` wrote to ``folder``, or an empty list."""
    return [p for p in sorted(folder.glob("weights-*.safetensors")) if re.fullmatch(r"weights-\d+-of-\d+", p.stem)]


def _require_room(name: str, row_bytes: int, max_bytes: int) -> None:
    if row_bytes > max_bytes - _HEADER:
        raise ValueError(
            f"save_shards: max_bytes must be greater than {row_bytes + _HEADER} because a row of {name} takes "
            f"{row_bytes} bytes, got {max_bytes}"
        )


def _join(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Decode entries and concatenate the rows of each matrix."""
    parts: dict[str, dict[int, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for entry, value in entries.items():
        key = entry.removesuffix(BLOCKS_SUFFIX)
        name, _, start = key.partition("@")
        if "@" not in key:
            weights[name] = value.float() if value.is_floating_point() else value
        elif not is_part(key) and not key.endswith(_SCALE):
            matrix, scale = load_matrix(key, entries), entries.get(key + _SCALE)
            if scale is not None:
                matrix = matrix.float() * scale.view(-1, *[1] * (matrix.dim() - 1))
            parts.setdefault(name, {})[int(start)] = matrix
    for name, rows in parts.items():
        weights[name] = torch.cat([rows[start] for start in sorted(rows)])
    return weights


def digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 of tensors, their names and a text."""
    sha256 = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        sha256.update(name.encode())
        flat = tensors[name].flatten().clone(memory_format=torch.contiguous_format)  # one element may have any stride
        sha256.update(flat.view(torch.uint8).numpy().data)
    return sha256.hexdigest()
