"""The reference kernel: the sequence operation through :mod:`egru.functional`, for any device and dtype."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from egru import functional
from egru.events import EventState
from egru.kernels.finite import check_arguments, check_result
from egru.kernels.problem import FIELDS, Backward, Forward, Problem


def _shared_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the keyword-only parameters of ``function`` that are fields of :class:`Problem`."""
    names = {field.name for field in dataclasses.fields(Problem)}
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in names)


# Derived from the signatures, so that an option which egru.functional implements needs no change here.
_BACKWARD_ARGUMENTS = _shared_arguments(functional.egru_backward)
_GRU_ARGUMENTS = _shared_arguments(functional.egru_sequence)
_LSTM_ARGUMENTS = _shared_arguments(functional.elstm_sequence)


def run_torch(problem: Problem) -> functional.Sequence:
    """Run the sequence as torch operations, which autograd and the transforms of ``torch.func`` can differentiate."""
    problem = problem.rounded()
    lstm = problem.cell == "lstm"
    run, options = (functional.elstm_sequence, _LSTM_ARGUMENTS) if lstm else (functional.egru_sequence, _GRU_ARGUMENTS)
    return run(
        problem.input,
        EventState(problem.c0, problem.y0),
        problem.weight_ih,
        problem.weight_hh,
        problem.bias_ih,
        problem.bias_hh,
        problem.theta,
        **{name: getattr(problem, name) for name in options},
    )


class ReferenceKernel:
    """Plain torch, dense, with the explicit backward pass of the GRU. Autograd differentiates the LSTM."""

    name = "reference"
    device: str | None = None
    options = frozenset({"lean", "cell", "compare", *_BACKWARD_ARGUMENTS} & FIELDS.defaults.keys())
    reads_y = True

    def unsupported(self, problem: Problem) -> str | None:
        return None

    def describe(self) -> str:
        return "plain torch, dense, any device and dtype; every other kernel is tested against it"

    def reserve_shape(self, problem: Problem) -> tuple[int, ...]:
        if problem.lean or problem.cell == "lstm":
            return (0,)
        T, B, _ = problem.input.shape
        gates = 4 if problem.reset_gate == "after" else 3
        return (gates, T, B, problem.theta.shape[0])

    def forward(self, problem: Problem, save: bool) -> Forward:
        problem = problem.rounded()
        check_arguments(problem)
        result = run_torch(problem.without_backward_options())
        check_result(result.state.c)
        reserve = torch.stack(result.gates) if save and self.reserve_shape(problem) != (0,) else result.y.new_empty(0)
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
        state_gradient: bool = True,
    ) -> Backward:
        assert y is not None
        if problem.cell == "lstm":
            return _differentiate(problem, (grad_y, grad_c, grad_c_last, grad_y_last), input_gradient)
        if problem.lean:
            problem = dataclasses.replace(problem, lean=False)
            reserve = self.forward(problem, save=True).reserve
        problem = problem.rounded()
        state = EventState(problem.c0, problem.y0)
        gradients = functional.egru_backward(
            grad_y,
            grad_c,
            (grad_c_last, grad_y_last),
            problem.input,
            state,
            problem.weight_ih,
            problem.weight_hh,
            problem.theta,
            functional.Sequence(y, c, state, reserve.unbind(0)),
            input_gradient=input_gradient,
            **{name: getattr(problem, name) for name in _BACKWARD_ARGUMENTS},
        )
        return Backward(
            input=gradients.input,
            c0=gradients.state.c,
            y0=gradients.state.y,
            weight_ih=gradients.weight_ih,
            weight_hh=gradients.weight_hh,
            bias_ih=gradients.bias,
            bias_hh=gradients.bias_hh,
            theta=gradients.theta,
        )


def _differentiate(problem: Problem, grads: tuple[Tensor | None, ...], input_gradient: bool) -> Backward:
    """Run the sequence again and differentiate it by autograd."""
    rows = problem.weight_hh.shape[0]
    leaves: dict[str, Tensor] = {}
    for name in FIELDS.differentiable:
        tensor: Tensor | None = getattr(problem.rounded(), name)
        tensor = problem.theta.new_zeros(rows) if tensor is None else tensor.detach()
        leaves[name] = tensor.requires_grad_(input_gradient or name != "input")
    with torch.enable_grad():
        result = run_torch(dataclasses.replace(problem, precision="", **leaves))
        pairs = [
            (output, grad)
            for output, grad in zip((result.y, result.c, *result.state), grads, strict=True)
            if grad is not None
        ]
        outputs, output_grads = zip(*pairs, strict=True)
        inputs = [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients = torch.autograd.grad(outputs, inputs, output_grads, materialize_grads=True)
    return Backward(*gradients) if input_gradient else Backward(None, *gradients)
