"""Atomic file writing: a crash or a concurrent reader sees the old file or the new one, never a part."""

import os
import threading
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically.

    The data are written to a temporary file in the same folder, flushed to disk and renamed.

    Args:
        path: File to create or replace. Its folder must exist.
        data: Complete new content.

    Raises:
        OSError: If the file cannot be written. The temporary file is removed and ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")  # unique among threads and processes
    try:
        write_synced(temporary, data)
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of ``folder`` to disk, so that renames survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
