"""Products over all time steps at once, computed by cuBLAS on padded and aligned operands."""

import torch
from torch import Tensor

from egru.kernels.cuda import pack
from egru.kernels.cuda.plan import ceil_to
from egru.kernels.problem import Problem

OPERANDS = {"": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def operand_type(problem: Problem) -> torch.dtype:
    """Return the type that operands of products are rounded to."""
    return OPERANDS[problem.precision]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, accumulated in float32."""
    return torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def project(problem: Problem, padded: int) -> Tensor:
    """Return ``x W`` without bias, ``(T*B, gates*padded)``."""
    low = operand_type(problem)
    inputs = ceil_to(problem.input.shape[2], 8)
    weight = pack.pad_gates(problem.weight_ih, padded, inputs, low, _gate_count(problem))
    return product(pack.pad_input(problem.input, inputs, low), weight.T)


def recurrent_gradient(problem: Problem, gates: Tensor, source: Tensor, source_z: Tensor) -> Tensor:
    """Return ``dV``, ``(3H, H)``.

    ``gates`` is ``(T*B, 4*padded)`` with the blocks: gradient that multiplies V_z, a_r, a_u, a_z.
    """
    H, HP = problem.theta.shape[0], gates.shape[1] // 4
    out = torch.empty_like(problem.weight_hh)
    blocks = out.view(3, H, H)
    if problem.reset_gate == "after":
        result = product(gates[:, : 3 * HP].T, source).view(3, HP, -1)
        blocks[2] = result[0, :H, :H]
    else:
        result = product(gates[:, HP : 3 * HP].T, source).view(2, HP, -1)
        blocks[2] = product(gates[:, :HP].T, source_z)[:H, :H]
    blocks[:2] = result[-2:, :H, :H]
    return out


def input_weight_gradient(problem: Problem, gates: Tensor) -> Tensor:
    """Return ``dW``, ``(3H, I)`` or ``(4H, I)``."""
    x = pack.pad_input(problem.input, ceil_to(problem.input.shape[2], 8), gates.dtype)
    return unpad_gates(product(_pre_activations(problem, gates).T, x), problem.weight_ih, problem.theta.shape[0])


def input_gradient(problem: Problem, gates: Tensor) -> Tensor:
    """Return ``dx``, ``(T, B, I)``."""
    T, B, inputs = problem.input.shape
    a, count = _pre_activations(problem, gates), _gate_count(problem)
    weight = pack.pad_gates(problem.weight_ih, a.shape[1] // count, ceil_to(inputs, 8), gates.dtype, count)
    return product(a, weight)[:, :inputs].reshape(T, B, inputs)


def unpad_gates(gradient: Tensor, weight: Tensor, units: int) -> Tensor:
    """Return the gradient of ``weight``, given that of the padded weight (:func:`egru.kernels.cuda.pack.pad_gates`)."""
    blocks = gradient.view(weight.shape[0] // units, -1, gradient.shape[1])
    return blocks[:, :units, : weight.shape[1]].reshape(weight.shape)


def _gate_count(problem: Problem) -> int:
    return problem.weight_ih.shape[0] // problem.theta.shape[0]


def _pre_activations(problem: Problem, gates: Tensor) -> Tensor:
    """Return the gradients of the pre-activations, the last of four blocks for a GRU and all of them for an LSTM."""
    return gates[:, (4 - _gate_count(problem)) * (gates.shape[1] // 4) :]
