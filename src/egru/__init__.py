"""Event-based recurrent networks: layers that compute, and cost, only where something happens."""

from egru import functional, kernels
from egru.events import EventState, Surrogate, register_surrogate
from egru.layers import EGRU, ELSTM, ERNN, EGRUCell, Threshold
from egru.runtime import EventEngine

__all__ = [
    "EGRU",
    "ELSTM",
    "ERNN",
    "EGRUCell",
    "EventEngine",
    "EventState",
    "Surrogate",
    "Threshold",
    "functional",
    "kernels",
    "register_surrogate",
]
