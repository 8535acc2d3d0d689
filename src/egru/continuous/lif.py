"""Leaky integrate-and-fire neurons in continuous time: the event-based GRU with constant gates."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from egru.continuous import checks
from egru.continuous.inputs import InputEvents
from egru.continuous.module import ContinuousEGRU
from egru.continuous.outputs import ContinuousState
from egru.continuous.problem import Problem
from egru.layers.threshold import Threshold


class ContinuousLIF(ContinuousEGRU):
    r"""Leaky integrate-and-fire neurons with exponential synapses, with exact event times and exact gradients.

    The event-based GRU with constant gates ``u = r = 1``, the identity for ``z``, and events of amplitude 1 is this
    model. It is that of EventProp (Wunderlich and Pehle, Scientific Reports 2021), and so is the gradient. The current
    ``I`` and the membrane ``c`` of each neuron follow::

        tau_s dI/dt = -I + b                tau_m dc/dt = -c + I            tau_o do/dt = -o

        event of neuron n, c_n = theta_n:   c_n = 0,  o_n += 1,  I_m += V[m, n]
        input event on channel i, value w:  I += U[:, i] w

    With ``adaptation``, every event of a neuron raises its adaptation current ``w``, which lowers its input and decays.
    So the times between events grow until both balance::

        tau_a dw/dt = -w                    tau_m dc/dt = -c + I - w        event of neuron n:  w_n += adaptation_n

    This is spike-triggered adaptation, as in the adaptive exponential model (Brette and Gerstner, 2005) without
    subthreshold coupling. The other common form, a threshold that every event raises, needs as many exponentials. The
    current is preferred here because threshold and reset remain constant: a neuron emits events only while
    ``I - w > theta``. This is a constant and two exponentials, positive in at most two intervals of time. The membrane
    at their ends decides whether there is an event, so that none can be missed.

    Inputs, outputs and methods are those of :class:`ContinuousEGRU`. ``V``, ``U`` and ``b`` have one gate:
    ``(1, H, H)``, ``(1, H, D)`` and ``(1, H)``. In a state, the current is ``a[:, 2]`` and the adaptation current
    ``a[:, 0]``; other activations have no effect. Currents have no bound, and hence neither has the number of events:
    ``max_events`` is 1,000,000 unless given.

    Args:
        input_size: The number of input channels ``D``.
        hidden_size: The number of neurons ``H``.
        tau_s: Time constant of the currents: a number, or one per neuron ``(H,)``.
        tau_m: Time constant of the membranes, likewise. It may equal ``tau_s``.
        tau_o: Time constant of the output trace.
        threshold: Parametrisation and initial values of the thresholds, which must be positive. If None, they are 1
            and not trained.
        adaptation: What an event adds to the adaptation current of its neuron: a number, or one per neuron ``(H,)``.
            Negative values excite. If None, neurons do not adapt.
        tau_a: Time constant of the adaptation currents, required with ``adaptation``: a number, or one per neuron
            ``(H,)``. It may equal ``tau_s`` and ``tau_m``. With ``trainable_tau``, it is the fourth row of ``log_tau``.
        trainable_adaptation: Whether to learn ``adaptation``, which is then a parameter of that name.
        trainable_tau: Whether to learn the time constants, as the parameter ``log_tau``.
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
        >>> adaptive = ContinuousLIF(3, 1, start="rest", adaptation=0.5, tau_a=8.0, dtype=torch.float64)
        >>> _ = torch.nn.init.constant_(adaptive.b, 2.0)
        >>> none = InputEvents.from_lists([torch.zeros(0).double()], [torch.zeros(0).long()])
        >>> [f"{t:.2f}" for t in adaptive(none, horizon=8.0).times.diff()]  # the time between events grows
        ['1.05', '1.84', '3.05']
    """

    cell = "lif"
    gate_count = 1
    adaptation: Tensor | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        tau_s: float | Tensor = 1.0,
        tau_m: float | Tensor = 1.0,
        tau_o: float | Tensor = 1.0,
        *,
        threshold: Threshold | None = None,
        adaptation: float | Tensor | None = None,
        tau_a: float | Tensor | None = None,
        trainable_adaptation: bool = False,
        trainable_tau: bool = False,
        **options: Any,
    ) -> None:
        owner = type(self).__name__
        for name in ("reset_side", "amplitude"):
            if name in options:
                raise TypeError(f"{owner}: LIF neurons have no option {name!r}; remove it")
        if adaptation is None and (tau_a is not None or trainable_adaptation):
            name = "tau_a" if tau_a is not None else "trainable_adaptation"
            raise ValueError(f"{owner}: {name} requires adaptation, which is None")
        if adaptation is not None:
            self.cell = "alif"
        threshold = Threshold.constant(1.0) if threshold is None else threshold
        super().__init__(
            input_size,
            hidden_size,
            tau_s,
            tau_m,
            tau_o,
            trainable_tau=trainable_tau,
            threshold=threshold,
            amplitude="one",
            **options,
        )
        if adaptation is None:
            self.register_buffer("adaptation", None)
            return
        if tau_a is None:
            raise ValueError(f"{owner}: adaptation requires tau_a, the time constant of the adaptation current")
        constants = {"tau_s": tau_s, "tau_m": tau_m, "tau_o": tau_o, "tau_a": tau_a}
        self._set_time_constants(constants, trainable_tau)
        strength = checks.adaptation_strength(owner, adaptation, self.hidden_size).to(self.V)
        if trainable_adaptation:
            self.adaptation = nn.Parameter(strength)
        else:
            self.register_buffer("adaptation", strength)

    def _problem(self, events: InputEvents, horizons: Tensor, reads: Tensor, state: ContinuousState) -> Problem:
        problem = super()._problem(events, horizons, reads, state)
        if self.adaptation is None:
            return problem
        beta = self.adaptation.expand(self.hidden_size).contiguous()
        return dataclasses.replace(problem, beta=beta, tau_a=self.tau[3])

    def _all_gates(self, parameter: Tensor) -> Tensor:
        return torch.cat([parameter.new_zeros(2, *parameter.shape[1:]), parameter])
