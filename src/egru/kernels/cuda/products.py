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
    """Return ``x W`` without bias, ``(T*B, 3*padded)``."""
    low = operand_type(problem)
    inputs = ceil_to(problem.input.shape[2], 8)
    weight = pack.pad_gates(problem.weight_ih, padded, inputs, low)
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
    """Return ``dW``, ``(3H, I)``."""
    H, HP, inputs = problem.theta.shape[0], gates.shape[1] // 4, problem.input.shape[2]
    x = pack.pad_input(problem.input, ceil_to(inputs, 8), gates.dtype)
    result = product(gates[:, HP:].T, x).view(3, HP, -1)
    return result[:, :H, :inputs].reshape(3 * H, inputs)


def input_gradient(problem: Problem, gates: Tensor) -> Tensor:
    """Return ``dx``, ``(T, B, I)``."""
    T, B, inputs = problem.input.shape
    HP = gates.shape[1] // 4
    weight = pack.pad_gates(problem.weight_ih, HP, ceil_to(inputs, 8), gates.dtype)
    return product(gates[:, HP:], weight)[:, :inputs].reshape(T, B, inputs)
