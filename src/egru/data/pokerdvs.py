"""POKER-DVS: event-camera recordings of the four card suits, with microsecond timestamps and 35 by 35 pixels.

Serrano-Gotarredona and Linares-Barranco, "Poker-DVS and MNIST-DVS" (2015). The files are the two archives that the
tonic library downloads as ``POKERDVS``. Recordings take 8 to 30 ms.
"""

import io
import os
import tarfile
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from egru.data.files import DataFile, find_file, verify_content

Suit = Literal["clubs", "diamonds", "hearts", "spades"]
SUITS: tuple[Suit, ...] = get_args(Suit)
PIXELS = 35
"""Pixels along a side of the sensor."""
FOLDER = "pokerdvs"
_SUIT_FOLDERS = ("cl", "di", "he", "sp")
_ORIGIN = "the downloads of tonic.datasets.POKERDVS (pip install 'egru[dvs]')"
FILES = (
    DataFile("pips_train.tar.gz", "1ea38cdea0a46da6a8bce0f51b7a22b22a0922c14f73c5813a674810691eead5", _ORIGIN),
    DataFile("pips_test.tar.gz", "97501f9ab11f0c71fe232a264788671e9c4052566e3fc48c662ef6a7692347f2", _ORIGIN),
)


class Recording(NamedTuple):
    """The events of one recording in order of time, as int64 vectors of equal length.

    Attributes:
        times: Microseconds since the first event.
        x: Column of the pixel.
        y: Row of the pixel.
        polarity: 0 or 1.
        suit: Index into :data:`SUITS`.
    """

    times: Tensor
    x: Tensor
    y: Tensor
    polarity: Tensor
    suit: int


class Recordings(NamedTuple):
    """The recordings of both splits.

    Attributes:
        train: Training recordings.
        test: Test recordings.
    """

    train: tuple[Recording, ...]
    test: tuple[Recording, ...]


def pokerdvs(root: str | os.PathLike[str] | None = None) -> Recordings:
    """Load POKER-DVS.

    Args:
        root: Data root. If None, the environment variable ``EGRU_DATA``. ``pips_train.tar.gz`` and ``pips_test.tar.gz``
            are read from its folder ``pokerdvs``.

    Returns:
        48 training and 20 test recordings.

    Raises:
        DataMissing: If a file is missing.
        DataCorrupt: If a file is damaged.

    Example:
        >>> recordings = egru.data.pokerdvs()  # doctest: +SKIP
        >>> len(recordings.train), len(recordings.test)  # doctest: +SKIP
        (48, 20)
    """
    return Recordings(*(_read(file, find_file(file, FOLDER, root)) for file in FILES))


def _read(file: DataFile, path: Path) -> tuple[Recording, ...]:
    content = path.read_bytes()
    verify_content(content, file, path)
    recordings = []
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        names = [name for name in archive.getnames() if name.endswith(".npy")]
        for name in sorted(names, key=lambda n: (Path(n).parent.name, int(Path(n).stem))):
            member = archive.extractfile(name)
            assert member is not None
            events = np.load(io.BytesIO(member.read()), allow_pickle=False).astype(np.int64)
            t, x, y, polarity = torch.from_numpy(events[np.argsort(events[:, 0], kind="stable")]).T.contiguous()
            recordings.append(Recording(t - t[0], x, y, polarity, _SUIT_FOLDERS.index(Path(name).parent.name)))
    return tuple(recordings)
