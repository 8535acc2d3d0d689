"""Gradient collection: weights, biases and thresholds from padded products and partial sums, in one launch."""

import functools

from torch import Tensor

from egru.kernels.cuda import driver, sources
from egru.kernels.cuda.arguments import GATHER
from egru.kernels.cuda.device import architecture
from egru.kernels.problem import Problem

_BLOCK = 256
_GRID = 132 * 8


def kernel_source() -> str:
    """Return the CUDA C++ of the kernel, which reads float32 only."""
    return sources.assemble({"LOW": 0}, [GATHER], ["gather.cu"])


@functools.cache
def _function(device: int) -> driver.Function:
    return driver.Function(driver.compile_source(kernel_source(), [architecture(device)]), "gather", block=_BLOCK)


def gather_gradients(
    problem: Problem, padded: int, hh: Tensor, hh_z: Tensor | None, ih: Tensor | None, sums: int, parts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of weight_ih, weight_hh, bias_ih, bias_hh and theta.

    Args:
        problem: The problem whose gradients are computed.
        padded: Units per gate in the products.
        hh: Products over time for the recurrent weights; see :data:`~egru.kernels.cuda.arguments.GATHER`.
        hh_z: The same for V_z, if ``reset_gate`` is "before".
        ih: The product over time for the input weights, which is the gradient itself if it has no padding. None if
            the input has one feature.
        sums: Address of the partial sums of the recursion.
        parts: The number of partial sums.
    """
    H, inputs = problem.theta.shape[0], problem.input.shape[2]
    unpadded = ih is not None and ih.shape == problem.weight_ih.shape and ih.is_contiguous()
    weight_ih = ih if ih is not None and unpadded else hh.new_empty(problem.weight_ih.shape)
    outs = (
        hh.new_empty(problem.weight_hh.shape),  # contiguous, unlike empty_like of a transposed weight
        weight_ih,
        hh.new_empty((3 * H,)),
        hh.new_empty((3 * H,)),
        hh.new_empty((H,)),
    )
    args = GATHER.pack(
        hh.data_ptr(), 0 if hh_z is None else hh_z.data_ptr(), 0 if ih is None or unpadded else ih.data_ptr(), sums,
        *[t.data_ptr() for t in outs],
        H, padded, hh.stride(0), inputs, 0 if ih is None else ih.stride(0), 3 if ih is None else 2, parts,
        int(problem.reset_gate == "after"),
    )  # fmt: skip
    _function(hh.device.index)(_GRID, args)
    return weight_ih, outs[0], *outs[2:]
