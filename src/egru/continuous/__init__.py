"""The event-based GRU in continuous time: exact event times, exact gradients."""

from egru.continuous.inputs import InputEvents
from egru.continuous.module import ContinuousEGRU, ContinuousOutput, ContinuousStack, ContinuousState
from egru.continuous.problem import EventLimitError

__all__ = [
    "ContinuousEGRU",
    "ContinuousOutput",
    "ContinuousStack",
    "ContinuousState",
    "EventLimitError",
    "InputEvents",
]
