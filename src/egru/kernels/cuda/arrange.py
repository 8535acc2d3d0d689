"""Tensors around the recursion, each arranged by one kernel: weights packed, inputs padded, gradients gathered.

The same as :mod:`egru.kernels.cuda.pack` and :mod:`egru.kernels.cuda.products` do in torch; a short sequence would
spend more time in launching those than in computing.
"""

import ctypes
import functools
from typing import NamedTuple

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


class _Prepare(ctypes.Structure):
    _fields_ = [
        ("pack", _Pack),
        ("input", _Pad),
        ("weight_ih", _Pad),
        ("workspace", _P),
        ("words", ctypes.c_int64),
        ("backward", _I),
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
    names = ("prepare", "gather")
    return {name: driver.Function(code, name, block=_BLOCK) for name in names}


class Prepared(NamedTuple):
    """What :func:`prepare` leaves: ``input`` and ``weight_ih`` padded, in low precision, where they were asked for."""

    weights: Tensor
    workspace: int  # address of the zeroed bytes, which live behind the weights
    input: Tensor | None
    weight_ih: Tensor | None


def packed_bytes(plan: Plan, reset_gate: str, direction: str) -> int:
    """Size of the packed recurrent weights of all blocks."""
    k, after = 2 * plan.k_tiles, reset_gate == "after"
    if direction == "forward":
        chunks = 3 * ceil_to(k, 2 * plan.forward.piece)
    else:
        piece = 2 * plan.backward.piece
        chunks = ceil_to(3 * k, piece) if after else ceil_to(k, piece) + ceil_to(2 * k, piece)
    return plan.blocks * chunks * plan.tiles * 8 * 16


def prepare(
    plan: Plan,
    reset_gate: str,
    direction: str,
    low: torch.dtype,
    weight_hh: Tensor,
    input: Tensor | None,
    weight_ih: Tensor | None,
    workspace: int,
) -> Prepared:
    """Packs ``weight_hh`` (as ``pack.pack_*``), pads the other two, and zeroes ``workspace`` bytes: one launch."""
    device = weight_hh.device
    size = packed_bytes(plan, reset_gate, direction)
    buffer = torch.empty(size + workspace, dtype=torch.uint8, device=device)
    address = buffer.data_ptr()
    piece = 2 * (plan.forward.piece if direction == "forward" else plan.backward.piece)
    args = _Prepare(
        _Pack(
            weight_hh.data_ptr(), address, plan.units, 2 * plan.k_tiles, piece, plan.tiles, plan.blocks,
            int(reset_gate == "after"),
        ),
        workspace=address + size, words=workspace // 16, backward=int(direction == "backward"),
    )  # fmt: skip
    padded: list[Tensor | None] = []
    for name, tensor, blocks, rows_out in (("input", input, 1, 0), ("weight_ih", weight_ih, 3, plan.padded)):
        if tensor is None:
            padded.append(None)
            continue
        columns = tensor.shape[-1]
        rows = tensor.numel() // columns // blocks
        width = ceil_to(columns, 8)
        out = torch.empty(blocks * (rows_out or rows), width, dtype=low, device=device)
        setattr(args, name, _Pad(tensor.data_ptr(), out.data_ptr(), blocks, rows, columns, rows_out or rows, width))
        padded.append(out)
    _functions(low, device.index)["prepare"](_GRID, args)
    return Prepared(buffer, address + size, *padded)


def gather(
    problem: Problem, low: torch.dtype, hh: Tensor, hh_z: Tensor | None, ih: Tensor | None, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of weights, biases and theta, from products over time and what the recursion summed up."""
    H, inputs = problem.theta.shape[0], problem.input.shape[2]
    outs = (
        torch.empty_like(problem.weight_ih),
        torch.empty_like(problem.weight_hh),
        hh.new_empty((3 * H,)),
        hh.new_empty((3 * H,)),
        hh.new_empty((H,)),
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
