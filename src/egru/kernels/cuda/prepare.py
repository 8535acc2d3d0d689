"""Operand preparation: pack weights, pad inputs and clear the workspace, in one launch.

:mod:`egru.kernels.cuda.pack` defines the same layouts in torch. For a short sequence, launching those operations would
take longer than the computation.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from egru.kernels.cuda import driver, sources
from egru.kernels.cuda.arguments import PREPARE
from egru.kernels.cuda.device import architecture
from egru.kernels.cuda.plan import Direction, Plan, ceil_to
from egru.types import ResetGate

_BLOCK = 256
_GRID = 132 * 8
_NO_PACK = (0,) * 6  # the integers of arguments.PACK
_NO_PAD = (0,) * 7  # arguments.PAD


def kernel_source(low: torch.dtype) -> str:
    """Return the CUDA C++ of the kernel that rounds operands to ``low``."""
    constants = {"LOW": 1 if low == torch.bfloat16 else 2}
    return sources.assemble(constants, [PREPARE], ["operand.cuh", "prepare.cu"])


@functools.cache
def _function(low: torch.dtype, device: int) -> driver.Function:
    code = driver.compile_source(kernel_source(low), [architecture(device)])
    return driver.Function(code, "prepare", block=_BLOCK)


class Prepared(NamedTuple):
    """Results of a :class:`Preparer`. ``input`` and ``weight_ih`` are padded and in low precision, if requested.

    ``weight_ih`` is transposed for the forward pass, which multiplies with it from the right.
    """

    buffer: Tensor  # starts with the packed weights
    workspace: int  # address of the zeroed bytes, which follow the weights
    input: Tensor | None
    weight_ih: Tensor | None


class PendingForward(NamedTuple):
    """A forward pass whose operands and product ``x W`` are already enqueued. They need input and weights alone."""

    plan: object  # the partition of the kernel that continues from here
    buffer: Tensor | None  # starts with the packed weights, if the kernel reads packed weights
    workspace: int  # address of the zeroed bytes, owned by ``buffer``
    input: Tensor | None  # as the operand of products
    projected: Tensor | None


def packed_bytes(plan: Plan, reset_gate: ResetGate, direction: Direction) -> int:
    """Return the size of the packed recurrent weights of all blocks."""
    k, after = 2 * plan.k_tiles, reset_gate == "after"
    if direction == "forward":
        chunks = 3 * ceil_to(k, 2 * plan.forward.slot_tiles)
    else:
        multiple = 2 * plan.backward.slot_tiles
        chunks = ceil_to(3 * k, multiple) if after else ceil_to(k, multiple) + ceil_to(2 * k, multiple)
    return plan.blocks * chunks * plan.tiles * 8 * 16


class Preparer:
    """Prepares everything that a recurrent kernel reads, in one launch. Built once per kind of call.

    Args:
        low: The type that operands are rounded to.
        device: Index of the device.
        units: Size of the layer.
        inputs: Number of input features.
        workspace: Bytes to set to zero, a multiple of 16.
        extra: Uninitialised bytes to allocate behind the workspace.
        plan: The partition that the recurrent weights are packed for. If None, they are not packed.
        reset_gate: "after" or "before".
        direction: Whether the weights are packed for the forward or the backward pass.
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
        reset_gate: ResetGate = "after",
        direction: Direction = "forward",
    ):
        padded, width = ceil_to(units, 8), ceil_to(inputs, 8)
        self._low, self._function = low, _function(low, device)
        self._packed, self._pack = 0, _NO_PACK
        if plan is not None:
            self._packed = packed_bytes(plan, reset_gate, direction)
            multiple = 2 * (plan.forward.slot_tiles if direction == "forward" else plan.backward.slot_tiles)
            self._pack = (plan.units, 2 * plan.k_tiles, multiple, plan.tiles, plan.blocks, int(reset_gate == "after"))
        self._end = workspace // 16, int(direction == "backward")
        self._size = ceil_to(self._packed + workspace + extra, 16) // 2  # elements
        self._inputs, self._width, self._pad_weight = inputs, width, (3, units, inputs, padded, width)
        self._layout = (
            ((width, 3 * padded), (1, width)) if direction == "forward" else ((3 * padded, width), (width, 1))
        )

    def __call__(self, weight_hh: Tensor, input: Tensor | None, weight_ih: Tensor | None) -> Prepared:
        """Enqueue the kernel. ``input`` and ``weight_ih`` are padded unless they are None."""
        # Few allocations and little work before the launch: the device is idle until then.
        low, device, width = self._low, weight_hh.device, self._width
        buffer = torch.empty((self._size,), dtype=low, device=device)
        address = buffer.data_ptr()
        pad_input = pad_weight = _NO_PAD
        weight = operand = None
        if weight_ih is not None:
            weight = torch.empty_strided(*self._layout, dtype=low, device=device)
            pad_weight = (weight_ih.data_ptr(), weight.data_ptr(), *self._pad_weight)
        if input is not None:  # allocated separately, since the backward pass may need it
            rows = input.numel() // self._inputs
            operand = torch.empty((rows, width), dtype=low, device=device)
            pad_input = (input.data_ptr(), operand.data_ptr(), 1, rows, self._inputs, rows, width)
        workspace = address + self._packed
        args = PREPARE.pack(
            weight_hh.data_ptr(), address, *self._pack, *pad_input, *pad_weight, workspace, *self._end
        )  # fmt: skip
        self._function(_GRID, args)
        return Prepared(buffer, workspace, operand, weight)


def view_unpadded(operand: Tensor, shape: torch.Size) -> Tensor:
    """Return a view of a padded input in the shape ``(T, B, I)`` of the input itself."""
    width = operand.shape[1]
    return operand.as_strided(shape, (shape[1] * width, width, 1))


def recover_padded(input: Tensor, low: torch.dtype) -> Tensor | None:
    """Return the operand that ``input`` is a :func:`view_unpadded` of, or None if it is an ordinary tensor."""
    T, B, inputs = input.shape
    width = ceil_to(inputs, 8)
    if input.dtype != low or input.stride() != (B * width, width, 1) or input.data_ptr() % 16 != 0:
        return None
    if input.storage_offset() + T * B * width > input.untyped_storage().nbytes() // input.element_size():
        return None
    return input.as_strided((T * B, width), (width, 1))
