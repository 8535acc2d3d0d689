"""The event-driven engine in C++: the fastest one, and the default on the CPU.

It keeps a queue of the units' next threshold crossings and updates only the units that an event reaches.
``engine="auto"`` selects it for CPU tensors if the compiled core is installed.
"""

from egru.continuous.compiled.engine import CompiledEngine

__all__ = ["CompiledEngine"]
