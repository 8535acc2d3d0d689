"""The event-based GRU in continuous time, with exact event times and exact gradients.

:class:`ContinuousEGRU` is the layer, :class:`ContinuousLIF` the same with leaky integrate-and-fire neurons,
:class:`ContinuousStack` a stack of layers, and :class:`InputEvents` holds their input. :func:`first_time_loss`,
:func:`membrane_loss`, :func:`silence_penalty` and :func:`rate_penalty` are losses on their output, and
:func:`calibrate_activity` initialises a layer for a wanted activity. One of three engines does the computation, one
folder per engine: :mod:`~egru.continuous.compiled`, :mod:`~egru.continuous.lockstep` and
:mod:`~egru.continuous.reference`. See docs/concepts/continuous.md.
"""

from egru.continuous.calibration import calibrate_activity
from egru.continuous.inputs import InputEvents
from egru.continuous.lif import ContinuousLIF
from egru.continuous.limits import EventLimitError
from egru.continuous.losses import first_time_loss, membrane_loss, rate_penalty, silence_penalty
from egru.continuous.module import ContinuousEGRU
from egru.continuous.outputs import ContinuousOutput, ContinuousState, PaddedEvents
from egru.continuous.readout import ContinuousReadout
from egru.continuous.stack import ContinuousStack

__all__ = [
    "ContinuousEGRU",
    "ContinuousLIF",
    "ContinuousOutput",
    "ContinuousReadout",
    "ContinuousStack",
    "ContinuousState",
    "EventLimitError",
    "InputEvents",
    "PaddedEvents",
    "calibrate_activity",
    "first_time_loss",
    "membrane_loss",
    "rate_penalty",
    "silence_penalty",
]
