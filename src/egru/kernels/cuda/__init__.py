"""The sequence operation on NVIDIA GPUs. docs/results/gpu-notes.md describes the design and its measurements."""

from egru.kernels.cuda.kernel import CUDAKernel

__all__ = ["CUDAKernel"]
