"""The sequence operation on NVIDIA GPUs. See docs/gpu-notes.md for the design and its measurements."""

from egru.kernels.cuda.kernel import CUDAKernel

__all__ = ["CUDAKernel"]
