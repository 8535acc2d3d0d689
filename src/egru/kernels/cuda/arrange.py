"""Tensors around the recursion, each arranged by one kernel: weights packed, inputs padded, gradients gathered.

The same as :mod:`egru.kernels.cuda.pack` and :mod:`egru.kernels.cuda.products` do in torch; a short sequence would
spend more time in launching those than in computing.
"""

import ctypes
import functools

import torch
from torch import Tensor

from egru.kernels.cuda import driver
from egru.kernels.cuda.plan import Plan, ceil_to
from egru.kernels.problem import Problem

_P, _I = ctypes.c_void_p, ctypes.c_int
_BLOCK = 256
_GRID = 132 * 8


class _Pack(ctypes.Structure):
    _fields_ = [("weight", _P), ("out", _P), *[(n, _I) for n in ("H", "k", "piece", "tiles", "blocks", "after")]]


class _Pad(ctypes.Structure):
    _fields_ = [
        ("input", _P),
        ("out", _P),
        *[(n, _I) for n in ("blocks", "rows", "columns", "rows_out", "columns_out")],
    ]


class _Gather(ctypes.Structure):
    _fields_ = [
        *[(n, _P) for n in ("hh", "hh_z", "ih", "sums", "weight_hh", "weight_ih", "bias_ih", "bias_hh", "theta")],
        *[(n, _I) for n in ("H", "HP", "I", "IP", "parts", "after")],
    ]


def kernel_source(low: torch.dtype) -> str:
    return f"#define LOW {1 if low == torch.bfloat16 else 2}\n" + (driver.SOURCE / "arrange.cu").read_text()


@functools.cache
def _functions(low: torch.dtype, device: int) -> dict[str, driver.Function]:
    major, minor = torch.cuda.get_device_capability(device)
    code = driver.compile_source(kernel_source(low), [f"--gpu-architecture=sm_{major}{minor}"])
    names = ("pack_forward", "pack_backward", "pad", "gather")
    return {name: driver.Function(code, name, block=_BLOCK) for name in names}


def pack(weight_hh: Tensor, plan: Plan, reset_gate: str, low: torch.dtype, direction: str) -> Tensor:
    """``pack.pack_forward`` or ``pack.pack_backward``."""
    k, after = 2 * plan.k_tiles, reset_gate == "after"
    piece = 2 * (plan.forward.piece if direction == "forward" else plan.backward.piece)
    if direction == "forward":
        chunks = 3 * ceil_to(k, piece)
    else:
        chunks = ceil_to(3 * k, piece) if after else ceil_to(k, piece) + ceil_to(2 * k, piece)
    out = torch.empty(plan.blocks, chunks * plan.tiles * 64, dtype=low, device=weight_hh.device)
    args = _Pack(weight_hh.data_ptr(), out.data_ptr(), plan.units, k, piece, plan.tiles, plan.blocks, int(after))
    _functions(low, weight_hh.device.index)[f"pack_{direction}"](_GRID, args)
    return out


def pad(tensor: Tensor, blocks: int, rows_out: int, columns_out: int, low: torch.dtype) -> Tensor:
    """``(blocks*rows, columns)`` in low precision as ``(blocks*rows_out, columns_out)``, zeros around."""
    columns = tensor.shape[-1]
    rows = tensor.numel() // columns // blocks
    out = torch.empty(blocks * rows_out, columns_out, dtype=low, device=tensor.device)
    args = _Pad(tensor.data_ptr(), out.data_ptr(), blocks, rows, columns, rows_out, columns_out)
    _functions(low, tensor.device.index)["pad"](_GRID, args)
    return out


def gather(
    problem: Problem, low: torch.dtype, hh: Tensor, hh_z: Tensor | None, ih: Tensor | None, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of weights, biases and theta, from products over time and what the recursion summed up."""
    H, inputs = problem.theta.shape[0], problem.input.shape[2]
    outs = (
        torch.empty_like(problem.weight_ih),
        torch.empty_like(problem.weight_hh),
        *[torch.empty(size, device=hh.device) for size in (3 * H, 3 * H, H)],
    )
    weight_ih, weight_hh, bias_ih, bias_hh, theta = (t.data_ptr() for t in outs)
    args = _Gather(
        hh.data_ptr(), None if hh_z is None else hh_z.data_ptr(), None if ih is None else ih.data_ptr(),
        sums.data_ptr(),
        weight_hh, weight_ih, bias_ih, bias_hh, theta,
        H, sums.shape[2], inputs, 0 if ih is None else ih.shape[1], sums.shape[0], int(problem.reset_gate == "after"),
    )  # fmt: skip
    _functions(low, hh.device.index)["gather"](_GRID, args)
    return outs
