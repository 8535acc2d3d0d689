"""Atomic writing of files and folders: a crash or a concurrent reader sees the old or the new one, never a part."""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path


def replace_file(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Write ``data`` to ``path`` atomically.

    The data are written to a temporary file in the same folder, flushed to disk and renamed.

    Args:
        path: File to create or replace. Its folder must exist.
        data: Complete new content.
        exclusive: Whether to refuse to replace a file, also one that another process writes at the same time.

    Raises:
        FileExistsError: If ``exclusive`` is True and ``path`` exists.
        OSError: If the file cannot be written. The temporary file is removed and ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")  # unique among threads and processes
    try:
        write_synced(temporary, data)
        if not (exclusive and _link(temporary, path)):
            temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_files(files: Mapping[Path, bytes]) -> None:
    """Write several files. All are complete in temporary files before the first one replaces its predecessor.

    Args:
        files: Complete new content by path. The folders must exist.

    Raises:
        OSError: If a file cannot be written. The temporary files are removed and no path has changed, unless a rename
            fails.
    """
    temporaries = {path: path.with_name(f".{path.name}.{threading.get_native_id()}") for path in files}
    try:
        for path, data in files.items():
            write_synced(temporaries[path], data)
        for path, temporary in temporaries.items():
            temporary.replace(path)
        for folder in {path.parent for path in files}:
            sync_folder(folder)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> bool:
    """Link a file to ``path``, which, unlike a rename, replaces no file. Return False if links are not supported."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        return False
    return True


@contextlib.contextmanager
def new_folder(folder: Path, last: str = "") -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``folder`` at the end of the block.

    If the block raises, nothing is left. A process that is killed leaves the temporary folder, which the next call for
    the same ``folder`` replaces.

    Args:
        folder: Folder to create. It may exist if it is empty.
        last: Name of the file that makes the folder valid. It is moved last if ``folder`` is a mount point, which
            cannot be replaced.

    Raises:
        OSError: If the folder cannot be created, or another process has written to it.
    """
    folder = Path(os.path.abspath(folder))
    temporary = folder.with_name(f".{folder.name}.incomplete")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            temporary.replace(folder)  # also replaces an empty folder
        except OSError:
            if not folder.is_dir() or any(folder.iterdir()):
                raise
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == last):
                shutil.move(path, folder / path.name)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to disk.

    Raises:
        OSError: If the file cannot be written. The error names ``path``.
    """
    with name_in_errors(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError that names no file, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of ``folder`` to disk, so that renames survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
