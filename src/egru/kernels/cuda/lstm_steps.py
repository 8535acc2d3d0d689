"""Fused steps of the event-based LSTM: one cuBLAS product and one element-wise kernel per step and direction."""

import functools

import torch
from torch import Tensor

from egru.kernels.cuda import driver, pack, products, sources, steps
from egru.kernels.cuda.arguments import LSTM_BACKWARD, LSTM_FORWARD
from egru.kernels.cuda.plan import ceil_to
from egru.kernels.cuda.structs import PackedArguments
from egru.kernels.cuda.tensors import address, keep_argument, lstm_reserve_shape
from egru.kernels.problem import Backward, Forward, Problem
from egru.types import EVENTS, Compare, Events, Reset

GATES = 4
FILES = ("operand.cuh", "element.cuh", "lstm.cuh", "lstm_steps.cu")
NAMES = ("lstm_forward", "lstm_backward")


def kernel_source(reset: Reset, compare: Compare, events: Events, precision: str) -> str:
    """Return the CUDA C++ of the step kernels: only options are compiled in, sizes are arguments."""
    constants = {
        **sources.option_constants(reset, "after", precision),
        "OUTPUT": int(compare == "output"),
        "EVENTS": EVENTS.index(events),
        "ACCURATE": 1,
    }
    return sources.assemble(constants, [LSTM_FORWARD, LSTM_BACKWARD], FILES)


@functools.cache
def _functions(
    reset: Reset, compare: Compare, events: Events, precision: str, device: int
) -> dict[str, driver.Function]:
    return steps.compile_functions(kernel_source(reset, compare, events, precision), NAMES, device)


def _problem_functions(problem: Problem) -> dict[str, driver.Function]:
    device = torch.cuda.current_device()
    return _functions(problem.reset, problem.compare, problem.events, problem.precision, device)


def forward(problem: Problem, save: bool) -> Forward:
    """Run the sequence; ``save`` fills the reserve."""
    T, B, _ = problem.input.shape
    H, device = problem.theta.shape[0], problem.input.device
    HP, low = ceil_to(H, 8), products.operand_type(problem)
    step = _problem_functions(problem)["lstm_forward"]
    projected = products.project(problem, HP)
    weight = pack.pad_gates(problem.weight_hh, HP, HP, low, GATES).T
    y = torch.empty(T, B, H, dtype=torch.float32, device=device)
    c = torch.empty_like(y)
    c_last, y_last = (x.clone(memory_format=torch.contiguous_format) for x in (problem.c0, problem.y0))
    fired = (y_last != 0).to(torch.uint8)
    operand = torch.zeros(B, HP, dtype=low, device=device)
    operand[:, :H] = y_last
    reserve = torch.empty(lstm_reserve_shape(problem) if save else (0,), dtype=torch.float32, device=device)
    temporaries: list[Tensor] = []
    args = PackedArguments(
        LSTM_FORWARD,
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
        v = products.product(operand, weight)
        set_product(v.data_ptr())
        steps.launch(step, B * H, args)
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
    HP, low = ceil_to(H, 8), products.operand_type(problem)
    step = _problem_functions(problem)["lstm_backward"]
    weight = pack.pad_gates(problem.weight_hh, HP, HP, low, GATES)
    gates = torch.empty(T, B, GATES * HP, dtype=low, device=device)
    source = torch.empty(T, B, HP, dtype=low, device=device)
    de = torch.zeros(B, H, dtype=torch.float32, device=device)
    dc, dy = steps.initial_gradient(grad_c_last, de), steps.initial_gradient(grad_y_last, de)
    dtheta = torch.zeros_like(de)
    temporaries: list[Tensor] = []
    surrogate = problem.surrogate
    args = PackedArguments(
        LSTM_BACKWARD,
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
        steps.launch(step, B * HP, args)
        v = products.product(gates[t], weight)
    assert v is not None
    gates, source = gates.view(T * B, -1), source.view(T * B, HP)
    bias = gates.sum(0, dtype=torch.float32).view(GATES, HP)[:, :H].flatten()
    return Backward(
        products.input_gradient(problem, gates) if input_gradient else None,
        dc,
        dy + v[:, :H],
        products.input_weight_gradient(problem, gates),
        products.unpad_gates(products.product(gates.T, source), problem.weight_hh, H),
        bias,
        bias.clone(),
        dtheta.sum(0),
    )
