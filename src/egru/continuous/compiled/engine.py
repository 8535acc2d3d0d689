"""The Python side of the event-driven engine; the computation is in ``csrc/continuous``.

An event updates only the units it reaches, forward and backward. With ``problem.mask``, the cost of an event is that of
the emitter's connections, whatever the size of the network, and only these connections have a gradient. Without a mask
every weight has a gradient, including weights that are zero. With ``problem.connections`` there is no dense matrix.
"""

import functools

import torch
from torch import Tensor

from egru import compiled
from egru.continuous.compiled.integral import Integral
from egru.continuous.limits import MAX_LIF_EVENTS, limit_error, resolution_error
from egru.continuous.options import EngineName
from egru.continuous.problem import TIE, Cotangents, Counters, Events, Gradients, Problem, RunningLoss
from egru.continuous.quadrature import gauss_legendre

MAX_NODES = 32
"""The largest number of quadrature nodes that the C++ kernels have room for."""
MAX_PANEL = 20.0
"""The longest panel; beyond it exponentials could overflow. Accurate panels are far shorter."""
MAX_THREADS = 64
"""The size of the thread pool of the compiled core."""


class CompiledEngine:
    """The engine with an event queue in C++.

    It computes in float64: float32 problems are converted, and the results rounded. Samples are divided among threads;
    the results do not depend on the number of threads.
    """

    name: EngineName = "compiled"

    def unsupported(self, problem: Problem, running_loss: RunningLoss | None = None) -> str | None:
        if compiled.core is None:
            return compiled.missing
        if problem.c0.device.type != "cpu":
            return f"it requires CPU tensors, got {problem.c0.device}"
        if problem.c0.dtype not in (torch.float32, torch.float64):
            return f"it supports float64 and float32, got {problem.c0.dtype}"
        if not 1 <= problem.options.nodes <= MAX_NODES:
            return f"it supports 1 to {MAX_NODES} nodes, got {problem.options.nodes}"
        if problem.options.panel > MAX_PANEL:
            return f"it supports panels up to {MAX_PANEL:g}, got {problem.options.panel:g}"
        if 0 in problem.c0.shape:
            return f"it requires at least one sample and one unit, got c0 of shape {tuple(problem.c0.shape)}"
        return None

    def forward(self, problem: Problem, running_loss: RunningLoss | None = None) -> Events:
        core = compiled.require()
        call = _Call(problem)
        call.raw.integrate = running_loss is not None
        B, H = problem.c0.shape
        read_shape = (B, problem.readout_times.shape[-1], H)
        c_read, o_read, a_last, min_slope = _floats(read_shape), _floats(read_shape), _floats((B, 3, H)), _floats((B,))
        events, root_solves, flow_evaluations = _ints((3, B)).unbind()
        call.set_tensors(
            c_read=c_read,
            o_read=o_read,
            a_last=a_last,
            event_counts=events,
            root_solves=root_solves,
            flow_evaluations=flow_evaluations,
            min_slope=min_slope,
        )
        try:
            tape = core.continuous_forward(call.raw)
        except OverflowError as error:
            raise limit_error(problem, *error.args) from None
        except ArithmeticError as error:
            raise resolution_error(*error.args) from None
        count = tape.event_count
        times, units, offsets = _floats((count,)), _ints((count,)), _ints((B + 1,))
        tape.copy_events(times.data_ptr(), units.data_ptr(), offsets.data_ptr())
        call.release()
        integral = None
        if running_loss is not None:
            integral = Integral(tape, problem, running_loss, times, units, events)
        if problem.c0.dtype != torch.float64:
            times, c_read, o_read, a_last, min_slope = (
                x.to(problem.c0.dtype) for x in (times, c_read, o_read, a_last, min_slope)
            )
        return Events(
            times=times,
            units=units,
            offsets=offsets,
            c_read=c_read,
            o_read=o_read,
            counters=Counters(events, root_solves, flow_evaluations, min_slope),
            tape=(tape, integral, call),
            a_last=a_last,
            integral=None if integral is None else integral.value,
        )

    def backward(
        self, problem: Problem, events: Events, cotangents: Cotangents, running_loss: RunningLoss | None = None
    ) -> Gradients:
        core = compiled.require()
        tape, integral, call = events.tape
        by_time, by_node = cotangents.times, None
        if integral is not None and running_loss is not None and cotangents.integral is not None:
            by_node, by_event = integral.cotangents(running_loss, cotangents.integral)
            by_time = by_time + by_event
        call.set_tensors(
            cotangent_times=by_time,
            cotangent_nodes=by_node,
            cotangent_amplitudes=cotangents.amplitudes,
            cotangent_c_read=cotangents.c_read,
            cotangent_o_read=cotangents.o_read,
            cotangent_a_last=cotangents.a_last,
        )
        # With a mask, the core writes only the gradients of existing connections.
        gradients = {
            "V": (_floats if problem.mask is None else _zeros)(problem.V.shape),
            "U": (_floats if problem.input_mask is None else _zeros)(problem.U.shape),
        }
        gradients |= {name: _floats(getattr(problem, name).shape) for name in _DENSE_GRADIENTS}
        per_unit = problem.theta.shape if has_unit_taus(problem) else ()
        gradients |= {name: _floats(per_unit) for name in TAUS}
        adaptation = problem.theta.shape if problem.options.adaptive else (0,)
        gradients |= {name: _floats(adaptation) for name in ("beta", "tau_a")}
        floored = _ints(problem.c0.shape[:1])
        call.set_tensors(**{f"grad_{name}": value for name, value in gradients.items()}, floored=floored)
        core.continuous_backward(call.raw, tape)
        for name in TAUS if per_unit else ():
            gradients[name] = problem.sum_shared(name, gradients[name])
        gradients["tau_a"] = problem.sum_shared("tau_a", gradients["tau_a"])
        call.release()
        if problem.c0.dtype != torch.float64:
            gradients = {name: value.to(problem.c0.dtype) for name, value in gradients.items()}
        return Gradients(**gradients, floored=floored)


_DENSE_GRADIENTS = ("b", "theta", "a0", "c0", "input_times", "input_values", "delays")
"""Fields whose gradient is written in full, with or without a mask."""
TAUS = ("tau_s", "tau_m", "tau_o")


def has_unit_taus(problem: Problem) -> bool:
    """Return whether a time constant differs between units."""
    return any(getattr(problem, name).dim() for name in TAUS)


def _floats(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


def _zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _ints(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


@functools.cache
def _rule_addresses(nodes: int) -> tuple[int, ...]:
    return tuple(array.ctypes.data for array in gauss_legendre(nodes))  # cached, so the arrays stay alive


class _Call:
    """A ``ContinuousCall`` of the core, and references that keep the tensors it points to alive."""

    def __init__(self, problem: Problem) -> None:
        options = problem.options
        self._alive: list[Tensor] = []
        self._kept = 0
        self.raw = raw = compiled.require().ContinuousCall()
        raw.batch, raw.units = problem.c0.shape
        raw.channels, raw.readouts = problem.channel_count, problem.readout_times.shape[-1]
        raw.nodes = options.nodes
        raw.checkpoint_every = options.checkpoint_every or 0
        if problem.connections is not None:
            raw.connection_count = problem.connections.shape[1]
        if problem.input_connections is not None:
            raw.input_connection_count = problem.input_connections.shape[1]
        raw.threads = min(torch.get_num_threads(), MAX_THREADS)
        raw.max_events = options.max_events or (MAX_LIF_EVENTS if options.linear else 2**62)
        if has_unit_taus(problem):
            taus = torch.stack([getattr(problem, name).expand_as(problem.theta) for name in TAUS])
            self.set_tensors(taus=taus)
            smallest = float(problem.tau_m.min())
        else:
            raw.tau_s, raw.tau_m, raw.tau_o = float(problem.tau_s), float(problem.tau_m), float(problem.tau_o)
            smallest = raw.tau_m
        raw.panel, raw.grazing_floor = options.panel, options.grazing_floor
        raw.tie = TIE[torch.float64] * smallest
        raw.linear = options.linear
        if options.adaptive:
            self.set_tensors(beta=problem.beta, tau_a=problem.tau_a.expand_as(problem.theta))
        raw.self_connections = options.self_connections
        raw.receiver_reset = options.reset_side == "post"
        raw.unit_amplitude = options.amplitude == "one"
        if problem.line_offsets is not None:
            raw.lines = len(problem.delays)
            lines = {"line_offsets": problem.line_offsets, "line_units": problem.line_units, "delays": problem.delays}
            self.set_tensors(**lines)
        self.set_tensors(
            V=problem.V,
            U=problem.U,
            b=problem.b,
            theta=problem.theta,
            a0=problem.a0,
            c0=problem.c0,
            mask=problem.mask,
            input_mask=problem.input_mask,
            connections=problem.connections,
            input_connections=problem.input_connections,
            input_times=problem.input_times,
            input_channels=problem.input_channels,
            input_values=problem.input_values,
            input_offsets=problem.input_offsets,
            horizons=problem.horizons,
            readout_times=problem.readouts,
        )
        raw.rule_x, raw.rule_w, raw.rule_A = _rule_addresses(options.nodes)
        self.keep()

    def keep(self) -> None:
        """Keep the tensors set so far for the backward pass."""
        self._kept = len(self._alive)

    def release(self) -> None:
        """Release tensors that were set after :meth:`keep`."""
        del self._alive[self._kept :]

    def set_tensors(self, **tensors: Tensor | None) -> None:
        """Set fields to the addresses of tensors, as contiguous float64, int64 or bool; 0 if None or empty."""
        for name, value in tensors.items():
            if value is None or value.numel() == 0:
                setattr(self.raw, name, 0)
                continue
            if value.dtype == torch.float32:
                value = value.double()
            if not value.is_contiguous():
                value = value.contiguous()
            self._alive.append(value)
            setattr(self.raw, name, value.data_ptr())
