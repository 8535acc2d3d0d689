"""Export of trained networks as freestanding C."""

from egru.runtime.c.export import export_c

__all__ = ["export_c"]
