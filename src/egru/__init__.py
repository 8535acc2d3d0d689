"""Event-based recurrent networks for PyTorch: layers whose cost is proportional to activity."""

import importlib
from typing import TYPE_CHECKING, Any

from egru.activity import ActivityLoss, ActivityMonitor
from egru.events import EventState, Surrogate, register_surrogate
from egru.layers import EGRU, ELSTM, ERNN, EGRUCell, Threshold
from egru.runtime import EventEngine
from egru.trace import exponential_trace

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
    from egru.runs import pretrained

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
    "compress",
    "continuous",
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
    "training",
]


def __getattr__(name: str) -> Any:
    """Import submodules at first use, so that ``import egru`` loads only the layers and the engine."""
    if name == "pretrained":
        from egru.runs import pretrained

        return pretrained
    if name in __all__:
        return importlib.import_module(f"egru.{name}")
    raise AttributeError(f"module 'egru' has no attribute {name!r}")
