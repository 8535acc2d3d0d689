"""Leaky integrate-and-fire neurons in continuous time: the event-based GRU with constant gates."""

from typing import Any

import torch
from torch import Tensor

from egru.continuous.module import ContinuousEGRU
from egru.continuous.options import Cell
from egru.layers.threshold import Threshold


class ContinuousLIF(ContinuousEGRU):
    r"""Leaky integrate-and-fire neurons with exponential synapses, with exact event times and exact gradients.

    The event-based GRU with constant gates ``u = r = 1``, the identity for ``z``, and events of amplitude 1 is this
    model. It is that of EventProp (Wunderlich and Pehle, Scientific Reports 2021), and so is the gradient. The current
    ``I`` and the membrane ``c`` of each neuron follow::

        tau_s dI/dt = -I + b                tau_m dc/dt = -c + I            tau_o do/dt = -o

        event of neuron n, c_n = theta_n:   c_n = 0,  o_n += 1,  I_m += V[m, n]
        input event on channel i, value w:  I += U[:, i] w

    A negative self connection (``self_connections=True``) is an adaptation current with the time constant ``tau_s``:
    every event of the neuron lowers its own current.

    Inputs, outputs and methods are those of :class:`ContinuousEGRU`. ``V``, ``U`` and ``b`` have one gate:
    ``(1, H, H)``, ``(1, H, D)`` and ``(1, H)``. In a state, the current is ``a[:, 2]``; the other activations have no
    effect. Currents have no bound, and hence neither has the number of events: ``max_events`` is 1,000,000 unless
    given.

    Args:
        input_size: The number of input channels ``D``.
        hidden_size: The number of neurons ``H``.
        tau_s: Time constant of the currents: a number, or one per neuron ``(H,)``.
        tau_m: Time constant of the membranes, likewise. It may equal ``tau_s``.
        tau_o: Time constant of the output trace.
        threshold: Parametrisation and initial values of the thresholds, which must be positive. If None, they are 1
            and not trained.
        **options: Other arguments of :class:`ContinuousEGRU`, except ``reset_side`` and ``amplitude``.

    Raises:
        TypeError: If an argument has the wrong type or is not an option of LIF neurons.
        ValueError: If an argument has an invalid value.

    Example:
        >>> from egru.continuous import ContinuousLIF, InputEvents
        >>> events = InputEvents.from_lists([torch.tensor([0.3, 1.7])], [torch.tensor([0, 2])])
        >>> layer = ContinuousLIF(3, 32, tau_s=0.5, tau_m=1.0)
        >>> layer(events, horizon=4.0).first_times().shape
        torch.Size([1, 32])
    """

    cell: Cell = "lif"
    gate_count = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        tau_s: float | Tensor = 1.0,
        tau_m: float | Tensor = 1.0,
        tau_o: float | Tensor = 1.0,
        *,
        threshold: Threshold | None = None,
        **options: Any,
    ) -> None:
        for name in ("reset_side", "amplitude"):
            if name in options:
                raise TypeError(f"{type(self).__name__}: LIF neurons have no option {name!r}; remove it")
        threshold = Threshold.constant(1.0) if threshold is None else threshold
        super().__init__(input_size, hidden_size, tau_s, tau_m, tau_o, threshold=threshold, amplitude="one", **options)

    def _all_gates(self, parameter: Tensor) -> Tensor:
        return torch.cat([parameter.new_zeros(2, *parameter.shape[1:]), parameter])
