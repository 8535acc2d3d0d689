"""POKER-DVS pips: the four suits of cards flipped past an event camera, microsecond events of 35 by 35 pixels.

Serrano-Gotarredona and Linares-Barranco, "Poker-DVS and MNIST-DVS" (2015), in the two archives the tonic library
downloads as ``POKERDVS``: 48 recordings to learn from and 20 to test on, 8 to 30 ms long.
"""

import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SUITS = ("clubs", "diamonds", "hearts", "spades")
PIXELS = 35
_FOLDERS = ("cl", "di", "he", "sp")
_MD5 = {
    "pips_train.tar.gz": "412bcfb96826e4fcb290558e8c150aae",
    "pips_test.tar.gz": "eef2bf7d0d3defae89a6fa98b07c17af",
}


class Recording(NamedTuple):
    """Events in time order: ``times`` in microseconds from the first (int64), pixel ``x`` and ``y``, ``polarity`` 0 or
    1, and the number of the suit."""

    times: Tensor
    x: Tensor
    y: Tensor
    polarity: Tensor
    suit: int


class Recordings(NamedTuple):
    """The two parts as they come; the test part is touched once."""

    train: tuple[Recording, ...]
    test: tuple[Recording, ...]


def pokerdvs(root: str | os.PathLike[str] | None = None) -> Recordings:
    """Both parts, read from ``pokerdvs/pips_train.tar.gz`` and ``pips_test.tar.gz`` under ``root``, or under the folder
    the environment variable ``EGRU_DATA`` names."""
    where = Path(root or os.environ.get("EGRU_DATA", "data")) / "pokerdvs"
    return Recordings(*(_read(where / name) for name in _MD5))


def _read(archive: Path) -> tuple[Recording, ...]:
    if not archive.is_file():
        raise FileNotFoundError(
            f"POKER-DVS is not at {archive}: put pips_train.tar.gz and pips_test.tar.gz there (tonic.datasets.POKERDVS "
            "downloads them) and name the folder above pokerdvs in EGRU_DATA or root"
        )
    content = archive.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != _MD5[archive.name]:
        raise ValueError(f"{archive} has MD5 {found}, expected {_MD5[archive.name]}: damaged, or another version")
    recordings = []
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names = [name for name in tar.getnames() if name.endswith(".npy")]
        for name in sorted(names, key=lambda n: (Path(n).parent.name, int(Path(n).stem))):
            file = tar.extractfile(name)
            assert file is not None
            events = np.load(io.BytesIO(file.read()), allow_pickle=False).astype(np.int64)
            t, x, y, polarity = torch.from_numpy(events[np.argsort(events[:, 0], kind="stable")]).T.contiguous()
            recordings.append(Recording(t - t[0], x, y, polarity, _FOLDERS.index(Path(name).parent.name)))
    return tuple(recordings)
