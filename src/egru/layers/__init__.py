"""Event-based recurrent layers, and tools to find and record them in a model."""

from egru.layers.egru import EGRU, EGRUCell
from egru.layers.elstm import ELSTM
from egru.layers.ernn import ERNN
from egru.layers.introspect import event_directions, event_layers, labelled_modules, record
from egru.layers.parameters import EventParameters
from egru.layers.stack import EventRNN
from egru.layers.structure import Direction, Record, Weights
from egru.layers.threshold import Threshold

__all__ = [
    "EGRU",
    "ELSTM",
    "ERNN",
    "Direction",
    "EGRUCell",
    "EventParameters",
    "EventRNN",
    "Record",
    "Threshold",
    "Weights",
    "event_directions",
    "event_layers",
    "labelled_modules",
    "record",
]
