"""The sequence operation through :mod:`egru.functional`: slow, readable, on any device and type."""

import dataclasses

import torch
from torch import Tensor

from egru import functional
from egru.events import EventState
from egru.kernels.problem import Backward, Forward, Problem


class ReferenceKernel:
    """Plain torch, dense, with the explicit backward of the specification."""

    name = "reference"
    reads_y = True

    def unsupported(self, problem: Problem) -> str | None:
        return None

    def describe(self) -> str:
        return "plain torch, dense, any device and type: what every other kernel is tested against"

    def reserve_shape(self, problem: Problem) -> tuple[int, ...]:
        if problem.lean:
            return (0,)
        T, B, _ = problem.input.shape
        gates = 4 if problem.reset_gate == "after" else 3
        return (gates, T, B, problem.theta.shape[0])

    def forward(self, problem: Problem, save: bool) -> Forward:
        problem = problem.rounded()
        result = functional.egru_sequence(
            problem.input,
            EventState(problem.c0, problem.y0),
            problem.weight_ih,
            problem.weight_hh,
            problem.bias_ih,
            problem.bias_hh,
            problem.theta,
            reset=problem.reset,
            reset_gate=problem.reset_gate,
            surrogate=problem.surrogate,
            reset_scale=problem.reset_scale,
            keep=problem.keep,
            lengths=problem.lengths,
        )
        reserve = torch.stack(result.gates) if save and not problem.lean else result.y.new_empty(0)
        # clone: outputs of an operator must not share memory
        return Forward(result.y, result.c, result.state.c.clone(), result.state.y.clone(), reserve)

    def backward(
        self,
        problem: Problem,
        y: Tensor | None,
        c: Tensor,
        reserve: Tensor,
        grad_y: Tensor | None,
        grad_c: Tensor | None,
        grad_c_last: Tensor | None,
        grad_y_last: Tensor | None,
        input_gradient: bool,
    ) -> Backward:
        assert y is not None
        if problem.lean:
            problem = dataclasses.replace(problem, lean=False)
            reserve = self.forward(problem, save=True).reserve
        problem = problem.rounded()
        state = EventState(problem.c0, problem.y0)
        grads = functional.egru_backward(
            grad_y,
            grad_c,
            (grad_c_last, grad_y_last),
            problem.input,
            state,
            problem.weight_ih,
            problem.weight_hh,
            problem.theta,
            functional.Sequence(y, c, state, tuple(reserve.unbind(0))),
            reset=problem.reset,
            reset_gate=problem.reset_gate,
            surrogate=problem.surrogate,
            reset_scale=problem.reset_scale,
            keep=problem.keep,
            lengths=problem.lengths,
            recurrent_clip=problem.recurrent_clip,
            input_gradient=input_gradient,
        )
        return Backward(
            grads.input,
            grads.state.c,
            grads.state.y,
            grads.weight_ih,
            grads.weight_hh,
            grads.bias,
            grads.bias_hh,
            grads.theta,
        )
