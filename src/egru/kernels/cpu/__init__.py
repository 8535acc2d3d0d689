"""The compiled, event-driven CPU kernel of the sequence operation."""

from egru.kernels.cpu.kernel import CPUKernel

__all__ = ["CPUKernel"]
