"""Compression of trained networks: pruning of units and raising of thresholds."""

from egru.compress.prune import prune
from egru.compress.thresholds import raise_thresholds

__all__ = ["prune", "raise_thresholds"]
