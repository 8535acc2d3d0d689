"""Tensors around the recursion, each arranged by one kernel: weights packed, inputs padded, gradients gathered.

The same as :mod:`egru.kernels.cuda.pack` and :mod:`egru.kernels.cuda.products` do in torch; a short sequence would
spend more time in launching those than in computing.
"""

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from egru.kernels.cuda import driver
from egru.kernels.cuda.device import architecture
from egru.kernels.cuda.plan import Plan, ceil_to
from egru.kernels.problem import Problem

_BLOCK = 256
_GRID = 132 * 8


# struct Prepare of arrange.cu: Pack, Pad of the input, Pad of weight_ih, workspace, words, backward
_PREPARE = struct.Struct("PP6i" + "PP5i4x" * 2 + "Pqi4x")
_NO_PAD = (0,) * 7
_GATHER = struct.Struct("9P7i4x")  # struct Gather


def kernel_source(low: torch.dtype) -> str:
    texts = [(driver.SOURCE / name).read_text() for name in ("operand.cuh", "arrange.cu")]
    return "".join([f"#define LOW {1 if low == torch.bfloat16 else 2}\n", *texts])


@functools.cache
def _functions(low: torch.dtype, device: int) -> dict[str, driver.Function]:
    code = driver.compile_source(kernel_source(low), [architecture(device)])
    names = ("prepare", "gather")
    return {name: driver.Function(code, name, block=_BLOCK) for name in names}


class Prepared(NamedTuple):
    """What :class:`Prepare` leaves: ``input`` and ``weight_ih`` padded, in low precision, where they were asked for.

    ``weight_ih`` is transposed for the forward pass, which multiplies with it from the right.
    """

    buffer: Tensor  # packed weights at its start
    workspace: int  # address of the zeroed bytes, which live behind the weights
    input: Tensor | None
    weight_ih: Tensor | None


class Started(NamedTuple):
    """A forward pass under way: operands arranged and ``x W`` asked for, which needs input and weights alone."""

    plan: object  # the partition of the kernel that goes on from here
    buffer: Tensor  # packed weights at its start, where the kernel wants them packed
    workspace: int  # address of the zeroed bytes, which ``buffer`` owns
    input: Tensor | None  # as the operand of products
    projected: Tensor | None


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

    For a layer of ``units`` and ``inputs``. ``workspace`` bytes are zeroed and ``extra`` bytes lie behind them, as they
    come. Without a ``plan`` the recurrent weights are left as they are.
    """

    def __init__(
        self,
        low: torch.dtype,
        device: int,
        units: int,
        inputs: int,
        workspace: int,
        extra: int = 0,
        plan: Plan | None = None,
        reset_gate: str = "after",
        direction: str = "forward",
    ):
        padded, width = ceil_to(units, 8), ceil_to(inputs, 8)
        self._low, self._function = low, _functions(low, device)["prepare"]
        self._packed, self._pack = 0, (0,) * 6
        if plan is not None:
            self._packed = packed_bytes(plan, reset_gate, direction)
            piece = 2 * (plan.forward.piece if direction == "forward" else plan.backward.piece)
            self._pack = (plan.units, 2 * plan.k_tiles, piece, plan.tiles, plan.blocks, int(reset_gate == "after"))
        self._end = workspace // 16, int(direction == "backward")
        self._size = ceil_to(self._packed + workspace + extra, 16) // 2  # elements
        self._inputs, self._width, self._pad_weight = inputs, width, (3, units, inputs, padded, width)
        self._layout = (
            ((width, 3 * padded), (1, width)) if direction == "forward" else ((3 * padded, width), (width, 1))
        )

    def __call__(self, weight_hh: Tensor, input: Tensor | None, weight_ih: Tensor | None) -> Prepared:
        """``input`` and ``weight_ih`` are padded where they are given."""
        # Few allocations, and nothing more than needed before the launch: the device waits for it.
        low, device, width = self._low, weight_hh.device, self._width
        buffer = torch.empty((self._size,), dtype=low, device=device)
        address = buffer.data_ptr()
        pad_input = pad_weight = _NO_PAD
        weight = operand = None
        if weight_ih is not None:
            weight = torch.empty_strided(*self._layout, dtype=low, device=device)
            pad_weight = (weight_ih.data_ptr(), weight.data_ptr(), *self._pad_weight)
        if input is not None:  # in memory of its own: the backward pass may want it
            rows = input.numel() // self._inputs
            operand = torch.empty((rows, width), dtype=low, device=device)
            pad_input = (input.data_ptr(), operand.data_ptr(), 1, rows, self._inputs, rows, width)
        workspace = address + self._packed
        self._function(
            _GRID,
            _PREPARE.pack(
                weight_hh.data_ptr(), address, *self._pack, *pad_input, *pad_weight, workspace, *self._end
            ),
        )  # fmt: skip
        return Prepared(buffer, workspace, operand, weight)


def unpadded(operand: Tensor, shape: torch.Size) -> Tensor:
    """A padded input as a view in the shape ``(T, B, I)`` of the input itself."""
    width = operand.shape[1]
    return operand.as_strided(shape, (shape[1] * width, width, 1))


def repadded(input: Tensor, low: torch.dtype) -> Tensor | None:
    """The operand of which ``input`` is :func:`unpadded`, or None where it is an ordinary tensor."""
    T, B, inputs = input.shape
    width = ceil_to(inputs, 8)
    if input.dtype != low or input.stride() != (B * width, width, 1) or input.data_ptr() % 16 != 0:
        return None
    if input.storage_offset() + T * B * width > input.untyped_storage().nbytes() // input.element_size():
        return None
    return input.as_strided((T * B, width), (width, 1))


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
    args = _GATHER.pack(
        hh.data_ptr(), 0 if hh_z is None else hh_z.data_ptr(), 0 if ih is None or done else ih.data_ptr(), sums,
        *[t.data_ptr() for t in outs],
        H, HP, inputs, 0 if ih is None else ih.shape[1], 3 if ih is None else 2, parts,
        int(problem.reset_gate == "after"),
    )  # fmt: skip
    _functions(low, hh.device.index)["gather"](_GRID, args)
    return weight_ih, outs[0], *outs[2:]
