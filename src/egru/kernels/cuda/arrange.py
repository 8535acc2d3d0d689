"""Tensors around the recursion, each arranged by one kernel: weights packed, inputs padded, gradients gathered.

The same as :mod:`egru.kernels.cuda.pack` and :mod:`egru.kernels.cuda.products` do in torch; a short sequence would
spend more time in launching those than in computing.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egru.kernels.cuda import driver
from egru.kernels.cuda.device import architecture
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
        *[(n, _I) for n in ("H", "HP", "I", "IP", "kinds", "parts", "after")],
    ]


def kernel_source(low: torch.dtype) -> str:
    return f"#define LOW {1 if low == torch.bfloat16 else 2}\n" + (driver.SOURCE / "arrange.cu").read_text()


@functools.cache
def _functions(low: torch.dtype, device: int) -> dict[str, driver.Function]:
    code = driver.compile_source(kernel_source(low), [architecture(device)])
    names = ("prepare", "gather")
    return {name: driver.Function(code, name, block=_BLOCK) for name in names}


class Prepared(NamedTuple):
    """What :class:`Prepare` leaves: ``input`` and ``weight_ih`` padded, in low precision, where they were asked for."""

    buffer: Tensor  # packed weights at its start
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


class Prepare:
    """Everything a recurrent kernel finds ready, in one launch: packed weights, padded operands, a zeroed workspace.

    ``workspace`` bytes are zeroed and ``extra`` bytes lie behind them, as they come. Without a ``plan`` the weights are
    left as they are. ``units`` are those of one gate of the padded ``weight_ih``.
    """

    def __init__(
        self,
        low: torch.dtype,
        device: int,
        units: int,
        workspace: int,
        extra: int = 0,
        plan: Plan | None = None,
        reset_gate: str = "after",
        direction: str = "forward",
    ):
        self._low, self._units = low, units
        self._function = _functions(low, device)["prepare"]
        self._packed = 0
        template = _Prepare(words=workspace // 16, backward=int(direction == "backward"))
        if plan is not None:
            self._packed = packed_bytes(plan, reset_gate, direction)
            piece = 2 * (plan.forward.piece if direction == "forward" else plan.backward.piece)
            template.pack = _Pack(
                None, None, plan.units, 2 * plan.k_tiles, piece, plan.tiles, plan.blocks, int(reset_gate == "after")
            )
        self._template = bytes(template)
        self._bytes = self._packed + workspace + extra

    def _pad(self, tensor: Tensor, blocks: int, rows_out: int | None) -> tuple[_Pad, Tensor]:
        columns = tensor.shape[-1]
        rows = tensor.numel() // columns // blocks
        width = ceil_to(columns, 8)
        rows_out = rows if rows_out is None else rows_out
        out = torch.empty((blocks * rows_out, width), dtype=self._low, device=tensor.device)
        return _Pad(tensor.data_ptr(), out.data_ptr(), blocks, rows, columns, rows_out, width), out

    def __call__(self, weight_hh: Tensor, input: Tensor | None, weight_ih: Tensor | None) -> Prepared:
        """``input`` and ``weight_ih`` are padded where they are given."""
        buffer = torch.empty((self._bytes,), dtype=torch.uint8, device=weight_hh.device)
        address = buffer.data_ptr()
        args: Any = _Prepare.from_buffer_copy(self._template)
        args.pack.weight, args.pack.out, args.workspace = weight_hh.data_ptr(), address, address + self._packed
        input_out = weight_out = None
        if input is not None:
            args.input, input_out = self._pad(input, 1, None)
        if weight_ih is not None:
            args.weight_ih, weight_out = self._pad(weight_ih, 3, self._units)
        self._function(_GRID, args)
        return Prepared(buffer, address + self._packed, input_out, weight_out)


def gather(
    problem: Problem, low: torch.dtype, hh: Tensor, hh_z: Tensor | None, ih: Tensor | None, sums: int, parts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of weights, biases and theta, from products over time and what the recursion summed up.

    ``sums`` is the address of ``parts`` partial sums. An ``ih`` without padding is the gradient already.
    """
    H, inputs, HP = problem.theta.shape[0], problem.input.shape[2], hh.shape[1] - 8
    done = ih is not None and ih.shape == problem.weight_ih.shape
    weight_ih = ih if ih is not None and done else torch.empty_like(problem.weight_ih)
    outs = (
        torch.empty_like(problem.weight_hh),
        weight_ih,
        hh.new_empty((3 * H,)),
        hh.new_empty((3 * H,)),
        hh.new_empty((H,)),
    )
    args = _Gather(
        hh.data_ptr(), None if hh_z is None else hh_z.data_ptr(), None if ih is None or done else ih.data_ptr(), sums,
        *[t.data_ptr() for t in outs],
        H, HP, inputs, 0 if ih is None else ih.shape[1], 3 if ih is None else 2, parts,
        int(problem.reset_gate == "after"),
    )  # fmt: skip
    _functions(low, hh.device.index)["gather"](_GRID, args)
    return weight_ih, outs[0], *outs[2:]
