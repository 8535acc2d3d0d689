"""The CPU kernel of the sequence operation: compiled and event-driven."""

from egru.kernels.cpu.kernel import CPUKernel

__all__ = ["CPUKernel"]
