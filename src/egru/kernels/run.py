"""From a :class:`~egru.kernels.problem.Problem` to the operator call that runs it."""

import dataclasses

import torch
from torch import Tensor

from egru.events import EventState
from egru.kernels.direct import sequence as direct
from egru.kernels.op import sequence
from egru.kernels.problem import Problem, is_plain
from egru.kernels.registry import begin, choose


def begin_sequence(
    input: Tensor, weight_ih: Tensor, weight_hh: Tensor, reset_gate: str, precision: str, backend: str
) -> object:
    """Start what needs input and weights alone, before the rest of a problem is put together.

    On a GPU a short sequence takes less time than the host needs to ask for it; this gives the device something to do
    meanwhile. The result belongs into :attr:`Problem.started`; None where there is nothing to start.
    """
    if not input.is_cuda or backend not in ("auto", "cuda") or not is_plain(input):
        return None
    return begin(input, weight_ih, weight_hh, reset_gate, precision)


def run_sequence(problem: Problem, backend: str = "auto") -> tuple[Tensor, Tensor, EventState]:
    """Run ``problem`` on the kernel that ``backend`` names: ``(y, c, carried state)``, differentiable."""
    tensors = problem.tensors()
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors[:8])
    if not save and problem.recurrent_clip:  # there is no backward pass for it to change
        problem = dataclasses.replace(problem, recurrent_clip=0.0)
    name = choose(backend, problem)
    if is_plain(problem.input):
        y, c, c_last, y_last = direct(problem, name, save)
        return y, c, EventState(c_last, y_last)
    surrogate = problem.surrogate
    y, c, c_last, y_last, _ = sequence(
        *tensors,  # pyright: ignore[reportArgumentType]
        problem.reset,
        problem.reset_gate,
        float(surrogate.width),
        float(surrogate.height),
        surrogate.bounded,
        surrogate.shape,
        problem.precision,
        problem.lean,
        problem.recurrent_clip,
        name,
        save,
    )
    return y, c, EventState(c_last, y_last)
