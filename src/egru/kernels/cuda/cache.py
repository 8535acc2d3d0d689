"""Machine code of compiled kernels on disk.

The files are loaded into the GPU's address space, so they must be the ones that this user wrote: the folder is private
(mode 0700) and every file starts with a checksum of its name and content. A file that does not match is compiled again.
``EGRU_CACHE_DIR`` sets the folder.
"""

import functools
import hashlib
import os
import pathlib
import stat

from egru._warn import warn_user
from egru.files import replace_file

_DIGEST = hashlib.sha256().digest_size


def cache_folder() -> pathlib.Path:
    """Return the folder of compiled kernels. Empty variables and a relative ``XDG_CACHE_HOME`` are ignored."""
    configured, home = os.environ.get("EGRU_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    if configured:
        base = pathlib.Path(configured).expanduser().absolute()
    else:
        base = (pathlib.Path(home) if os.path.isabs(home) else pathlib.Path("~/.cache").expanduser()) / "egru"
    return base / "cuda"


def load(key: str) -> bytes | None:
    """Return the machine code stored under ``key``, or None if there is none that can be trusted."""
    try:
        folder = cache_folder()
        if not folder.is_dir():
            return None
        _require_private(folder)
        path = folder / f"{key}.cubin"
        if path.stat().st_uid != os.geteuid():
            return None
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _warn(str(error))
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if digest == _checksum(key, code) else None


def store(key: str, code: bytes) -> None:
    """Store machine code under ``key``. Warns once if that is not possible: the next process compiles it again."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(folder)
        replace_file(folder / f"{key}.cubin", _checksum(key, code) + code)
    except (OSError, RuntimeError) as error:
        _warn(str(error))


def _require_private(folder: pathlib.Path) -> None:
    """Make ``folder`` private. Raise PermissionError if it belongs to another user."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user; set EGRU_CACHE_DIR to a folder of your own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)


def _checksum(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + code).digest()


@functools.cache
def _warn(reason: str) -> None:
    warn_user(f"compiled CUDA kernels are not cached: {reason}", RuntimeWarning)
