"""The compiled core for the CPU, or the reason there is none."""

import importlib
import types

core: types.ModuleType | None = None
"""The extension module, or None where it was not built or cannot be loaded."""
absence: str = ""
"""Why there is no core."""

try:
    core = importlib.import_module("egru.kernels.cpu._core")
except ImportError as error:
    absence = (
        "the compiled core was not built (no C++ compiler when the package was installed?)"
        if isinstance(error, ModuleNotFoundError)
        else f"the compiled core cannot be loaded: {error}"
    )

__all__ = ["absence", "core"]
