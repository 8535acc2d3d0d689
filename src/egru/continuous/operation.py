"""A run of any engine as one differentiable operation."""

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
    """Outputs of a run, attached to the graph; see :class:`egru.continuous.problem.Events`."""

    times: Tensor
    units: Tensor
    amplitudes: Tensor
    offsets: Tensor
    c_read: Tensor
    o_read: Tensor
    a_last: Tensor | None
    integral: Tensor | None
    counters: Counters


def _below(c: Tensor, theta: Tensor) -> Tensor:
    """Engines compute in double precision: a state below its threshold may round to it, and must not stay there."""
    return torch.where(c == theta, torch.nextafter(theta, torch.zeros_like(theta)), c)


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
        # Outputs are copies: what the context keeps must not hold the graph that holds the context.
        outputs = events.times, _amplitudes(problem, events), _below(events.c_read, problem.theta), events.o_read
        optional = (None if x is None else x.clone() for x in (events.a_last, events.integral))
        return *(x.clone() for x in outputs), *optional, events

    @staticmethod
    @refuse_double_backward
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        engine, problem, running_loss, events = ctx.call
        _ = ctx.saved_tensors  # refuses if one of them was changed in place, which the problem's own views would not
        times, amplitudes, c_read, o_read, a_last, integral = grads[:6]

        def dense(grad: Tensor | None, like: Tensor) -> Tensor:
            return torch.zeros_like(like) if grad is None else grad.contiguous()

        cotangents = Cotangents(
            dense(times, events.times),
            dense(amplitudes, events.times),
            dense(c_read, events.c_read),
            dense(o_read, events.o_read),
            a_last,
            integral,
        )
        with torch.autocast(problem.c0.device.type, enabled=False):
            gradients = engine.backward(problem, events, cotangents, running_loss)
        events.counters.floored = gradients.floored
        return None, None, None, *gradients[:-1]


def run(engine: Engine, problem: Problem, running_loss: RunningLoss | None = None) -> Run:
    """Run ``problem`` on ``engine``; gradients flow to every tensor of :data:`DIFFERENTIABLE`."""
    tensors = {name: getattr(problem, name) for name in DIFFERENTIABLE}
    problem = dataclasses.replace(problem, **{name: tensor.detach() for name, tensor in tensors.items()})
    times, amplitudes, c_read, o_read, a_last, integral, events = _Operation.apply(
        engine, problem, running_loss, *tensors.values()
    )  # pyright: ignore[reportGeneralTypeIssues]
    return Run(times, events.units, amplitudes, events.offsets, c_read, o_read, a_last, integral, events.counters)


def _amplitudes(problem: Problem, events: Events) -> Tensor:
    if problem.options.amplitude == "one":
        return torch.ones_like(events.times)
    return problem.theta[events.units]
