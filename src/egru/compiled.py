"""Load the compiled core, or record why it is missing."""

import importlib
import types
import warnings
from typing import Any

core: types.ModuleType | None = None
"""The extension module ``egru._core``, or None if it was not built or cannot be loaded."""
missing: str = ""
"""Why :data:`core` is None."""

try:
    core = importlib.import_module("egru._core")
except ImportError as error:
    missing = (
        "the compiled core was not built (was a C++ compiler available when the package was installed?)"
        if isinstance(error, ModuleNotFoundError)
        else f"the compiled core cannot be loaded: {error}"
    )


def require() -> Any:
    """Return the compiled core.

    Raises:
        RuntimeError: If the core is missing.
    """
    if core is None:
        raise RuntimeError(missing)
    return core


_warned = False


def warn_missing() -> None:
    """Warn, once per process, that the slow reference implementations are used."""
    global _warned
    if core is None and not _warned:
        _warned = True
        warnings.warn(f"egru runs in plain torch, which is slow: {missing}", RuntimeWarning, stacklevel=3)
