"""Sequential MNIST: handwritten digits one pixel at a time, in row order or in one fixed random order."""

import gzip
import math
import os
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from egru.data.root import DataCorrupt, Source, find, verify
from egru.data.sets import Classification, Split

FOLDER = "mnist"
VALIDATION = 5_000
"""The last of the 60,000 training images."""
_ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SOURCES = {
    name: Source(name, sha256, f"{_ADDRESS}{name}.gz")
    for name, sha256 in {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    }.items()
}


def sequential_mnist(
    root: str | os.PathLike[str] | None = None, *, permuted: bool = False, side: int = 28, seed: int = 0
) -> Classification:
    """55,000 / 5,000 / 10,000 digits as sequences ``(N, side * side, 1)`` of grey values in [0, 1].

    Args:
        root: data root; the four IDX files, gzipped or not, lie in its folder ``mnist``. ``EGRU_DATA`` by default.
        permuted: pixels in one random order, the same for every image, drawn from ``seed``.
        side: 28, or 14 with every 2 by 2 pixels averaged: a quarter of the steps.
        seed: of the permutation; nothing else depends on it.
    """
    if side not in (28, 14):
        raise ValueError(f"sequential_mnist: side must be 28 or 14, got {side!r}")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(side * side)) if permuted else None
    # All four first: a missing file is reported before half a minute of work.
    images, labels, test_images, test_labels = (_load(source, root) for source in SOURCES.values())
    x, y = _sequences(images, side, order), torch.from_numpy(labels).long()
    n = len(y) - VALIDATION
    name = f"{'permuted ' if permuted else ''}sequential MNIST{'' if side == 28 else f' {side}x{side}'}"
    return Classification(
        name,
        10,
        Split(x[:n], y[:n]),
        Split(x[n:], y[n:]),
        Split(_sequences(test_images, side, order), torch.from_numpy(test_labels).long()),
    )


def _load(source: Source, root: str | os.PathLike[str] | None) -> np.ndarray:
    path = find(source, FOLDER, root, endings=(".gz", ""))
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error, struct.error) as error:
            raise DataCorrupt(f"{path} cannot be unpacked ({error}); get it again from {source.address}") from error
    verify(content, source, path)
    try:
        return parse_idx(content)
    except ValueError as error:
        raise DataCorrupt(f"{path}: {error}") from error


def parse_idx(content: bytes) -> np.ndarray:
    """The array of unsigned bytes in an IDX file: two zeros, type 8, rank, sizes as big-endian words, data."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"not an IDX file of bytes: it starts with {content[:4].hex() or 'nothing'}")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise ValueError(f"IDX header of rank {rank} needs {start} bytes, the file has {len(content)}")
    sizes = struct.unpack(f">{rank}I", content[4:start])
    if len(content) - start != math.prod(sizes):
        raise ValueError(f"IDX header promises {math.prod(sizes)} bytes of data, the file has {len(content) - start}")
    return np.frombuffer(bytearray(content[start:]), np.uint8).reshape(sizes)


def _sequences(images: np.ndarray, side: int, order: Tensor | None) -> Tensor:
    """``(N, side * side, 1)`` in float32 and [0, 1]."""
    x = torch.from_numpy(images).to(torch.float32) / 255
    if side < x.shape[1]:
        x = torch.nn.functional.avg_pool2d(x, x.shape[1] // side)
    x = x.flatten(1)
    return (x if order is None else x[:, order])[..., None]
