"""The reference engine in NumPy: one sample at a time, in float64, written to be read.

It supports every problem and is slow. The other engines are tested against it. It is used only on request, with
``engine="reference"``.
"""

from egru.continuous.reference.engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
