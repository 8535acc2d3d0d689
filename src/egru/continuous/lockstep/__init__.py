"""The batched engine in torch, for CPU and CUDA tensors.

One iteration advances every sample of the batch to its next event, with dense tensor operations. ``engine="auto"``
selects it for CUDA tensors, and if the compiled core is missing.
"""

from egru.continuous.lockstep.engine import LockstepEngine

__all__ = ["LockstepEngine"]
