"""Event-based recurrent networks for PyTorch: layers whose cost is proportional to activity."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from egru import (
        activity,
        compress,
        continuous,
        data,
        functional,
        kernels,
        layers,
        models,
        report,
        runtime,
        training,
    )
    from egru.activity import ActivityLoss, ActivityMonitor
    from egru.compress import calibrate, convert, sparsify
    from egru.events import EventState, Surrogate, register_surrogate
    from egru.layers import EGRU, ELSTM, ERNN, EGRUCell, Threshold
    from egru.runs import pretrained
    from egru.runtime import EventEngine
    from egru.trace import exponential_trace

__version__ = "0.2.0"

__all__ = [
    "EGRU",
    "ELSTM",
    "ERNN",
    "ActivityLoss",
    "ActivityMonitor",
    "EGRUCell",
    "EventEngine",
    "EventState",
    "Surrogate",
    "Threshold",
    "activity",
    "calibrate",
    "compress",
    "continuous",
    "convert",
    "data",
    "exponential_trace",
    "functional",
    "kernels",
    "layers",
    "models",
    "pretrained",
    "register_surrogate",
    "report",
    "runtime",
    "sparsify",
    "training",
]

_MODULES = {
    "EGRU": "layers",
    "ELSTM": "layers",
    "ERNN": "layers",
    "EGRUCell": "layers",
    "Threshold": "layers",
    "ActivityLoss": "activity",
    "ActivityMonitor": "activity",
    "EventEngine": "runtime",
    "calibrate": "compress",
    "convert": "compress",
    "sparsify": "compress",
    "EventState": "events",
    "Surrogate": "events",
    "register_surrogate": "events",
    "exponential_trace": "trace",
    "pretrained": "runs",
}
"""The module of each name that is not a module itself."""


def __getattr__(name: str) -> Any:
    """Import names at first use."""
    if name not in __all__:
        raise AttributeError(f"module 'egru' has no attribute {name!r}")
    if name not in _MODULES:
        return importlib.import_module(f"egru.{name}")
    value = globals()[name] = getattr(importlib.import_module(f"egru.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Layers register the operator egru::sequence, which torch.export.load requires. The command starts without torch:
# argv[0] is "-m" while Python locates the package for `python -m egru`.
if os.path.basename(sys.argv[0] if sys.argv else "").removesuffix(".exe") not in ("egru", "-m"):
    importlib.import_module("egru.layers")
    importlib.import_module("egru.runtime")
