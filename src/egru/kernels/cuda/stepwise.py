"""Fused steps: cuBLAS products and one element-wise kernel between them, a few launches a step.

For float32 problems, for chips without the persistent kernels, and for layers too large for them.
"""

import contextlib
import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from egru.kernels.cuda import driver, pack, products
from egru.kernels.cuda.device import architecture
from egru.kernels.cuda.plan import ceil_to
from egru.kernels.problem import Backward, Forward, Problem
from egru.types import RESETS

_P, _I = ctypes.c_void_p, ctypes.c_int
_BLOCK = 256

PRECISIONS = ("", "bfloat16", "float16")  # LOW in the sources
SHARED_SOURCE = ("operand.cuh", "element.cuh", "reserve.cuh")  # of all kernels of the recursion


class Keep(ctypes.Structure):
    """Zoneout as the kernels see it: a ``(T, B, H)`` array by strides, or null."""

    _fields_ = [("p", _P), ("t", ctypes.c_int64), ("b", ctypes.c_int64), ("h", ctypes.c_int64)]


def keep_argument(problem: Problem, held: list[Tensor]) -> tuple[int, int, int, int]:
    """The fields of :class:`Keep`; ``held`` as in :func:`address`."""
    if problem.keep is None:
        return 0, 0, 0, 0
    keep = problem.keep.float().expand(problem.input.shape[0], *problem.c0.shape)
    held.append(keep)
    t, b, h = keep.stride()
    return keep.data_ptr(), t, b, h


class _ForwardArgs(ctypes.Structure):  # struct Forward of stepwise.cu
    _fields_ = [
        *[(n, _P) for n in ("projected", "product", "bias_ih", "bias_hh", "theta", "rho")],
        ("keep", Keep),
        *[(n, _P) for n in ("lengths", "c_last", "y_last", "fired", "operand", "y", "c", "gate_r", "gate_u")],
        ("reserve", _P),
        *[(n, _I) for n in ("T", "t", "B", "H", "HP")],
    ]  # fmt: skip


class _BackwardArgs(ctypes.Structure):  # struct Backward of stepwise.cu
    _fields_ = [
        *[(n, _P) for n in ("c", "c0", "y0", "reserve", "grad_y", "grad_c", "product", "theta", "rho")],
        ("keep", Keep),
        *[(n, _P) for n in ("lengths", "dc", "dy", "de", "dtheta", "gates", "source", "source_z")],
        *[(n, ctypes.c_float) for n in ("inverse_width", "height")],
        *[(n, _I) for n in ("bounded", "T", "t", "B", "H", "HP")],
    ]  # fmt: skip


def kernel_source(reset: str, reset_gate: str, precision: str) -> str:
    """CUDA C++ of the step kernels: sizes are arguments, only the kind of problem is compiled in."""
    sizes = {"RESET": RESETS.index(reset), "AFTER": int(reset_gate == "after"),
             "LOW": PRECISIONS.index(precision)}  # fmt: skip
    texts = [f"#define {name} {value}\n" for name, value in sizes.items()] + ["#define ACCURATE\n"]
    texts += [(driver.SOURCE / name).read_text() for name in (*SHARED_SOURCE, "stepwise.cu")]
    return "".join(texts)


@functools.cache
def _functions(reset: str, reset_gate: str, precision: str, device: int) -> dict[str, driver.Function]:
    code = driver.compile_source(kernel_source(reset, reset_gate, precision), [architecture(device)])
    names = ("forward_gates", "forward_state", "backward_state", "backward_reset")
    return {name: driver.Function(code, name, block=_BLOCK) for name in names}


def reserve_shape(problem: Problem) -> tuple[int, ...]:
    """What all forms save, in float32 words: see ``source/reserve.cuh``."""
    T, B, _ = problem.input.shape
    H = problem.theta.shape[0]
    if not problem.precision:
        return (T, B, H, 4)
    return (T, B, ceil_to(H, 2) * (3 if problem.reset_gate == "after" else 2) // 2)


_NOTHING = contextlib.nullcontext()


def on_device(index: int) -> contextlib.AbstractContextManager[object]:
    """``torch.cuda.device``, but for free where the device is current already."""
    return _NOTHING if torch.cuda.current_device() == index else torch.cuda.device(index)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor as kernels read it: contiguous, and on a 16-byte address, which a view need not be."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def address(tensor: Tensor | None, held: list[Tensor]) -> int:
    """Where a kernel reads this tensor, 0 for none. A copy that it needs goes into ``held``, to outlive the launch."""
    if tensor is None:
        return 0
    found = tensor.data_ptr()
    if found % 16 == 0 and tensor.is_contiguous():
        return found
    held.append(tensor.clone(memory_format=torch.contiguous_format))
    return held[-1].data_ptr()


def start_state(problem: Problem) -> tuple[Tensor, Tensor, int]:
    """``c0``, ``y0`` and the stride between their rows: 0 where one row stands for all, as at rest."""
    c0, y0 = problem.c0, problem.y0
    if c0.stride() == y0.stride() == (0, 1) and c0.data_ptr() % 16 == y0.data_ptr() % 16 == 0:
        return c0, y0, 0
    return aligned(c0), aligned(y0), c0.shape[1]


def _launch(function: driver.Function, threads: int, args: ctypes.Structure) -> None:
    function(-(-threads // _BLOCK), bytes(args))


def forward(problem: Problem, save: bool) -> Forward:
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
    held: list[Tensor] = []
    args = _ForwardArgs(
        projected.data_ptr(), None,
        *[address(t, held) for t in (problem.bias_ih, problem.bias_hh, problem.theta, problem.reset_scale)],
        Keep(*keep_argument(problem, held)), address(problem.lengths, held),
        *[t.data_ptr() for t in (c_last, y_last, fired, operand, y, c, gate_r, gate_u)],
        reserve.data_ptr() if save else None, T, 0, B, H, HP,
    )  # fmt: skip
    args_any: Any = args
    for t in range(T):
        args_any.t = t
        if after:
            v = products.product(operand, weight)
        else:
            v = products.product(operand, weight[:, : 2 * HP])
            args_any.product = v.data_ptr()
            _launch(functions["forward_gates"], B * H, args)
            v = products.product(operand, weight[:, 2 * HP :])
        args_any.product = v.data_ptr()
        _launch(functions["forward_state"], B * H, args)
    return Forward(y, c, c_last, y_last, reserve)


def _start(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient of the last state, to go on from."""
    return torch.zeros_like(like) if gradient is None else gradient.clone(memory_format=torch.contiguous_format)


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
    dc, dy, dtheta = _start(grad_c_last, de), _start(grad_y_last, de), torch.zeros_like(de)
    held: list[Tensor] = []
    surrogate = problem.surrogate
    args = _BackwardArgs(
        *[address(t, held) for t in (c, problem.c0, problem.y0, reserve, grad_y, grad_c)], None,
        address(problem.theta, held), address(problem.reset_scale, held),
        Keep(*keep_argument(problem, held)), address(problem.lengths, held),
        *[t.data_ptr() for t in (dc, dy, de, dtheta, gates, source, source_z)],
        1 / surrogate.width, surrogate.height, int(surrogate.bounded), T, 0, B, H, HP,
    )  # fmt: skip
    args_any: Any = args
    v: Tensor | None = None
    for t in reversed(range(T)):
        args_any.t, args_any.product = t, None if v is None else v.data_ptr()
        _launch(functions["backward_state"], B * HP, args)
        if after:
            v = products.product(gates[t, :, : 3 * HP], V)
            continue
        v = products.product(gates[t, :, :HP], V_z)
        args_any.product = v.data_ptr()
        _launch(functions["backward_reset"], B * HP, args)
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
