"""Load the compiled core, ``egru._core``. All other modules access it through this one."""

import hashlib
from pathlib import Path
from types import ModuleType

from egru._warn import warn_user

missing: str = ""
"""Why :data:`core` is None."""

REINSTALL = "pip cache remove egru; pip install --force-reinstall --no-deps egru"
"""Builds the core after a compiler was installed. pip would reuse a wheel without the core that is in its cache."""

_STUB = Path(__file__).with_name("_core.pyi")


def is_outdated(module: ModuleType, stub: Path = _STUB) -> bool:
    """Return whether a core was built from another version of its type stub.

    The stub describes all functions and classes of the core, so a core with another stub may lack some of them.
    """
    try:
        expected = hashlib.sha256(stub.read_bytes()).hexdigest()
    except OSError:
        return False  # some packagers leave stubs out
    return getattr(module, "_stub_sha256", None) != expected


try:
    import egru._core as core

    if is_outdated(core):
        raise ImportError("it belongs to another version of egru")
except ImportError as error:
    core = None
    missing = (
        "the compiled core was not built; install a C++17 compiler, then"
        if isinstance(error, ModuleNotFoundError)
        else f"the compiled core cannot be loaded ({error}); to build it again,"
    ) + f" run `{REINSTALL}` (in a clone: `pip install --force-reinstall --no-deps --editable .`)"


def require():
    """Return the compiled core.

    Raises:
        RuntimeError: If the core is missing.
    """
    if core is None:
        raise RuntimeError(missing)
    return core


_warned = False


def warn_missing() -> None:
    """Warn that the slow reference implementations are used, if the core is missing. Warns once per process."""
    global _warned
    if core is None and not _warned:
        _warned = True
        warn_user(f"egru runs in plain torch, which is slow: {missing}", RuntimeWarning)
