"""A run of any engine as one differentiable torch operation."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egru._autograd import refuse_double_backward
from egru.continuous.problem import (
    DIFFERENTIABLE,
    Cotangents,
    Counters,
    Engine,
    Events,
    Problem,
    RunningLoss,
)


class Run(NamedTuple):
    """Differentiable outputs of a run; the fields are those of :class:`egru.continuous.problem.Events`."""

    times: Tensor
    units: Tensor
    amplitudes: Tensor
    offsets: Tensor
    c_read: Tensor
    o_read: Tensor
    a_last: Tensor
    integral: Tensor | None
    counters: Counters


def run(engine: Engine, problem: Problem, running_loss: RunningLoss | None = None) -> Run:
    """Run ``problem`` on ``engine``. Gradients flow to every field in :data:`DIFFERENTIABLE`."""
    tensors = {name: getattr(problem, name) for name in DIFFERENTIABLE}
    problem = dataclasses.replace(problem, **{name: tensor.detach() for name, tensor in tensors.items()})
    times, amplitudes, c_read, o_read, a_last, integral, events = _Operation.apply(
        engine, problem, running_loss, *tensors.values()
    )  # pyright: ignore[reportGeneralTypeIssues]
    return Run(times, events.units, amplitudes, events.offsets, c_read, o_read, a_last, integral, events.counters)


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Engine, problem: Problem, running_loss: RunningLoss | None, *tensors: Tensor
    ) -> tuple[Any, ...]:
        with torch.autocast(problem.c0.device.type, enabled=False):
            events = engine.forward(problem, running_loss)
        if not any(ctx.needs_input_grad):
            events.tape = None
        ctx.save_for_backward(*tensors)
        ctx.call = engine, problem, running_loss, events
        ctx.set_materialize_grads(False)
        # Return copies. The outputs refer to the graph and the graph to this context, so keeping the outputs
        # themselves in the context would create a reference cycle.
        c_read = _below(events.c_read, problem.theta)
        outputs = events.times, _amplitudes(problem, events), c_read, events.o_read, events.a_last
        integral = None if events.integral is None else events.integral.clone()
        return *(x.clone() for x in outputs), integral, events

    @staticmethod
    @refuse_double_backward
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        times: Tensor | None,
        amplitudes: Tensor | None,
        c_read: Tensor | None,
        o_read: Tensor | None,
        a_last: Tensor | None,
        integral: Tensor | None,
        _events: None,
    ) -> tuple[Any, ...]:
        engine, problem, running_loss, events = ctx.call
        # Accessing the saved tensors raises if one was modified in place, which the detached problem cannot detect.
        _ = ctx.saved_tensors

        def dense(grad: Tensor | None, like: Tensor) -> Tensor:
            return torch.zeros_like(like) if grad is None else grad.contiguous()

        cotangents = Cotangents(
            times=dense(times, events.times),
            amplitudes=dense(amplitudes, events.times),
            c_read=dense(c_read, events.c_read),
            o_read=dense(o_read, events.o_read),
            a_last=a_last,
            integral=integral,
        )
        with torch.autocast(problem.c0.device.type, enabled=False):
            gradients = engine.backward(problem, events, cotangents, running_loss)
        events.counters.floored = gradients.floored
        return None, None, None, *(getattr(gradients, name) for name in DIFFERENTIABLE)


def _amplitudes(problem: Problem, events: Events) -> Tensor:
    if problem.options.amplitude == "one":
        return torch.ones_like(events.times)
    return problem.theta[events.units]


def _below(c: Tensor, theta: Tensor) -> Tensor:
    """Move states equal to their threshold just below it.

    Engines may compute in float64, and a state below its threshold may then round to it. As the initial state of the
    next call it would be rejected.
    """
    return torch.where(c == theta, torch.nextafter(theta, torch.zeros_like(theta)), c)
