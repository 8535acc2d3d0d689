"""What every engine receives and returns: one layer, one batch, one interval of time.

The model of the paper (Subramoney et al., ICLR 2023, section 4.1; docs/concepts/continuous.md lists the corrections).
The gates ``x`` are u, r, z, in this order; unit ``n`` emits an event and units ``m`` receive it::

    between events      tau_s da_x/dt = -a_x + b_x        tau_m dc/dt = u (z - c)      tau_o do/dt = -o
                        u = sigmoid(a_u)   r = sigmoid(a_r)   z = tanh(a_z)
    input event         a_x += U_x[:, i] value
    internal event      c_n reaches theta_n from below:  c_n = 0,  o_n += y,
                        a_x[m] += V_x[m, n] rho_x y,  rho_u = rho_r = 1,  rho_z = r_n just before the event

Adaptation
    With ``cell="alif"``, units are leaky integrate-and-fire neurons (``u = r = 1``) whose activation ``a_u`` is an
    adaptation current. It has its own time constant, every event of the unit raises it, and it lowers ``z``::

        tau_a da_u/dt = -a_u + b_u        z = a_z - a_u        internal event of n:  a_u[n] += beta[n]

    ``a_u`` also jumps by ``V_u`` and ``U_u``, which are 0 in a layer. ``beta`` is not delayed.

Delays
    With :attr:`Problem.line_offsets`, an event of ``n`` at time ``s`` resets ``c_n`` and raises ``o_n`` at ``s``, and
    ``a_x[m]`` jumps at ``s + d``, where ``d`` is the delay of the line. ``rho_z`` is ``r_n`` at ``s``; with
    ``reset_side="post"`` it is ``r_m`` at ``s + d``. Jumps after the horizon have no effect.

Simultaneous events
    At the same time, internal events are applied first, then delayed ones, then input events, then readouts. Input
    events at the same time are applied in the order of the list. Their order affects only which one-sided derivative
    the time of each receives.

    Times closer than :data:`TIE` times the smallest ``tau_m`` count as equal. An internal event that close after an
    input event, a readout or the horizon is applied just before it. Internal events that close to one another form a
    group, which has the time of its first event:

    * They are applied in the order of their units. Every ``rho_z`` uses ``a_r`` from before the whole group.
    * The gradient is that of perturbations that keep the group together. The event of ``n`` divides by the slope
      ``dc_n/dt`` before the whole group, and ``dr_n/dt`` is evaluated there too. The contribution of ``rho_z`` to the
      adjoint of ``a_r`` is added before the group. The sum over ``m`` of ``p_c[m]`` times the jump of ``dc_m/dt``
      excludes members of the group that are applied after ``n``. Everything else is sequential.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from egru.continuous.options import EngineName, Options

U, R, Z = range(3)
"""Positions of the gates on the gate axis of ``V``, ``U``, ``b`` and ``a``."""

TIE = {torch.float64: 1e-13, torch.float32: 1e-6}
"""Events closer than this, in units of the smallest ``tau_m``, count as simultaneous."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of one run. All floating-point tensors have the same dtype and device.

    ``B`` is the batch size, ``H`` the number of units, ``D`` the number of input channels, ``K`` the total number of
    input events and ``R`` the number of readouts.

    Args:
        V: Recurrent weights ``(3, H, H)``, ``[gate, post, pre]``.
        U: Input weights ``(3, H, D)``.
        b: Biases ``(3, H)``.
        theta: Thresholds ``(H,)``.
        tau_s: Time constant of the activations: 0-dimensional, or one per unit ``(H,)``.
        tau_m: Time constant of the state, likewise.
        tau_o: Time constant of the output trace, likewise.
        a0: Initial activations ``(B, 3, H)``.
        c0: Initial states ``(B, H)``.
        input_times: Input event times ``(K,)`` of all samples, concatenated and sorted within each sample.
        input_channels: Input event channels ``(K,)``, int64.
        input_values: Input event values ``(K,)``.
        input_offsets: ``(B + 1,)``, int64. Sample ``s`` has the events ``input_offsets[s]:input_offsets[s + 1]``.
        readout_times: Readout times ``(R,)``, shared by all samples, or ``(B, R)``. They ascend and are at most
            ``horizon``.
        horizon: The end of the run, shared by all samples or ``(B,)``; it starts at time 0.
        options: Options of the model and of the integration.
        mask: Recurrent connections that exist, ``(H, H)`` bool, ``[post, pre]``. If None, all of them. Elsewhere ``V``
            counts as zero and so does its gradient.
        input_mask: Input connections that exist, ``(H, D)`` bool. If None, all of them.
        connections: Recurrent connections that exist, ``(2, E)`` int64: receivers, then emitters. They are sorted by
            emitter, then receiver, and ``V`` has the shape ``(3, E)``. If None, ``V`` is a matrix.
        input_connections: Input connections that exist, ``(2, E)`` int64: receivers, then channels. ``U`` likewise.
        channels: The number of input channels. Required with ``input_connections``.
        delays: Delays of events, one per line ``(L,)``, not negative. Empty: events reach their receivers at once.
        line_offsets: ``(H + 1,)`` int64, with delays. Unit ``n`` has the lines ``line_offsets[n]:line_offsets[n + 1]``.
            Each carries its events to some receivers. The last axis of ``V`` and ``mask``, and the sources of
            ``connections``, are then lines, and all entries of ``V`` count, whatever ``self_connections`` is.
        beta: What an event of a unit adds to its adaptation current ``(H,)``. Empty unless ``cell="alif"``.
        tau_a: Time constant of the adaptation currents: 0-dimensional, or one per unit ``(H,)``. Empty likewise.
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
    horizon: float | Tensor
    options: Options = dataclasses.field(default_factory=Options)
    mask: Tensor | None = None
    input_mask: Tensor | None = None
    connections: Tensor | None = None
    input_connections: Tensor | None = None
    channels: int | None = None
    delays: Tensor = dataclasses.field(default=None)  # pyright: ignore[reportAssignmentType]
    line_offsets: Tensor | None = None
    beta: Tensor = dataclasses.field(default=None)  # pyright: ignore[reportAssignmentType]
    tau_a: Tensor = dataclasses.field(default=None)  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        for name in ("delays", "beta", "tau_a"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.c0.new_zeros(0))

    def detached(self) -> "Problem":
        """Return the problem without gradients. This is called in every run and faster than ``dataclasses.replace``."""
        result = object.__new__(Problem)
        vars(result).update(vars(self))
        vars(result).update({name: getattr(self, name).detach() for name in DIFFERENTIABLE})
        return result

    @property
    def line_units(self) -> Tensor:
        """The unit of each line ``(L,)``, with delays."""
        assert self.line_offsets is not None
        units = torch.arange(len(self.line_offsets) - 1, device=self.line_offsets.device)
        return torch.repeat_interleave(units, self.line_offsets.diff())

    @property
    def channel_count(self) -> int:
        """The number of input channels."""
        return self.U.shape[2] if self.channels is None else self.channels

    def sum_shared(self, name: str, gradient: Tensor) -> Tensor:
        """Return the gradient of a time constant in its shape, given that of each unit ``(H,)``, or an empty one."""
        value = getattr(self, name)
        return gradient[: len(value)] if value.dim() else gradient.sum()

    @property
    def horizons(self) -> Tensor:
        """The horizon of each sample ``(B,)``, float64."""
        horizon = torch.as_tensor(self.horizon, dtype=torch.float64, device=self.c0.device)
        return horizon.detach().expand(len(self.c0))

    @property
    def longest_horizon(self) -> float:
        """The largest horizon."""
        return float(torch.as_tensor(self.horizon).max()) if len(self.c0) else 0.0

    @property
    def readouts(self) -> Tensor:
        """The readout times of each sample ``(B, R)``."""
        return self.readout_times.expand(len(self.c0), self.readout_times.shape[-1])

    def with_dense_weights(self) -> "Problem":
        """Return the problem with matrices ``V`` and ``U`` that are zero where there is no connection."""
        H = self.c0.shape[1]
        V = _matrix(self.V, self.mask, self.connections, (3, H, H if self.line_offsets is None else len(self.delays)))
        U = _matrix(self.U, self.input_mask, self.input_connections, (3, H, self.channel_count))
        return dataclasses.replace(self, V=V, U=U, connections=None, input_connections=None, channels=None)

    def weight_gradients(self, V: Tensor, U: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of ``V`` and ``U`` in their shapes, given those of :meth:`with_dense_weights`."""
        return _entries(V, self.mask, self.connections), _entries(U, self.input_mask, self.input_connections)


def _matrix(weights: Tensor, mask: Tensor | None, connections: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if connections is None:
        return weights if mask is None else weights * mask
    result = weights.new_zeros(shape)
    result[:, connections[0], connections[1]] = weights
    return result


def _entries(gradient: Tensor, mask: Tensor | None, connections: Tensor | None) -> Tensor:
    if connections is None:
        return gradient if mask is None else gradient * mask
    return gradient[:, connections[0], connections[1]]


RunningLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The integrand of an integral loss, in torch.

``running_loss(c, t, sample)`` receives states ``(N, H)``, times ``(N,)`` and sample indices ``(N,)`` and returns
``(N,)``. Its derivatives with respect to ``c`` and to tensors that it uses are computed by autograd.
"""


@dataclasses.dataclass
class Counters:
    """Statistics of one run, one entry per sample, ``(B,)``.

    Attributes:
        events: The number of internal events.
        root_solves: The number of threshold crossings that were solved for.
        flow_evaluations: The number of evaluations of the flow of one unit's ``c`` over one interval.
        min_slope: The smallest ``z - theta`` at an event, infinite if there are none. Forced events do not count. Near
            0 the unit barely reached its threshold and the gradient of the event is large.
        floored: The number of events whose ``z - theta`` the backward pass raised to ``grazing_floor``. None until the
            backward pass has run.
    """

    events: Tensor
    root_solves: Tensor
    flow_evaluations: Tensor
    min_slope: Tensor
    floored: Tensor | None = None


@dataclasses.dataclass
class Events:
    """Result of a forward pass. ``N`` is the total number of internal events.

    Attributes:
        times: Event times ``(N,)`` of all samples, concatenated.
        units: The unit of each event ``(N,)``.
        offsets: ``(B + 1,)``. Sample ``s`` has the events ``offsets[s]:offsets[s + 1]``.
        c_read: States at the readout times ``(B, R, H)``, after all events at these times.
        o_read: Output traces at the readout times ``(B, R, H)``.
        a_last: Activations at the horizon ``(B, 3, H)``.
        counters: Statistics of the run.
        tape: What the engine's backward pass needs.
        integral: The integral of the running loss ``(B,)``. None without a running loss. If values of the running loss
            require gradients, it is differentiable with respect to the tensors that they depend on.
    """

    times: Tensor
    units: Tensor
    offsets: Tensor
    c_read: Tensor
    o_read: Tensor
    a_last: Tensor
    counters: Counters
    tape: Any = None
    integral: Tensor | None = None


@dataclasses.dataclass
class Cotangents:
    """Gradients of the loss with respect to the outputs of a run. None means zero.

    Attributes:
        times: For the event times ``(N,)``.
        amplitudes: For the event amplitudes ``(N,)``.
        c_read: For the states at the readouts ``(B, R, H)``.
        o_read: For the traces at the readouts ``(B, R, H)``.
        a_last: For the activations at the horizon ``(B, 3, H)``.
        integral: For the integral of the running loss ``(B,)``.
    """

    times: Tensor
    amplitudes: Tensor
    c_read: Tensor
    o_read: Tensor
    a_last: Tensor | None = None
    integral: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients with respect to the tensors of a :class:`Problem`, and the number of floored events ``(B,)``."""

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
    delays: Tensor
    beta: Tensor
    tau_a: Tensor
    floored: Tensor


DIFFERENTIABLE: tuple[str, ...] = tuple(name for name in Gradients._fields if name != "floored")
"""Fields of a :class:`Problem` that have a gradient."""


class Engine(Protocol):
    """One implementation of the model. Engines are stateless."""

    name: EngineName

    def unsupported(self, problem: Problem, running_loss: RunningLoss | None = None) -> str | None:
        """Return why this engine cannot run ``problem``, or None if it can.

        Only options, dtypes, devices and shapes matter, not values.
        """
        ...

    def forward(self, problem: Problem, running_loss: RunningLoss | None = None) -> Events:
        """Run ``problem``, which has been validated.

        Raises:
            EventLimitError: If a sample emits more events than :func:`egru.continuous.limits.event_limit`.
        """
        ...

    def backward(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None = None
    ) -> Gradients:
        """Return the gradients, given the result of :meth:`forward` and its cotangents."""
        ...
