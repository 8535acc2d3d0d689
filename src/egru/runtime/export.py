"""Weights in small form, in pieces: for whatever takes only small files, and for keeping a model without its training.

A folder of ``weights-1-of-4.safetensors`` and so on, each below a size. A matrix is cut by rows where it must be: the
entry ``name@100`` holds its rows from 100 on, in int8 beside ``name@100.scale``, one scale a row. Vectors stay float32.
Each file knows how many there are and the SHA-256 of its tensors.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from egru.runtime.runners import WEIGHTS

_HEADER = 1 << 16
"""Bytes left for names and shapes."""


class BadParts(ValueError):
    """Pieces of weights that are missing or not what was written."""


def save_parts(
    weights: Mapping[str, Tensor], folder: Path, kind: str = "bfloat16", largest: int = 16 << 20
) -> list[Path]:
    """Write ``weights`` into files of at most ``largest`` bytes; ``kind`` as in :class:`egru.EventEngine`.

    int8 rounds as the engine does, so that an engine with int8 weights made from the file is the engine made from the
    model, but for embeddings, which it keeps as they are.
    """
    if kind not in WEIGHTS:
        raise ValueError(f"save_parts: kind must be one of {', '.join(WEIGHTS)}; got {kind!r}")
    if largest <= 2 * _HEADER:
        raise ValueError(f"save_parts: largest must be above {2 * _HEADER} bytes, got {largest}")
    parts: list[dict[str, Tensor]] = [{}]
    room = largest - _HEADER
    for name, weight in weights.items():
        if "@" in name:
            raise ValueError(f"save_parts: a name must not hold '@', got {name!r}")
        rows = len(weight) if weight.dim() > 1 else 1
        row_bytes = sum(x.nbytes for x in _entries(name, weight, 0, 1, kind).values())
        if row_bytes > largest - _HEADER:
            raise ValueError(f"save_parts: a row of {name} takes {row_bytes} bytes; largest must be above that")
        start = 0
        while start < rows:
            if row_bytes > room:
                parts.append({})
                room = largest - _HEADER
            stop = min(rows, start + max(1, room // max(row_bytes, 1)))
            entries = _entries(name, weight, start, stop, kind)
            parts[-1] |= entries
            room -= sum(x.nbytes for x in entries.values())
            start = stop
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, tensors in enumerate(parts, 1):
        facts = {"part": f"{i}", "parts": f"{len(parts)}", "kind": kind, "sha256": _digest(tensors)}
        data = _safetensors().torch.save(tensors, facts)
        assert len(data) <= largest
        paths.append(folder / f"weights-{i}-of-{len(parts)}.safetensors")
        paths[-1].write_bytes(data)
    return paths


def load_parts(folder: Path) -> dict[str, Tensor]:
    """The weights that :func:`save_parts` wrote, in float32."""
    paths = has_parts(folder)
    if not paths:
        raise BadParts(f"{folder} holds no weights-*.safetensors")
    safetensors = _safetensors()
    found: dict[str, Tensor] = {}
    parts = int(paths[0].stem.rsplit("-", 1)[1])
    for i in range(1, parts + 1):
        path = folder / f"weights-{i}-of-{parts}.safetensors"
        if path not in paths:
            raise BadParts(f"{path} is missing: all {parts} parts are needed")
        try:
            with safetensors.safe_open(path, "pt") as file:
                facts = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors has an exception of its own
            raise BadParts(f"{path} cannot be read: {error}") from error
        if facts.get("sha256") != _digest(tensors):
            raise BadParts(f"{path} is not what was written (SHA-256 differs)")
        found |= tensors
    return _joined(found)


def has_parts(folder: Path) -> list[Path]:
    """The files of :func:`save_parts` in ``folder``; none: it was not written by it."""
    return [p for p in sorted(folder.glob("weights-*.safetensors")) if re.fullmatch(r"weights-\d+-of-\d+", p.stem)]


def _entries(name: str, weight: Tensor, start: int, stop: int, kind: str) -> dict[str, Tensor]:
    """Rows ``start`` to ``stop`` as they are stored; of a vector all of it."""
    if weight.dim() < 2:
        return {name: weight.detach().cpu().clone().contiguous()}
    rows = weight[start:stop].detach().cpu().contiguous()
    key = f"{name}@{start}"
    if not rows.is_floating_point():
        return {key: rows.clone()}
    if kind != "int8":
        return {key: rows.to(getattr(torch, kind), copy=True)}
    largest = rows.float().flatten(1).abs().amax(1)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    shape = (-1, *[1] * (rows.dim() - 1))
    return {key: (rows.float() / scale.view(shape)).round().to(torch.int8), f"{key}.scale": scale}


def _joined(found: dict[str, Tensor]) -> dict[str, Tensor]:
    pieces: dict[str, dict[int, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for key, value in found.items():
        name, _, place = key.partition("@")
        if not place:
            whole[name] = value.float() if value.is_floating_point() else value
        elif not place.endswith(".scale"):
            scale = found.get(f"{key}.scale")
            if scale is not None:
                value = value.float() * scale.view(-1, *[1] * (value.dim() - 1))
            pieces.setdefault(name, {})[int(place)] = value.float() if value.is_floating_point() else value
    for name, rows in pieces.items():
        whole[name] = torch.cat([rows[start] for start in sorted(rows)])
    return whole


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("weights in files need safetensors: pip install 'egru[train]'") from error
    return safetensors
