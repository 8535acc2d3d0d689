"""Sequential MNIST: handwritten digits as sequences of pixels, in row order or permuted."""

import gzip
import math
import os
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from egru.data.datasets import Classification, Split
from egru.data.files import DataCorrupt, DataFile, find_file, verify_content

FOLDER = "mnist"
VALIDATION = 5_000
"""Number of images at the end of the training file that form the validation split."""
_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FILES = {
    name: DataFile(name, sha256, f"{_URL}{name}.gz")
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
    """Load MNIST as sequences of pixels.

    Args:
        root: Data root. If None, the environment variable ``EGRU_DATA``. The four IDX files are read from its folder
            ``mnist``, gzipped or not.
        permuted: If True, apply one random permutation to the pixels of all images (permuted sequential MNIST).
        side: 28, or 14 to average blocks of 2 by 2 pixels, which gives a quarter of the steps.
        seed: Seed of the permutation.

    Returns:
        55,000 / 5,000 / 10,000 sequences with ``x`` of shape ``(N, side * side, 1)``, float32 in [0, 1], and 10
        classes. The validation split is the end of the training file.

    Raises:
        DataMissing: If a file is missing.
        DataCorrupt: If a file is damaged.
        ValueError: If ``side`` is neither 28 nor 14.

    Example:
        >>> data = egru.data.sequential_mnist(side=14)  # doctest: +SKIP
        >>> data.train.x.shape  # doctest: +SKIP
        torch.Size([55000, 196, 1])
    """
    if side not in (28, 14):
        raise ValueError(f"sequential_mnist: side must be 28 or 14, got {side!r}")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(side * side)) if permuted else None
    # Read all files before converting any, so that a missing file is reported at once.
    images, labels, test_images, test_labels = (_load(file, root) for file in FILES.values())
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


def _load(file: DataFile, root: str | os.PathLike[str] | None) -> np.ndarray:
    path = find_file(file, FOLDER, root, suffixes=(".gz", ""))
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error, struct.error) as error:
            raise DataCorrupt(f"{path} cannot be decompressed ({error}); get it again from {file.origin}") from error
    verify_content(content, file, path)
    try:
        return parse_idx(content)
    except ValueError as error:
        raise DataCorrupt(f"{path}: {error}") from error


def parse_idx(content: bytes) -> np.ndarray:
    """Return the array of unsigned bytes in an IDX file.

    The format is: two zero bytes, type 8, rank, sizes as big-endian 32-bit words, data.

    Raises:
        ValueError: If ``content`` does not have this format.
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"not an IDX file of unsigned bytes: expected 000008 at the start, got {content[:4].hex()!r}")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise ValueError(f"the IDX header of rank {rank} takes {start} bytes, but the file has {len(content)}")
    sizes = struct.unpack(f">{rank}I", content[4:start])
    if len(content) - start != math.prod(sizes):
        raise ValueError(
            f"the IDX header states {math.prod(sizes)} bytes of data, but the file has {len(content) - start}"
        )
    return np.frombuffer(bytearray(content[start:]), np.uint8).reshape(sizes)


def _sequences(images: np.ndarray, side: int, order: Tensor | None) -> Tensor:
    """Convert images to sequences ``(N, side * side, 1)``, float32 in [0, 1]."""
    x = torch.from_numpy(images).to(torch.float32) / 255
    if side < x.shape[1]:
        x = torch.nn.functional.avg_pool2d(x, x.shape[1] // side)
    x = x.flatten(1)
    return (x if order is None else x[:, order])[..., None]
