"""The encoding of weight matrices in files: number formats, and matrices without their zero blocks.

A matrix is one entry ``KEY`` in its number format. If that takes fewer bytes, it is stored without its zero blocks
instead: ``KEY.blocks`` has the other blocks, ``(N, block)``; ``KEY.mask`` has one bit per block, in rows of blocks; and
``KEY.shape`` is the shape. A block is 16, 8 or 1 consecutive rows of one column. int8 matrices also have the largest
magnitude of each row, 127 times its scale, in ``KEY.largest``.

Decoded weights are float32. Encoding them again gives the same entries, and an :class:`egru.EventEngine` with weights
in the same format rounds them to the same bits as the original matrix. Negative zeros become zeros.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from egru.types import WeightFormat

BLOCKS = (16, 8, 1)
"""Sizes of the blocks that can be left out. An engine leaves out blocks of 16."""
BLOCKS_SUFFIX, MASK, SHAPE, LARGEST = ".blocks", ".mask", ".shape", ".largest"


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a number format, with the layout that takes the fewest bytes.

    Attributes:
        values: The rounded weights, ``(rows, ...)``.
        largest: Largest magnitude of each row if the format is int8, otherwise None.
        block: Rows per block if zero blocks are left out, 0 if all values are stored.
        row_bytes: Bytes that each group of ``max(block, 1)`` rows takes.
    """

    values: Tensor
    largest: Tensor | None
    block: int
    row_bytes: Tensor

    @property
    def group(self) -> int:
        """Number of rows that must be stored together."""
        return max(self.block, 1)

    def entries(self, key: str, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Return the tensors to store for rows ``start`` to ``stop``, multiples of ``group``."""
        rows = self.values[start:stop]
        entries = {} if self.largest is None else {key + LARGEST: self.largest[start:stop].clone()}
        if not self.block:
            return {key: rows.clone(), **entries}
        blocks = _as_blocks(rows, self.block)
        mask = (blocks != 0).any(2)
        return {
            key + BLOCKS_SUFFIX: blocks[mask],
            key + MASK: torch.from_numpy(np.packbits(mask.numpy())),
            key + SHAPE: torch.tensor(rows.shape),
            **entries,
        }


def store_matrix(weight: Tensor, format: WeightFormat) -> StoredMatrix:
    """Round a matrix to a number format and choose its layout. Matrices of integers keep their dtype."""
    values, largest = weight.detach().cpu().contiguous(), None
    if values.is_floating_point() and format == "int8":
        values = values.float()
        largest = values.flatten(1).abs().amax(1)
        values = (values / _column(_scale(largest), values)).round().to(torch.int8)
    elif values.is_floating_point():
        values = values.to(getattr(torch, format))
    rows, columns, size = len(values), math.prod(values.shape[1:]), values.element_size()
    extra = 0 if largest is None else 4
    layouts = {0: torch.full((rows,), columns * size + extra)}
    for block in BLOCKS:
        if rows % block == 0 and columns:
            counts = (_as_blocks(values, block) != 0).any(2).sum(1)
            layouts[block] = counts * (block * size) + (columns + 7) // 8 + block * extra
    block = min(layouts, key=lambda block: (int(layouts[block].sum()), block))
    return StoredMatrix(values, largest, block, layouts[block])


def is_part(key: str) -> bool:
    """Return whether the entry belongs to the matrix of another entry."""
    return key.endswith((MASK, SHAPE, LARGEST))


def matrix_keys(key: str, entries: Mapping[str, Tensor]) -> list[str]:
    """Return the keys of the entries that :func:`load_matrix` reads for the matrix ``key``."""
    keys = [key] if key in entries else [key + suffix for suffix in (BLOCKS_SUFFIX, MASK, SHAPE)]
    return [*keys, key + LARGEST] if entries[keys[0]].dtype == torch.int8 else keys


def load_matrix(key: str, entries: Mapping[str, Tensor]) -> Tensor:
    """Decode the matrix ``key``: float32, or integers as they were stored.

    Raises:
        KeyError: If an entry is missing.
        ValueError: If the entries do not fit together.
    """
    values = entries[key] if key in entries else _join_blocks(key, entries)
    if values.dtype != torch.int8:
        return values.float() if values.is_floating_point() else values.clone()
    if key + LARGEST not in entries:
        return values.clone()
    largest = entries[key + LARGEST]
    if largest.dtype != torch.float32 or largest.shape != values.shape[:1]:
        raise ValueError(f"{key + LARGEST} must be float32 of shape ({len(values)},), got {tuple(largest.shape)}")
    # The product 127 * scale may differ from the largest magnitude by rounding, which would change the scale.
    scaled = values * _column(_scale(largest), values)
    return torch.where(values.abs() == 127, _column(largest, values) * values.sign(), scaled)


def _join_blocks(key: str, entries: Mapping[str, Tensor]) -> Tensor:
    blocks, packed, shape = (entries[key + suffix] for suffix in (BLOCKS_SUFFIX, MASK, SHAPE))
    if blocks.dim() != 2 or shape.dim() != 1 or shape.dtype != torch.int64 or packed.dtype != torch.uint8:
        raise ValueError(f"the entries of {key} do not describe blocks")
    sizes, block = shape.tolist(), blocks.shape[1]
    columns = math.prod(sizes[1:])
    if block not in BLOCKS or len(sizes) < 2 or min(sizes) < 1 or sizes[0] % block:
        raise ValueError(f"{key} has blocks of {block} rows and shape {tuple(sizes)}")
    count = sizes[0] // block * columns
    bits = np.unpackbits(packed.numpy(), count=count) if packed.numel() == (count + 7) // 8 else np.zeros(0, np.uint8)
    mask = torch.from_numpy(bits.astype(bool))
    if len(mask) != count or int(mask.sum()) != len(blocks):
        raise ValueError(f"the mask of {key} does not fit its {len(blocks)} blocks and shape {tuple(sizes)}")
    values = torch.zeros(count, block, dtype=blocks.dtype)
    values[mask] = blocks
    return values.unflatten(0, (-1, columns)).transpose(1, 2).reshape(sizes)


def _as_blocks(values: Tensor, block: int) -> Tensor:
    """Return the blocks of a matrix, ``(rows / block, columns, block)``."""
    return values.flatten(1).unflatten(0, (-1, block)).transpose(1, 2)


def _scale(largest: Tensor) -> Tensor:
    """Return the scales of int8 rows, as the engine computes them."""
    return torch.where(largest > 0, largest / 127, 1.0)


def _column(vector: Tensor, values: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (values.dim() - 1))
