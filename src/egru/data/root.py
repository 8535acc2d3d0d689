"""Where data files lie, and whether they are the right ones."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

VARIABLE = "EGRU_DATA"


class DataMissing(FileNotFoundError):
    """A data file is not there. The message says which, where it was looked for, and where to get it."""


class DataCorrupt(ValueError):
    """A data file is there, but it is truncated, damaged or another one."""


class Source(NamedTuple):
    """A file of a data set: its name, the SHA-256 of its content (uncompressed), and where it comes from."""

    name: str
    sha256: str
    address: str


def data_root(root: str | os.PathLike[str] | None = None) -> Path | None:
    """``root``, or else the folder named by ``EGRU_DATA``; None where neither is given."""
    given = os.environ.get(VARIABLE) if root is None else root
    return Path(given).expanduser() if given else None


def missing(name: str, folder: str, root: Path | None, address: str) -> DataMissing:
    """The error for ``name``, wanted in the sub-folder ``folder`` of the data root."""
    if root is None:
        where = f"no data root is set, so {folder}/{name} was not looked for"
    else:
        where = f"{name} is not in {root / folder}"
    return DataMissing(
        f"{where}. Get it from {address}, put it in the folder {folder} of the data root, and name that root with "
        f"{VARIABLE}=FOLDER or root=FOLDER"
    )


def find(source: Source, folder: str, root: str | os.PathLike[str] | None, *, endings: tuple[str, ...] = ("",)) -> Path:
    """The path of ``source``, with the first of ``endings`` that is there, or :class:`DataMissing`."""
    base = data_root(root)
    if base is not None:
        for ending in endings:
            path = base / folder / (source.name + ending)
            if path.is_file():
                return path
    raise missing(source.name + endings[0], folder, base, source.address)


def verify(content: bytes | memoryview, source: Source, path: Path) -> None:
    """Refuse ``content`` that is not the published file's."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != source.sha256:
        raise DataCorrupt(
            f"{path} is not the published file: {len(content):,} bytes with SHA-256 {digest}, expected "
            f"{source.sha256}. It may be truncated or another version; get it again from {source.address}"
        )
