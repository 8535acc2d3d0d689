"""Tensors as the kernels read them: aligned, by address, and in the shapes that all kernels share."""

import torch
from torch import Tensor

from egru.kernels.cuda.plan import ceil_to
from egru.kernels.problem import Problem


def aligned(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor on a 16-byte boundary: the same one if possible, else a copy."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def address(tensor: Tensor | None, temporaries: list[Tensor]) -> int:
    """Return the address of an aligned tensor for a kernel, 0 for None.

    If a copy is needed, it is appended to ``temporaries``, which must outlive the launch.
    """
    if tensor is None:
        return 0
    pointer = tensor.data_ptr()
    if pointer % 16 == 0 and tensor.is_contiguous():
        return pointer
    temporaries.append(tensor.clone(memory_format=torch.contiguous_format))
    return temporaries[-1].data_ptr()


def keep_argument(problem: Problem, temporaries: list[Tensor]) -> tuple[int, int, int, int]:
    """Return the fields of :data:`~egru.kernels.cuda.arguments.KEEP`; ``temporaries`` as in :func:`address`."""
    if problem.keep is None:
        return 0, 0, 0, 0
    keep = problem.keep.float().expand(problem.input.shape[0], *problem.c0.shape)
    temporaries.append(keep)
    t, b, h = keep.stride()
    return keep.data_ptr(), t, b, h


def start_state(problem: Problem) -> tuple[Tensor, Tensor, int]:
    """Return ``c0``, ``y0`` and the stride between their rows, which is 0 if all sequences share one row."""
    c0, y0 = problem.c0, problem.y0
    if c0.stride() == y0.stride() == (0, 1) and c0.data_ptr() % 16 == y0.data_ptr() % 16 == 0:
        return c0, y0, 0
    return aligned(c0), aligned(y0), c0.shape[1]


def reserve_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of the reserve of a GRU in float32 words, for all kernels; see ``source/reserve.cuh``."""
    T, B, _ = problem.input.shape
    H = problem.theta.shape[0]
    if not problem.precision:
        return (T, B, H, 4)
    return (T, B, ceil_to(H, 2) * (3 if problem.reset_gate == "after" else 2) // 2)


def lstm_reserve_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of the reserve of an LSTM in float32 words; see ``source/lstm.cuh``."""
    gates = 2 if problem.precision else 4
    words = gates + int(problem.compare == "output") + int(problem.events == "delta")
    return (words, problem.input.shape[0], *problem.c0.shape)
