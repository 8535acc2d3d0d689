"""Event-based recurrent layers."""

from egru.layers.egru import EGRU, EGRUCell
from egru.layers.others import ELSTM, ERNN
from egru.layers.stack import EventRNN, Record
from egru.layers.threshold import Threshold

__all__ = ["EGRU", "ELSTM", "ERNN", "EGRUCell", "EventRNN", "Record", "Threshold"]
