"""The continuous-time event-based GRU as a torch module."""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from egru._autograd import in_transform
from egru.continuous import checks, engines
from egru.continuous.delays import make_delays, with_delays
from egru.continuous.inputs import InputEvents
from egru.continuous.operation import run
from egru.continuous.options import (
    ABOVE_THRESHOLD,
    AMPLITUDES,
    BIAS_SIGNS,
    ENGINE_NAMES,
    RESET_SIDES,
    STARTS,
    AboveThreshold,
    Amplitude,
    BiasSign,
    Cell,
    EngineName,
    Options,
    ResetSide,
    Start,
)
from egru.continuous.outputs import ContinuousOutput, ContinuousState
from egru.continuous.problem import Problem, RunningLoss
from egru.layers.checks import choice, instance, positive_int, same_dtype_and_device
from egru.layers.threshold import Threshold


@functools.lru_cache
def _with_nodes(options: Options, nodes: int) -> Options:
    return dataclasses.replace(options, nodes=nodes)


class ContinuousEGRU(nn.Module):
    r"""Event-based GRU in continuous time, with exact event times and exact gradients.

    Between events every unit evolves independently. When the state ``c`` of unit ``n`` reaches its threshold from
    below, the unit emits an event: its state is reset and the activations of the receiving units ``m`` jump. For the
    gates ``x`` in u, r, z::

        tau_s da_x/dt = -a_x + b_x          u = sigmoid(a_u)   r = sigmoid(a_r)   z = tanh(a_z)
        tau_m dc/dt = u (z - c)             tau_o do/dt = -o

        event of unit n, c_n = theta_n:     c_n = 0,  o_n += theta_n,  a_x[m] += V_x[m, n] rho_x theta_n
                                            rho_u = rho_r = 1,  rho_z = r_n
        input event on channel i, value w:  a_x += U_x[:, i] w

    This is the model of Subramoney et al. (ICLR 2023), section 4.1, with the corrections listed in
    docs/concepts/continuous.md.

    The gradients are those of the exact trajectory, computed by the adjoint method; nothing is discretised or
    smoothed. They exist for ``V``, ``U``, ``b``, the thresholds, the time constants, the initial state, and the times
    and values of input events. They do not account for events that appear or vanish.

    Args:
        input_size: The number of input channels ``D``.
        hidden_size: The number of units ``H``.
        tau_s: Time constant of the activations: a number, or one per unit ``(H,)``.
        tau_m: Time constant of the state, likewise.
        tau_o: Time constant of the output trace, likewise.
        trainable_tau: Whether to learn the time constants, as the parameter ``log_tau``: ``(3,)``, or ``(3, H)`` if one
            of them is given per unit.
        self_connections: Whether an event also reaches the unit that emits it, through the diagonal of ``V``.
        reset_side: Whose reset gate scales ``V_z``: the emitter's, "pre" (paper), or each receiver's, "post".
        amplitude: The value that events carry: "theta" (paper) or "one".
        bias_sign: The sign of ``b`` in the equations. The paper prints "-", its code uses "+".
        start: Where the activations start if no state is passed: at "zero", or at "rest", their biases.
        mask: Recurrent connections that exist, ``(H, H)`` bool, ``[post, pre]``. If None, all of them. Other entries
            of ``V`` have no effect and no gradient, and cost nothing in the compiled engine.
        input_mask: Input connections that exist, ``(H, D)`` bool. If None, all of them.
        connections: Recurrent connections that exist, ``(2, E)`` int64: the receivers, then the emitters. ``V`` then
            has the shape ``(3, E)`` and no matrix is stored. The layer sorts them by emitter, then receiver: the
            attribute ``connections`` has the order of ``V``. The engines other than the compiled one create the matrix
            in every call. Excludes ``mask``.
        input_connections: Input connections that exist, ``(2, E)`` int64: the receivers, then the channels. ``U``
            likewise. Excludes ``input_mask``.
        delays: How long an event takes to its receivers: a number, one per emitter ``(H,)``, or one per connection
            ``(H, H)``, ``[post, pre]``. Not negative. If None, events arrive at once. Arrivals after the horizon are
            lost, so a layer with delays accepts no ``state``.
        input_delays: The same for input events: a number, ``(D,)`` or ``(H, D)``.
        trainable_delays: Whether to learn the delays, which must then be positive.
        threshold: Parametrisation and initial values of the thresholds, which must be positive. If None, a sigmoid
            with mean -1 and standard deviation 0.25 before the sigmoid.
        above_threshold: What happens to a state passed in that is at or above its threshold: "raise" raises an error,
            "fire" emits an event at time 0.
        max_events: The maximum number of events per sample and call. If None, the bound that no network can exceed.
        grazing_floor: Lower bound on ``z - theta``, by which the gradient of an event is divided; 0 is exact.
        nodes: Quadrature nodes per panel. If None, 6 in float64 and 4 in float32, with errors of about 1e-12 and 1e-8.
        panel: The longest panel, in units of the fastest rate. If None, 0.5.
        checkpoint_every: The number of steps (events, input events and readouts of a sample) between two checkpoints.
            The backward pass repeats the steps between them, with the same results. Memory falls from all steps to the
            checkpoints and the steps between two of them; the backward pass takes as long as both passes. If None,
            every step is stored. Requires the compiled engine.
        engine: "auto", "compiled", "lockstep" or "reference". "auto" selects the fastest that supports the call.
        device: The device of the parameters.
        dtype: The dtype of the parameters, float64 or float32.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an invalid value.

    Example:
        >>> events = InputEvents.from_lists([torch.tensor([0.3, 1.7])], [torch.tensor([0, 2])])
        >>> layer = ContinuousEGRU(3, 32, tau_o=2.0)
        >>> output = layer(events, horizon=4.0, readout_times=[2.0, 4.0])
        >>> output.trace.shape
        torch.Size([1, 2, 32])
        >>> output.trace.sum().backward()
    """

    cell: Cell = "gru"
    gate_count = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        tau_s: float | Tensor = 1.0,
        tau_m: float | Tensor = 1.0,
        tau_o: float | Tensor = 1.0,
        *,
        trainable_tau: bool = False,
        self_connections: bool = False,
        reset_side: ResetSide = "pre",
        amplitude: Amplitude = "theta",
        bias_sign: BiasSign = "+",
        start: Start = "zero",
        mask: Tensor | None = None,
        input_mask: Tensor | None = None,
        connections: Tensor | None = None,
        input_connections: Tensor | None = None,
        delays: float | Tensor | None = None,
        input_delays: float | Tensor | None = None,
        trainable_delays: bool = False,
        threshold: Threshold | None = None,
        above_threshold: AboveThreshold = "raise",
        max_events: int | None = None,
        grazing_floor: float = 1e-3,
        nodes: int | None = None,
        panel: float | None = None,
        checkpoint_every: int | None = None,
        engine: EngineName = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        self.input_size = positive_int(owner, "input_size", input_size)
        self.hidden_size = positive_int(owner, "hidden_size", hidden_size)
        self.bias_sign = choice(owner, "bias_sign", bias_sign, BIAS_SIGNS)
        self.start = choice(owner, "start", start, STARTS)
        self.engine: EngineName = choice(owner, "engine", engine, ENGINE_NAMES)
        self.threshold_kind = instance(owner, "threshold", threshold or Threshold(mean=-1.0, std=0.25), Threshold)
        if isinstance(grazing_floor, bool) or not isinstance(grazing_floor, int | float) or not 0 <= grazing_floor < 1:
            raise ValueError(f"{owner}: grazing_floor must be a number from 0 to below 1, got {grazing_floor!r}")
        self.nodes = None if nodes is None else positive_int(owner, "nodes", nodes)
        self.options = Options(
            cell=self.cell,
            self_connections=bool(self_connections),
            reset_side=choice(owner, "reset_side", reset_side, RESET_SIDES),
            amplitude=choice(owner, "amplitude", amplitude, AMPLITUDES),
            above_threshold=choice(owner, "above_threshold", above_threshold, ABOVE_THRESHOLD),
            max_events=None if max_events is None else positive_int(owner, "max_events", max_events),
            grazing_floor=float(grazing_floor),
            panel=0.5 if panel is None else checks.positive_number(owner, "panel", panel),
            checkpoint_every=(
                None if checkpoint_every is None else positive_int(owner, "checkpoint_every", checkpoint_every)
            ),
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        H, D, gates = self.hidden_size, self.input_size, self.gate_count
        self.connections: Tensor | None
        self.input_connections: Tensor | None
        for name, other, value, sources in (
            ("connections", mask, connections, H),
            ("input_connections", input_mask, input_connections, D),
        ):
            if value is not None and other is not None:
                raise ValueError(f"{owner}: {name} and {name.replace('connections', 'mask')} exclude each other")
            self.register_buffer(name, checks.connection_list(owner, name, value, H, sources, device))
        recurrent, inputs = self.connections, self.input_connections
        self.V = parameter(gates, H, H) if recurrent is None else parameter(gates, recurrent.shape[1])
        self.U = parameter(gates, H, D) if inputs is None else parameter(gates, inputs.shape[1])
        self.b = parameter(gates, H)
        self.delays = make_delays(owner, "delays", delays, H, H, recurrent is None, trainable_delays, self.V)
        self.input_delays = make_delays(
            owner, "input_delays", input_delays, H, D, inputs is None, trainable_delays, self.V
        )
        self.mask: Tensor | None
        self.input_mask: Tensor | None
        self.register_buffer("mask", checks.connection_mask(owner, "mask", mask, (H, H), device))
        self.register_buffer("input_mask", checks.connection_mask(owner, "input_mask", input_mask, (H, D), device))
        self.threshold = parameter(self.threshold_kind.size(H))
        self.threshold.requires_grad_(self.threshold_kind.trainable)
        self._set_time_constants({"tau_s": tau_s, "tau_m": tau_m, "tau_o": tau_o}, trainable_tau)
        self.reset_parameters()

    def _set_time_constants(self, constants: dict[str, float | Tensor], trainable: bool) -> None:
        owner, like = type(self).__name__, self.V
        taus = (checks.time_constant(owner, name, tau, self.hidden_size) for name, tau in constants.items())
        taus = torch.stack(torch.broadcast_tensors(*taus))
        self.log_tau: Tensor | None
        self.fixed_tau: Tensor | None
        if trainable:
            self.log_tau = nn.Parameter(taus.log().to(like.device, like.dtype))
            self.register_buffer("fixed_tau", None)
        else:
            self.register_parameter("log_tau", None)
            self.register_buffer("fixed_tau", taus.to(like.device, like.dtype))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters.

        Input weights have standard deviation 1, so that a single event moves its receivers. Recurrent weights have
        ``hidden_size**-0.5``; with ``connections``, ``n**-0.5`` for a mean of ``n`` connections per unit. Biases are 0,
        so that no unit emits events without input.
        """
        fan_in = self.hidden_size if self.connections is None else max(1.0, self.V.shape[1] / self.hidden_size)
        self.V.normal_(0.0, fan_in**-0.5)
        self.U.normal_(0.0, 1.0)
        self.b.zero_()
        self.threshold_kind.initialise_(self.threshold)

    def thresholds(self) -> Tensor:
        """Return the thresholds ``(H,)``."""
        return self.threshold_kind.constrain(self.threshold, self.hidden_size)

    @property
    def tau(self) -> Tensor:
        """The time constants ``tau_s``, ``tau_m`` and ``tau_o``: ``(3,)``, or ``(3, H)`` with one per unit."""
        if self.log_tau is not None:
            return self.log_tau.exp()
        assert self.fixed_tau is not None
        return self.fixed_tau

    def initial_state(self, batch: int) -> ContinuousState:
        """Return the state that a call without ``state`` starts from."""
        like = self.V
        zero = like.new_zeros(batch, self.hidden_size)
        if self.start == "rest":
            return ContinuousState(self._signed_bias().expand(batch, -1, -1), zero, zero)
        return ContinuousState(like.new_zeros(batch, 3, self.hidden_size), zero, zero)

    def forward(
        self,
        input: InputEvents,
        horizon: float | Tensor,
        readout_times: Tensor | Sequence[float] | None = None,
        state: ContinuousState | None = None,
        *,
        running_loss: RunningLoss | None = None,
    ) -> ContinuousOutput:
        """Run the layer from time 0 to ``horizon``.

        Args:
            input: Input events, at times from 0 to ``horizon``.
            horizon: The end of the run: a number, or one per sample, ``(B,)``.
            readout_times: When states and traces are read: ``(R,)``, shared by all samples, or ``(B, R)``. Times ascend
                and may repeat, so that rows with fewer readouts can be padded with the horizon. At the same time,
                internal events come first, then input events, then readouts. If None, there are no readouts.
            state: The state to start from, for example that of an earlier output. Times count from 0 in every call.
                If None, :meth:`initial_state`.
            running_loss: An integrand ``running_loss(c, t, sample)``; the output contains its integral from 0 to
                ``horizon``. It receives ``c`` of shape ``(N, H)`` and ``t`` and ``sample`` of shape ``(N,)``, and
                returns ``(N,)``. Tensors that it uses, such as the weights of a module, receive gradients.

        Returns:
            The events, the readouts and the final state.

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument has an invalid value, or the selected engine does not support the call.
            EventLimitError: If a sample emits more than ``max_events`` events, or events that float64 times cannot
                distinguish.
            RuntimeError: If a ``torch.func`` transform or forward-mode differentiation is active.
        """
        owner = type(self).__name__
        if in_transform():
            raise RuntimeError(
                f"{owner}: torch.func transforms and forward-mode differentiation are not supported; use "
                "torch.autograd.grad or backward, and pass a batch of input events instead of using vmap"
            )
        like = self.V
        horizons = checks.horizons(owner, horizon, input, like)
        events = checks.input_events(owner, input, self.input_size, horizons, like)
        reads = checks.readout_times(owner, readout_times, horizons, like)
        if running_loss is not None and not callable(running_loss):
            raise TypeError(f"{owner}: running_loss must be a function of (c, t, sample), got {running_loss!r}")
        if state is not None and (self.delays is not None or self.input_delays is not None):
            raise ValueError(
                f"{owner}: state cannot be passed to a layer with delays, because events on their way are not part of "
                "it; run the whole interval in one call"
            )
        start = self.initial_state(events.batch) if state is None else self._check_state(state, events.batch)
        problem = self._problem(events, horizons, reads, start)
        checks.check_problem(owner, problem)
        if self.delays is not None or self.input_delays is not None:
            problem = with_delays(
                problem,
                None if self.delays is None else self.delays(),
                None if self.input_delays is None else self.input_delays(),
            )
        result = run(engines.choose(self.engine, problem, running_loss), problem, running_loss)
        trace = result.o_read
        if state is not None:  # in the engines the trace starts at 0: add the decaying trace of the initial state
            trace = trace + torch.exp(-problem.readout_times[..., None] / problem.tau_o) * state.trace[:, None]
        (c, last_c), (trace, last_trace) = (x.split([x.shape[1] - 1, 1], 1) for x in (result.c_read, trace))
        return ContinuousOutput(
            times=result.times,
            units=result.units,
            amplitudes=result.amplitudes,
            offsets=result.offsets,
            c=c,
            trace=trace,
            state=ContinuousState(result.a_last, last_c[:, 0], last_trace[:, 0]),
            horizon=horizons,
            counters=result.counters,
            integral=result.integral,
        )

    def _problem(self, events: InputEvents, horizons: Tensor, reads: Tensor, state: ContinuousState) -> Problem:
        """Return the engines' problem. It has one more readout, at the horizon, for the final state."""
        tau_s, tau_m, tau_o = self.tau[:3].unbind()
        nodes = self.nodes or (6 if self.V.dtype == torch.float64 else 4)
        return Problem(
            V=self._all_gates(self.V),
            U=self._all_gates(self.U),
            b=self._signed_bias(),
            theta=self.thresholds().contiguous(),
            tau_s=tau_s,
            tau_m=tau_m,
            tau_o=tau_o,
            a0=state.a.contiguous(),
            c0=state.c.contiguous(),
            input_times=events.times,
            input_channels=events.channels,
            input_values=events.values,
            input_offsets=events.offsets,
            readout_times=torch.cat([reads, horizons[:, None]], 1) if reads.shape[1] else horizons[:, None],
            horizon=horizons,
            options=_with_nodes(self.options, nodes),
            mask=self.mask,
            input_mask=self.input_mask,
            connections=self.connections,
            input_connections=self.input_connections,
            channels=self.input_size,
        )

    def _signed_bias(self) -> Tensor:
        return self._all_gates(self.b if self.bias_sign == "+" else -self.b)

    def _all_gates(self, parameter: Tensor) -> Tensor:
        """Return a parameter with an entry for each of the three gates of the engines."""
        return parameter

    def _check_state(self, state: ContinuousState, batch: int) -> ContinuousState:
        owner, H = type(self).__name__, self.hidden_size
        if not isinstance(state, tuple) or len(state) != 3:
            raise TypeError(f"{owner}: state must be ContinuousState(a, c, trace), got {type(state).__name__}")
        shapes = ((batch, 3, H), (batch, H), (batch, H))
        for name, value, shape in zip(ContinuousState._fields, state, shapes, strict=True):
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{owner}: state.{name} must be a tensor of shape {shape}, got {got}")
            same_dtype_and_device(owner, f"state.{name}", value, self.V)
        if not bool(torch.isfinite(state.trace).all()):
            raise ValueError(f"{owner}: state.trace must be finite")
        return state

    def extra_repr(self) -> str:
        taus = ", ".join(f"{t:g}" if t.dim() == 0 else f"{t.min():g} to {t.max():g}" for t in self.tau)
        return f"{self.input_size}, {self.hidden_size}, tau=({taus}), engine={self.engine!r}"
