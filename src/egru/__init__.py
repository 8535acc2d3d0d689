"""Event-based recurrent networks: layers that compute, and cost, only where something happens."""

from egru import activity, compress, continuous, data, functional, kernels, models, report, training
from egru.activity import ActivityLoss, ActivityMonitor
from egru.events import EventState, Surrogate, register_surrogate
from egru.layers import EGRU, ELSTM, ERNN, EGRUCell, Threshold
from egru.runs.trained import pretrained
from egru.runtime import EventEngine
from egru.trace import exponential_trace

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
    "models",
    "pretrained",
    "register_surrogate",
    "report",
    "training",
]
