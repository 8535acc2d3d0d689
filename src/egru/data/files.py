"""Find the files of a data set and verify their content."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

VARIABLE = "EGRU_DATA"
"""Environment variable with the path of the data root."""


class DataMissing(FileNotFoundError):
    """A data file is missing. The message names the file, its folder, and where to get it."""


class DataCorrupt(ValueError):
    """A data file is truncated, damaged or a different version."""


class DataFile(NamedTuple):
    """A file of a published data set.

    Attributes:
        name: File name.
        sha256: SHA-256 of the uncompressed content, in hexadecimal.
        origin: Where to get the file.
    """

    name: str
    sha256: str
    origin: str


def data_root(root: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the folder that contains the data sets.

    Args:
        root: The folder. If None, the environment variable ``EGRU_DATA`` is used.

    Returns:
        The path, or None if ``root`` is None and ``EGRU_DATA`` is not set.

    Example:
        >>> egru.data.data_root("data").name
        'data'
    """
    path = os.environ.get(VARIABLE) if root is None else root
    return Path(path).expanduser() if path else None


def missing_file(name: str, folder: str, root: Path | None, origin: str) -> DataMissing:
    """Return the error for a file that is missing from the sub-folder ``folder`` of the data root."""
    if root is None:
        problem = f"{folder}/{name} is needed, but no data root is set"
    else:
        problem = f"{name} is not in {root / folder}"
    return DataMissing(
        f"{problem}. Get it from {origin}, put it into the folder {folder} of the data root, and set the root with "
        f"{VARIABLE}=FOLDER or root=FOLDER"
    )


def find_file(
    file: DataFile, folder: str, root: str | os.PathLike[str] | None, *, suffixes: tuple[str, ...] = ("",)
) -> Path:
    """Return the path of a data file, with the first of ``suffixes`` that exists.

    Raises:
        DataMissing: If no such file exists.
    """
    base = data_root(root)
    if base is not None:
        for suffix in suffixes:
            path = base / folder / (file.name + suffix)
            if path.is_file():
                return path
    raise missing_file(file.name + suffixes[0], folder, base, file.origin)


def verify_content(content: bytes | memoryview, file: DataFile, path: Path) -> None:
    """Check the SHA-256 of the uncompressed content of a file.

    Raises:
        DataCorrupt: If it differs from that of the published file.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DataCorrupt(
            f"{path} is not the published file: {len(content):,} bytes with SHA-256 {digest}, expected "
            f"{file.sha256}. It may be truncated or a different version; get it again from {file.origin}"
        )
