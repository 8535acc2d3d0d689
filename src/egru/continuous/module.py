"""The continuous-time event-based GRU as a torch module, and stacks of it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from egru.continuous import checks, engines
from egru.continuous.inputs import InputEvents
from egru.continuous.operation import run
from egru.continuous.problem import Counters, Options, Problem, RunningLoss
from egru.layers.checks import choice, instance, positive_int, same_dtype_and_device
from egru.layers.threshold import Threshold


class ContinuousState(NamedTuple):
    """What a layer carries from one stretch of time to the next.

    ``a`` is ``(B, 3, H)``, ``c`` and ``trace`` are ``(B, H)``.
    """

    a: Tensor
    c: Tensor
    trace: Tensor


class ContinuousOutput(NamedTuple):
    """What a layer did in one stretch of time.

    Internal events of all samples are concatenated, ``(N,)``, those of sample ``s`` at ``offsets[s]:offsets[s + 1]``;
    ``c`` and ``trace``, ``(B, R, H)``, are read at the readout times; ``state`` is that at the horizon, None from an
    engine that does not keep it. All floating tensors are differentiable. ``integral``, ``(B,)``, is that of the
    running loss, None without one.
    """

    times: Tensor
    units: Tensor
    amplitudes: Tensor
    offsets: Tensor
    c: Tensor
    trace: Tensor
    state: ContinuousState | None
    counters: Counters
    integral: Tensor | None = None

    def as_input(self) -> InputEvents:
        """These events as input of a further layer."""
        return InputEvents(self.times, self.units, self.amplitudes, self.offsets)

    @property
    def samples(self) -> Tensor:
        """The sample of every event, ``(N,)``."""
        batch = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        return torch.repeat_interleave(batch, self.offsets.diff())


class ContinuousEGRU(nn.Module):
    r"""Event-based GRU in continuous time: exact event times, exact gradients.

    Between events every unit relaxes on its own; at an event, sent when ``c`` reaches ``theta`` from below, the emitter
    is reset and its receivers' activations jump (``m`` receives from ``n``, gates ``x`` in u, r, z)::

        tau_s da_x/dt = -a_x + b_x     u = sigmoid(a_u)  r = sigmoid(a_r)  z = tanh(a_z)
        tau_m dc/dt = u (z - c)        at c_n = theta_n:  c_n = 0,  a_x[m] += V_x[m, n] rho_x theta_n
        input event i of value w:      a_x += U_x[:, i] w          rho_u = rho_r = 1,  rho_z = r_n

    Gradients with respect to ``V``, ``U``, ``b``, the thresholds, the time constants, the initial state, and the times
    and values of input events are those of the exact trajectory, by its adjoint: nothing is discretised or smoothed.
    They do not see events that appear or vanish.

    Args:
        input_size, hidden_size: channels and units.
        tau_s, tau_m, tau_o: time constants of the activations, of the state, and of the output trace.
        trainable_tau: learn all three, as ``log_tau``.
        self_connections: an event also reaches its own unit through the diagonal of ``V``.
        reset_side: the reset gate that scales ``V_z`` is the emitter's, "pre" (paper), or each receiver's, "post".
        amplitude: events carry "theta" (paper) or "one".
        bias_sign: "+" or "-"; the paper prints ``-b``, its code has ``+b``.
        start: where activations start without a state: at "zero" or at "rest", their biases.
        mask, input_mask: the connections there are, bool, ``(H, H)`` ``[post, pre]`` and ``(H, D)``; None is all of
            them. Elsewhere ``V`` and ``U`` do not act and do not learn, and the compiled engine does not visit them.
        threshold: parametrisation and start of the thresholds, which must come out above 0.
        above_threshold: what happens to a carried state at or above its threshold: "raise", or "fire" at once.
        max_events: of one sample in one call, above which it raises; None takes the bound no network can exceed.
        grazing_floor: gradients of events divide by ``z - theta``, or by this where it is less; 0 is exact.
        nodes, panel: of the quadrature; None takes 6 nodes in float64 and 4 in float32, 0.5 in units of the fastest
            rate: about 1e-12 and 1e-8.
        engine: "auto", or one of ``egru.continuous.engines.names()``.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        tau_s: float = 1.0,
        tau_m: float = 1.0,
        tau_o: float = 1.0,
        *,
        trainable_tau: bool = False,
        self_connections: bool = False,
        reset_side: str = "pre",
        amplitude: str = "theta",
        bias_sign: str = "+",
        start: str = "zero",
        mask: Tensor | None = None,
        input_mask: Tensor | None = None,
        threshold: Threshold | None = None,
        above_threshold: str = "raise",
        max_events: int | None = None,
        grazing_floor: float = 1e-3,
        nodes: int | None = None,
        panel: float | None = None,
        engine: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        me = type(self).__name__
        self.input_size = positive_int(me, "input_size", input_size)
        self.hidden_size = positive_int(me, "hidden_size", hidden_size)
        self.bias_sign = choice(me, "bias_sign", bias_sign, ("+", "-"))
        self.start = choice(me, "start", start, ("zero", "rest"))
        self.engine = choice(me, "engine", engine, engines.names())
        self.threshold_kind = instance(me, "threshold", threshold or Threshold(mean=-1.0, std=0.25), Threshold)
        if isinstance(grazing_floor, bool) or not isinstance(grazing_floor, int | float) or not 0 <= grazing_floor < 1:
            raise ValueError(f"{me}: grazing_floor must be a number, 0 <= floor < 1; got {grazing_floor!r}")
        self.options = {
            "self_connections": bool(self_connections),
            "reset_side": choice(me, "reset_side", reset_side, ("pre", "post")),
            "amplitude": choice(me, "amplitude", amplitude, ("theta", "one")),
            "above_threshold": choice(me, "above_threshold", above_threshold, ("raise", "fire")),
            "max_events": None if max_events is None else positive_int(me, "max_events", max_events),
            "grazing_floor": float(grazing_floor),
        }
        self.nodes = None if nodes is None else positive_int(me, "nodes", nodes)
        self.panel = 0.5 if panel is None else checks.positive(me, "panel", panel)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        H, D = self.hidden_size, self.input_size
        self.V, self.U, self.b = parameter(3, H, H), parameter(3, H, D), parameter(3, H)
        self.mask: Tensor | None
        self.input_mask: Tensor | None
        self.register_buffer("mask", checks.connections(me, "mask", mask, (H, H), device))
        self.register_buffer("input_mask", checks.connections(me, "input_mask", input_mask, (H, D), device))
        self.threshold = parameter(self.threshold_kind.size(H))
        self.threshold.requires_grad_(self.threshold_kind.trainable)
        taus = [checks.positive(me, n, t) for n, t in (("tau_s", tau_s), ("tau_m", tau_m), ("tau_o", tau_o))]
        self.log_tau: Tensor | None
        self.fixed_tau: Tensor | None
        like = {"device": device, "dtype": dtype or torch.get_default_dtype()}
        if trainable_tau:
            self.log_tau = nn.Parameter(torch.tensor([math.log(t) for t in taus], **like))
            self.register_buffer("fixed_tau", None)
        else:
            self.register_parameter("log_tau", None)
            self.register_buffer("fixed_tau", torch.tensor(taus, **like))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Input weights of size 1, because one event must move its receivers alone; recurrent ones of 1 over the root
        of ``hidden_size``; biases 0, so that nothing fires without input."""
        self.V.normal_(0.0, self.hidden_size**-0.5)
        self.U.normal_(0.0, 1.0)
        self.b.zero_()
        self.threshold_kind.initialise_(self.threshold)

    def thresholds(self) -> Tensor:
        """The thresholds in force, ``(H,)``."""
        return self.threshold_kind.constrain(self.threshold, self.hidden_size)

    @property
    def tau(self) -> Tensor:
        """``tau_s``, ``tau_m``, ``tau_o``, ``(3,)``."""
        if self.log_tau is not None:
            return self.log_tau.exp()
        assert self.fixed_tau is not None
        return self.fixed_tau

    def initial_state(self, batch: int) -> ContinuousState:
        """The state a call without one starts from."""
        zero = self.V.new_zeros(batch, self.hidden_size)
        bias = (self.b if self.bias_sign == "+" else -self.b).expand(batch, -1, -1)
        return ContinuousState(bias if self.start == "rest" else self.V.new_zeros(bias.shape), zero, zero)

    def forward(
        self,
        input: InputEvents,
        horizon: float,
        readout_times: Tensor | Sequence[float] | None = None,
        state: ContinuousState | None = None,
        *,
        running_loss: RunningLoss | None = None,
    ) -> ContinuousOutput:
        """Run from time 0 to ``horizon``.

        Args:
            input: events, at most at ``horizon``.
            readout_times: ``(R,)``, ascending, shared by the batch: when ``c`` and the trace are read, after all that
                happens at that instant.
            state: of an earlier stretch; times of this one count from its end.
            running_loss: ``density(c, t, sample)`` whose integral over time is wanted, with ``c`` of shape ``(N, H)``,
                ``t`` and ``sample`` ``(N,)``; the result has no gradient to what else ``density`` depends on.
        """
        me = type(self).__name__
        like = self.V
        checks.positive(me, "horizon", horizon)
        rounded = float(torch.tensor(horizon, dtype=like.dtype))  # times of that type must not round past it
        horizon = checks.positive(me, f"horizon in {like.dtype}", rounded)
        events = checks.input_events(me, input, self.input_size, horizon, like)
        reads = checks.readout_times(me, readout_times, horizon, like)
        if running_loss is not None and not callable(running_loss):
            raise TypeError(f"{me}: running_loss must be a function of (c, t, sample), got {running_loss!r}")
        B = events.batch
        state = self.initial_state(B) if state is None else self._checked(state, B)
        tau_s, tau_m, tau_o = self.tau.unbind()
        problem = Problem(
            V=self.V,
            U=self.U,
            b=self.b if self.bias_sign == "+" else -self.b,
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
            readout_times=torch.cat([reads, reads.new_tensor([horizon])]),
            horizon=horizon,
            options=Options(nodes=self._nodes(like), panel=self.panel, **self.options),  # pyright: ignore
            mask=self.mask,
            input_mask=self.input_mask,
        )
        checks.problem(me, problem)
        result = run(engines.choose(self.engine, problem, running_loss), problem, running_loss)
        # The engines' trace starts at 0; what was carried in decays on top of it.
        left = torch.exp(-problem.readout_times / tau_o)[:, None] * state.trace[:, None]
        trace = result.o_read + left
        last = None
        if result.a_last is not None:
            last = ContinuousState(result.a_last, result.c_read[:, -1], trace[:, -1])
        return ContinuousOutput(
            result.times,
            result.units,
            result.amplitudes,
            result.offsets,
            result.c_read[:, :-1],
            trace[:, :-1],
            last,
            result.counters,
            result.integral,
        )

    def _nodes(self, like: Tensor) -> int:
        return self.nodes or (6 if like.dtype == torch.float64 else 4)

    def _checked(self, state: ContinuousState, batch: int) -> ContinuousState:
        me, H = type(self).__name__, self.hidden_size
        if not isinstance(state, tuple) or len(state) != 3:
            raise TypeError(f"{me}: state must be ContinuousState(a, c, trace), got {type(state).__name__}")
        for name, value, shape in zip(state._fields, state, ((batch, 3, H), (batch, H), (batch, H)), strict=True):
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{me}: state.{name} must be a tensor of shape {shape}, got {got}")
            same_dtype_and_device(me, f"state.{name}", value, self.V)
        if not bool(torch.isfinite(state.trace).all()):
            raise ValueError(f"{me}: all of state.trace must be finite")
        return state

    def extra_repr(self) -> str:
        taus = ", ".join(f"{t:g}" for t in self.tau.tolist())
        return f"{self.input_size}, {self.hidden_size}, tau=({taus}), engine={self.engine!r}"


class ContinuousStack(nn.Module):
    """Layers one above another: the events of each, times, units and amplitudes, are the input of the next.

    ``outputs = stack(input, horizon, readout_times)`` gives one :class:`ContinuousOutput` per layer, the last being the
    stack's own; gradients pass down through event times and amplitudes.
    """

    def __init__(self, *layers: ContinuousEGRU) -> None:
        super().__init__()
        if not layers:
            raise ValueError("ContinuousStack: at least one layer is needed, got none")
        for k, layer in enumerate(layers):
            if not isinstance(layer, ContinuousEGRU):
                raise TypeError(f"ContinuousStack: layer {k} must be a ContinuousEGRU, got {type(layer).__name__}")
            if k and layer.input_size != layers[k - 1].hidden_size:
                raise ValueError(
                    f"ContinuousStack: layer {k} has input_size {layer.input_size}, "
                    f"the layer below {layers[k - 1].hidden_size} units; they must be equal"
                )
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        input: InputEvents,
        horizon: float,
        readout_times: Tensor | Sequence[float] | None = None,
        states: Sequence[ContinuousState] | None = None,
        *,
        running_loss: RunningLoss | None = None,
    ) -> tuple[ContinuousOutput, ...]:
        """As in :class:`ContinuousEGRU`; ``states`` are those of the layers, the running loss that of the last."""
        if states is not None and len(states) != len(self.layers):
            raise ValueError(f"ContinuousStack: states must be one per layer, {len(self.layers)}; got {len(states)}")
        outputs: list[ContinuousOutput] = []
        for k, layer in enumerate(self.layers):
            last = k == len(self.layers) - 1
            output = layer(
                input,
                horizon,
                readout_times,
                None if states is None else states[k],
                running_loss=running_loss if last else None,
            )
            outputs.append(output)
            input = output.as_input()
        return tuple(outputs)
