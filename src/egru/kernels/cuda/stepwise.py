"""Fused steps: cuBLAS products and one element-wise kernel between them, a few launches per step.

Used for float32, for devices without the persistent kernels, and for layers too large for them.
"""

import functools

import torch
from torch import Tensor

from egru.kernels.cuda import driver, pack, products, sources, steps
from egru.kernels.cuda.arguments import STEP_BACKWARD, STEP_FORWARD
from egru.kernels.cuda.plan import ceil_to
from egru.kernels.cuda.structs import PackedArguments
from egru.kernels.cuda.tensors import address, keep_argument, reserve_shape
from egru.kernels.problem import Backward, Forward, Problem
from egru.types import Reset, ResetGate

_NAMES = ("forward_gates", "forward_state", "backward_state", "backward_reset")


def kernel_source(reset: Reset, reset_gate: ResetGate, precision: str) -> str:
    """Return the CUDA C++ of the step kernels: only options are compiled in, sizes are arguments."""
    constants = {**sources.option_constants(reset, reset_gate, precision), "ACCURATE": 1}
    return sources.assemble(constants, [STEP_FORWARD, STEP_BACKWARD], [*sources.RECURSION, "stepwise.cu"])


@functools.cache
def _functions(reset: Reset, reset_gate: ResetGate, precision: str, device: int) -> dict[str, driver.Function]:
    return steps.compile_functions(kernel_source(reset, reset_gate, precision), _NAMES, device)


def forward(problem: Problem, save: bool) -> Forward:
    """Run the sequence; ``save`` fills the reserve."""
    T, B, _ = problem.input.shape
    H, device = problem.theta.shape[0], problem.input.device
    HP, low, after = ceil_to(H, 8), products.operand_type(problem), problem.reset_gate == "after"
    functions = _functions(problem.reset, problem.reset_gate, problem.precision, torch.cuda.current_device())
    projected = products.project(problem, HP)
    weight = pack.pad_gates(problem.weight_hh, HP, HP, low).T
    y = torch.empty(T, B, H, dtype=torch.float32, device=device)
    c = torch.empty_like(y)
    c_last, y_last = problem.c0.clone(), problem.y0.clone()
    c_last, y_last = c_last.contiguous(), y_last.contiguous()
    fired = (y_last != 0).to(torch.uint8)
    operand = torch.zeros(B, HP, dtype=low, device=device)
    operand[:, :H] = y_last
    gate_r, gate_u = torch.empty_like(c_last), torch.empty_like(c_last)
    reserve = torch.empty(reserve_shape(problem) if save else (0,), dtype=torch.float32, device=device)
    temporaries: list[Tensor] = []
    args = PackedArguments(
        STEP_FORWARD,
        projected=projected.data_ptr(),
        product=0,
        bias_ih=address(problem.bias_ih, temporaries),
        bias_hh=address(problem.bias_hh, temporaries),
        theta=address(problem.theta, temporaries),
        rho=address(problem.reset_scale, temporaries),
        keep=keep_argument(problem, temporaries),
        lengths=address(problem.lengths, temporaries),
        c_last=c_last.data_ptr(),
        y_last=y_last.data_ptr(),
        fired=fired.data_ptr(),
        operand=operand.data_ptr(),
        y=y.data_ptr(),
        c=c.data_ptr(),
        gate_r=gate_r.data_ptr(),
        gate_u=gate_u.data_ptr(),
        reserve=reserve.data_ptr() if save else 0,
        T=T,
        t=0,
        B=B,
        H=H,
        HP=HP,
    )
    set_step, set_product = args.setter("t"), args.setter("product")
    for t in range(T):
        set_step(t)
        if after:
            v = products.product(operand, weight)
        else:
            v = products.product(operand, weight[:, : 2 * HP])
            set_product(v.data_ptr())
            steps.launch(functions["forward_gates"], B * H, args)
            v = products.product(operand, weight[:, 2 * HP :])
        set_product(v.data_ptr())
        steps.launch(functions["forward_state"], B * H, args)
    return Forward(y, c, c_last, y_last, reserve)


def backward(
    problem: Problem,
    c: Tensor,
    reserve: Tensor,
    grad_y: Tensor | None,
    grad_c: Tensor | None,
    grad_c_last: Tensor | None,
    grad_y_last: Tensor | None,
    input_gradient: bool,
) -> Backward:
    """Return the gradients, given those of the four outputs (None means zero)."""
    T, B, _ = problem.input.shape
    H, device = problem.theta.shape[0], problem.input.device
    HP, low, after = ceil_to(H, 8), products.operand_type(problem), problem.reset_gate == "after"
    functions = _functions(problem.reset, problem.reset_gate, problem.precision, torch.cuda.current_device())
    V_r, V_u, V_z = pack.pad_gates(problem.weight_hh, HP, HP, low).view(3, HP, HP)
    V = torch.cat([V_z, V_r, V_u])
    gates = torch.empty(T, B, 4 * HP, dtype=low, device=device)
    source = torch.empty(T, B, HP, dtype=low, device=device)
    source_z = source if after else torch.empty_like(source)
    de = torch.zeros(B, H, dtype=torch.float32, device=device)
    dc, dy = steps.initial_gradient(grad_c_last, de), steps.initial_gradient(grad_y_last, de)
    dtheta = torch.zeros_like(de)
    temporaries: list[Tensor] = []
    surrogate = problem.surrogate
    args = PackedArguments(
        STEP_BACKWARD,
        c=address(c, temporaries),
        c0=address(problem.c0, temporaries),
        y0=address(problem.y0, temporaries),
        reserve=address(reserve, temporaries),
        grad_y=address(grad_y, temporaries),
        grad_c=address(grad_c, temporaries),
        product=0,
        theta=address(problem.theta, temporaries),
        rho=address(problem.reset_scale, temporaries),
        keep=keep_argument(problem, temporaries),
        lengths=address(problem.lengths, temporaries),
        dc=dc.data_ptr(),
        dy=dy.data_ptr(),
        de=de.data_ptr(),
        dtheta=dtheta.data_ptr(),
        gates=gates.data_ptr(),
        source=source.data_ptr(),
        source_z=source_z.data_ptr(),
        surrogate=(1 / surrogate.width, surrogate.height, int(surrogate.bounded)),
        T=T,
        t=0,
        B=B,
        H=H,
        HP=HP,
    )
    set_step, set_product = args.setter("t"), args.setter("product")
    v: Tensor | None = None
    for t in reversed(range(T)):
        set_step(t)
        set_product(0 if v is None else v.data_ptr())
        steps.launch(functions["backward_state"], B * HP, args)
        if after:
            v = products.product(gates[t, :, : 3 * HP], V)
            continue
        v = products.product(gates[t, :, :HP], V_z)
        set_product(v.data_ptr())
        steps.launch(functions["backward_reset"], B * HP, args)
        v = products.product(gates[t, :, HP : 3 * HP], V[HP:])
    assert v is not None
    dy = dy + v[:, :H]
    gates, source, source_z = gates.view(T * B, -1), source.view(T * B, HP), source_z.view(T * B, HP)
    z_hh, r, u, z = gates.sum(0, dtype=torch.float32).view(4, HP)[:, :H]
    return Backward(
        products.input_gradient(problem, gates) if input_gradient else None,
        dc,
        dy,
        products.input_weight_gradient(problem, gates),
        products.recurrent_gradient(problem, gates, source, source_z),
        torch.cat([r, u, z]),
        torch.cat([r, u, z_hh]),
        dtheta.sum(0),
    )
