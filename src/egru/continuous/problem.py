"""What every engine of the continuous-time model receives and returns: one batch, one layer, one stretch of time.

The model (gates ``x`` are u, r, z in this order; ``n`` emits, ``m`` receives)::

    between events      tau_s da_x/dt = -a_x + b_x        tau_m dc/dt = u (z - c)      tau_o do/dt = -o
                        u = sigmoid(a_u)   r = sigmoid(a_r)   z = tanh(a_z)
    input event         a_x += U_x[:, i] value
    internal event      c_n reaches theta_n from below:  c_n = 0,  o_n += y,
                        a_x[m] += V_x[m, n] rho_x y,  rho_u = rho_r = 1,  rho_z = r_n just before the event

What happens at one instant, in this order: internal events, input events, readouts. Input events of one instant are
applied in the order of the list; that order changes nothing but which of its one-sided derivatives the time of each
receives. Instants closer than :data:`TIE` times ``tau_m`` are one: an internal event that would come so shortly after
an input event, a readout or the horizon happens just before it, and internal events that close to one another are one
group, which carries the time of the first:

* They are applied in the order of their units, with every ``rho_z`` taken from ``a_r`` before the whole group.
* The gradient is that of perturbations which keep the group together. The event of ``n`` divides by the slope
  ``dc_n/dt`` before the whole group; ``dr_n/dt`` is taken there too, and what ``rho_z`` passes to ``a_r`` is added to
  the adjoint there, when the backward pass has left the group; the sum over ``m`` of ``p_c[m]`` times the change of
  ``dc_m/dt`` leaves out members of the group that fire after ``n``. All else is sequential.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

GATES = ("u", "r", "z")

TIE = {torch.float64: 1e-13, torch.float32: 1e-6}
"""Events closer than this, in units of ``tau_m``, happen at the same instant."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices of the model and of its numerics.

    Args:
        self_connections: whether an event of ``n`` also reaches ``n`` through the diagonal of ``V``.
        reset_side: ``rho_z`` is the reset gate of the emitter, "pre", or of each receiver, "post".
        amplitude: what an event carries: "theta" or "one".
        above_threshold: a state that starts at or above its threshold is refused, "raise", or, "fire", emits at once
            if ``z > theta`` (its time is then fixed, so that no gradient flows through it) and else decays silently.
        max_events: of one sample; more are an error. None takes the bound no network can exceed.
        grazing_floor: the least ``z - theta`` the backward pass divides by; 0 is exact.
        nodes, panel: Gauss-Legendre nodes of a panel, and the longest panel in units of the fastest rate.
    """

    self_connections: bool = False
    reset_side: str = "pre"
    amplitude: str = "theta"
    above_threshold: str = "raise"
    max_events: int | None = None
    grazing_floor: float = 1e-3
    nodes: int = 6
    panel: float = 0.5


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of one run; floating tensors share one type and device.

    ``V`` is ``(3, H, H)``, ``[gate][post, pre]``; ``U`` is ``(3, H, D)``; ``b`` is ``(3, H)``; ``theta`` is ``(H,)``;
    the time constants are 0-dim; ``a0`` is ``(B, 3, H)``; ``c0`` is ``(B, H)``. Input events of all samples are
    concatenated, sorted in time within each: ``input_times``, ``input_channels`` (int64) and ``input_values`` of
    shape ``(K,)``, those of sample ``s`` at ``input_offsets[s]:input_offsets[s + 1]``, ``(B + 1,)`` int64.
    ``readout_times`` is ``(R,)``, ascending, shared by the batch, none past ``horizon``.

    ``mask``, ``(H, H)`` bool ``[post, pre]``, and ``input_mask``, ``(H, D)``, name the connections there are, None all.
    ``V`` and ``U`` are taken as zero elsewhere, and so are their gradients.
    """

    V: Tensor
    U: Tensor
    b: Tensor
    theta: Tensor
    tau_s: Tensor
    tau_m: Tensor
    tau_o: Tensor
    a0: Tensor
    c0: Tensor
    input_times: Tensor
    input_channels: Tensor
    input_values: Tensor
    input_offsets: Tensor
    readout_times: Tensor
    horizon: float
    options: Options = Options()
    mask: Tensor | None = None
    input_mask: Tensor | None = None

    def connected(self) -> "Problem":
        """The problem with weights of 0 where there is no connection."""
        return dataclasses.replace(self, V=only(self.mask, self.V), U=only(self.input_mask, self.U))


def only(mask: Tensor | None, weights: Tensor) -> Tensor:
    """``weights`` where there is a connection, 0 elsewhere."""
    return weights if mask is None else weights * mask


RunningLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The density of an integral loss: ``density(c, t, sample)`` with ``c`` of shape ``(N, H)``, ``t`` and the index of
the sample of shape ``(N,)`` gives ``(N,)``. Written in torch; its derivative by ``c`` is taken by autograd."""


@dataclasses.dataclass
class Counters:
    """What one run did, per sample, ``(B,)``.

    ``events`` internal events; ``root_solves`` threshold crossings searched for; ``flow_evaluations`` evaluations of
    the flow of one unit's ``c`` over one stretch; ``min_slope`` the least ``z - theta`` at an event that was not
    forced, infinite without events: near 0 an event hardly happened, and its gradient is large. ``floored`` events
    whose ``z - theta`` the backward pass raised to ``grazing_floor``: None before it has run.
    """

    events: Tensor
    root_solves: Tensor
    flow_evaluations: Tensor
    min_slope: Tensor
    floored: Tensor | None = None


@dataclasses.dataclass
class Events:
    """Result of a run: internal events of all samples concatenated, ``times`` and ``units`` of shape ``(N,)``, those of
    sample ``s`` at ``offsets[s]:offsets[s + 1]``; ``c_read`` and the trace ``o_read``, ``(B, R, H)``, after all that
    happens at their instants; ``tape`` is the engine's own.

    ``a_last``, ``(B, 3, H)``, is ``a`` at the horizon, None from an engine that does not keep it. ``integral``,
    ``(B,)``, is that of the running loss, None without one.
    """

    times: Tensor
    units: Tensor
    offsets: Tensor
    c_read: Tensor
    o_read: Tensor
    counters: Counters
    tape: Any = None
    a_last: Tensor | None = None
    integral: Tensor | None = None


@dataclasses.dataclass
class Cotangents:
    """Derivatives of the loss by the outputs: event times and amplitudes ``(N,)``, readouts ``(B, R, H)``; None for
    ``a_last`` and ``integral`` stands for zero."""

    times: Tensor
    amplitudes: Tensor
    c_read: Tensor
    o_read: Tensor
    a_last: Tensor | None = None
    integral: Tensor | None = None


class Gradients(NamedTuple):
    """Derivatives of the loss by the tensors of a :class:`Problem`, and the number of floored events, ``(B,)``."""

    V: Tensor
    U: Tensor
    b: Tensor
    theta: Tensor
    tau_s: Tensor
    tau_m: Tensor
    tau_o: Tensor
    a0: Tensor
    c0: Tensor
    input_times: Tensor
    input_values: Tensor
    floored: Tensor


DIFFERENTIABLE = Gradients._fields[:-1]
"""Fields of a :class:`Problem` that have a gradient."""


class Engine(Protocol):
    """One implementation of the model."""

    name: str

    def unsupported(self, problem: Problem, running_loss: RunningLoss | None = None) -> str | None:
        """Why this engine cannot run ``problem``, or None if it can. Looks at options, types and devices only."""
        ...

    def forward(self, problem: Problem, running_loss: RunningLoss | None = None) -> Events:
        """Run it. ``problem`` has been checked."""
        ...

    def backward(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None = None
    ) -> Gradients:
        """Gradients, given the result of :meth:`forward` and what the loss asks of it."""
        ...


class EventLimitError(RuntimeError):
    """A sample emitted more events than allowed."""


def event_cap(theta: Tensor, tau_m: float, horizon: float) -> Tensor:
    """The most events one sample can emit: units refire after ``tau_m log(1 / (1 - theta))`` at the earliest."""
    theta = theta.detach().double()
    pause = -tau_m * torch.log1p(-theta.clamp(max=1.0))
    return torch.where(theta < 1, 1 + horizon / pause, 0.0).sum()


def event_limit(problem: Problem) -> int:
    """The most events of one sample before a run is stopped."""
    cap = min(float(event_cap(problem.theta, float(problem.tau_m), problem.horizon)), 2.0**62)
    own = problem.options.max_events
    return int(cap) if own is None else min(own, int(cap))


def limit_error(problem: Problem, sample: int, time: float) -> EventLimitError:
    """What an engine raises when sample ``sample`` goes past :func:`event_limit` at ``time``."""
    own, limit = problem.options.max_events, event_limit(problem)
    why = f"max_events={own}" if own is not None and own <= limit else "the bound of the refractory times"
    return EventLimitError(
        f"sample {sample} emitted more than {limit} events ({why}) by time {time:g} of {problem.horizon:g}; "
        "weaken recurrent excitation, raise thresholds or max_events, or shorten the horizon"
    )
