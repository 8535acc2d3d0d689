"""POKER-DVS pips: the four suits of cards flipped past an event camera, microsecond events of 35 by 35 pixels.

Serrano-Gotarredona and Linares-Barranco, "Poker-DVS and MNIST-DVS" (2015), in the two archives the tonic library
downloads as ``POKERDVS``: 48 recordings to learn from and 20 to test on, 8 to 30 ms long.
"""

import io
import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from egru.data.root import Source, find, verify

SUITS = ("clubs", "diamonds", "hearts", "spades")
PIXELS = 35
_FOLDERS = ("cl", "di", "he", "sp")
_FROM = "what tonic.datasets.POKERDVS downloads"
_FILES = (
    Source("pips_train.tar.gz", "1ea38cdea0a46da6a8bce0f51b7a22b22a0922c14f73c5813a674810691eead5", _FROM),
    Source("pips_test.tar.gz", "97501f9ab11f0c71fe232a264788671e9c4052566e3fc48c662ef6a7692347f2", _FROM),
)


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
    """Both parts, from ``pips_train.tar.gz`` and ``pips_test.tar.gz`` in the folder ``pokerdvs`` of the data root."""
    return Recordings(*(_read(source, find(source, "pokerdvs", root)) for source in _FILES))


def _read(source: Source, archive: Path) -> tuple[Recording, ...]:
    content = archive.read_bytes()
    verify(content, source, archive)
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
