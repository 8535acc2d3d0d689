"""The lazy engine on the compiled core: work only for the units an event reaches, forward and backward.

Where ``problem.mask`` names the connections, an event costs as much as its emitter has receivers, however large the
network; gradients exist at those connections alone. Without a mask every weight has its gradient, zeros included.
"""

import torch
from torch import Tensor

from egru import compiled
from egru.continuous.problem import (
    TIE,
    Cotangents,
    Counters,
    Events,
    Gradients,
    Problem,
    RunningLoss,
    event_limit,
    limit_error,
)
from egru.continuous.quadrature import gauss_legendre

MAX_NODES = 32
"""Of the quadrature, as the core is built."""
MAX_PANEL = 20.0
"""Far beyond anything accurate; exponentials of it must not overflow."""


class CompiledEngine:
    """Event queue in C++, float64 (float32 is widened and the results rounded), samples divided among threads."""

    name = "compiled"

    def unsupported(self, problem: Problem, running_loss: RunningLoss | None = None) -> str | None:
        if compiled.core is None:
            return compiled.missing
        if problem.c0.device.type != "cpu":
            return f"it runs on the CPU, the problem is on {problem.c0.device}"
        if problem.c0.dtype not in (torch.float32, torch.float64):
            return f"it knows float32 and float64, not {problem.c0.dtype}"
        if running_loss is not None:
            return "it knows no running loss: between events it does not look at all units at once"
        if not 1 <= problem.options.nodes <= MAX_NODES:
            return f"it knows 1 to {MAX_NODES} nodes, not {problem.options.nodes}"
        if problem.options.panel > MAX_PANEL:
            return f"it knows panels up to {MAX_PANEL:g}, not {problem.options.panel:g}"
        if 0 in problem.c0.shape:
            return f"it needs at least one sample and unit, c0 has shape {tuple(problem.c0.shape)}"
        return None

    def forward(self, problem: Problem, running_loss: RunningLoss | None = None) -> Events:
        core = compiled.require()
        call = _Call(problem)
        B, H = problem.c0.shape
        reads = (B, len(problem.readout_times), H)
        out = {"c_read": _empty(reads), "o_read": _empty(reads), "a_last": _empty((B, 3, H))}
        call.set(**out)
        try:
            tape = core.continuous_forward(call.raw)
        except OverflowError as error:
            raise limit_error(problem, *error.args) from None
        times, units = _empty((tape.events,)), torch.empty(tape.events, dtype=torch.int64)
        tape.events_to(times.data_ptr(), units.data_ptr())
        counted, solves, evaluations, min_slope = zip(*tape.counters(), strict=True)
        events = torch.tensor(counted)
        dtype = problem.c0.dtype
        return Events(
            times=times.to(dtype),
            units=units,
            offsets=torch.cat([events.new_zeros(1), events.cumsum(0)]),
            c_read=out["c_read"].to(dtype),
            o_read=out["o_read"].to(dtype),
            counters=Counters(
                events, torch.tensor(solves), torch.tensor(evaluations), torch.tensor(min_slope, dtype=dtype)
            ),
            tape=tape,
            a_last=out["a_last"].to(dtype),
        )

    def backward(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None = None
    ) -> Gradients:
        core = compiled.require()
        call = _Call(problem)
        call.set(
            by_time=cotangents.times,
            by_amplitude=cotangents.amplitudes,
            by_c_read=cotangents.c_read,
            by_o_read=cotangents.o_read,
            by_a_last=cotangents.a_last,
        )
        B, _ = problem.c0.shape
        make = torch.zeros if problem.mask is not None else torch.empty
        grads = {
            "V": make(problem.V.shape, dtype=torch.float64),
            "U": (torch.zeros if problem.input_mask is not None else torch.empty)(problem.U.shape, dtype=torch.float64),
            "tau": _empty((3,)),
            **{name: _empty(getattr(problem, name).shape) for name in ("b", "theta", "a0", "c0")},
            **{name: _empty(getattr(problem, name).shape) for name in ("input_times", "input_values")},
        }
        floored = torch.empty(B, dtype=torch.int64)
        call.set(**{f"grad_{name}": value for name, value in grads.items()}, floored=floored)
        core.continuous_backward(call.raw, events.tape)
        grads = {name: value.to(problem.c0.dtype) for name, value in grads.items()}
        tau_s, tau_m, tau_o = grads.pop("tau").unbind()
        return Gradients(**grads, tau_s=tau_s, tau_m=tau_m, tau_o=tau_o, floored=floored)


def _empty(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


class _Call:
    """A ``ContinuousCall`` of the core, and the tensors whose addresses it holds."""

    def __init__(self, problem: Problem) -> None:
        options = problem.options
        self._alive: list[Tensor] = []
        self.raw = raw = compiled.require().ContinuousCall()
        raw.batch, raw.units = problem.c0.shape
        raw.channels, raw.readouts, raw.nodes = problem.U.shape[2], len(problem.readout_times), options.nodes
        raw.threads = min(torch.get_num_threads(), 64)
        raw.limit = event_limit(problem)
        raw.tau_s, raw.tau_m, raw.tau_o = float(problem.tau_s), float(problem.tau_m), float(problem.tau_o)
        raw.horizon, raw.panel, raw.floor = problem.horizon, options.panel, options.grazing_floor
        raw.tie = TIE[torch.float64] * raw.tau_m
        raw.self_connections = options.self_connections
        raw.receiver = options.reset_side == "post"
        raw.unit_amplitude = options.amplitude == "one"
        floats = ("V", "U", "b", "theta", "a0", "c0", "input_times", "input_values", "readout_times")
        self.set(**{name: getattr(problem, name) for name in floats})
        self.set(input_channels=problem.input_channels, input_offsets=problem.input_offsets)
        self.set(mask=problem.mask, input_mask=problem.input_mask)
        self.set(**{name: torch.from_numpy(value) for name, value in gauss_legendre(options.nodes)._asdict().items()})

    def set(self, **tensors: Tensor | None) -> None:
        """Addresses of tensors, float64, int64 or bool and contiguous; an absent or empty one is 0."""
        for name, value in tensors.items():
            if value is None or value.numel() == 0:
                setattr(self.raw, name, 0)
                continue
            value = value.detach()
            value = (value.double() if value.is_floating_point() else value).contiguous()
            self._alive.append(value)
            setattr(self.raw, name, value.data_ptr())
