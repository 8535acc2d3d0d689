"""The sequence operation on NVIDIA GPUs. docs/gpu-notes.md describes the design and its measurements."""

from egru.kernels.cuda.kernel import CUDAKernel

__all__ = ["CUDAKernel"]
