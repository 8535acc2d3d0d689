"""A run of any engine as one differentiable torch operation."""

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
    """Run ``problem`` on ``engine``.

    Gradients flow to every field in :data:`DIFFERENTIABLE`, and to tensors that ``running_loss`` uses.
    """
    tensors = {name: getattr(problem, name) for name in DIFFERENTIABLE}
    problem = problem.detached()
    if running_loss is not None:
        running_loss = _checked(running_loss, torch.is_grad_enabled())
    if running_loss is None and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())):
        with torch.no_grad(), torch.autocast(problem.c0.device.type, enabled=False):
            events = engine.forward(problem)
        events.tape = None
        c_read, amplitudes = _below(events.c_read, problem.theta), _amplitudes(problem, events)
        return Run(
            events.times, events.units, amplitudes, events.offsets, c_read, events.o_read, events.a_last, None,
            events.counters,
        )  # fmt: skip
    times, amplitudes, c_read, o_read, a_last, integral, events = _Operation.apply(
        engine, problem, running_loss, *tensors.values()
    )  # pyright: ignore[reportGeneralTypeIssues]
    if integral is not None and events.integral.requires_grad:
        integral = _Integral.apply(integral, events.integral, *tensors.values())
        events.integral = None  # release the graph with the output
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
        integral = None if events.integral is None else events.integral.detach().clone()
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


class _Integral(torch.autograd.Function):
    """The integral of the running loss, which depends on its state and on the weights of the running loss itself.

    ``by_state`` is differentiable with respect to ``tensors`` and ``by_weights`` with respect to those weights. Both
    have the same value.
    """

    @staticmethod
    def forward(ctx: Any, by_state: Tensor, by_weights: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(by_weights, *tensors)  # second derivatives with respect to any of them are refused
        return by_state.clone()

    @staticmethod
    @refuse_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, grad, *(None for _ in DIFFERENTIABLE)


def _checked(running_loss: RunningLoss, differentiable: bool) -> RunningLoss:
    """Return ``running_loss`` with a check of its result, recorded by autograd if ``differentiable``."""

    def density(c: Tensor, t: Tensor, sample: Tensor) -> Tensor:
        with torch.set_grad_enabled(differentiable):
            value = running_loss(c, t, sample)
        if not isinstance(value, Tensor) or value.shape != t.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"running_loss must return a tensor of shape {tuple(t.shape)}, got {got}")
        return value

    return density


def _amplitudes(problem: Problem, events: Events) -> Tensor:
    if problem.options.amplitude == "one":
        return torch.ones_like(events.times)
    return problem.theta[events.units]


def _below(c: Tensor, theta: Tensor) -> Tensor:
    """Move states equal to their threshold just below it.

    Engines may compute in float64, and a state below its threshold may then round to it in float32. As the initial
    state of the next call it would be rejected.
    """
    if c.dtype == torch.float64:
        return c
    equal = c == theta
    return torch.where(equal, torch.nextafter(theta, torch.zeros_like(theta)), c) if bool(equal.any()) else c
