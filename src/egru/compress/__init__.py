"""Smaller and quieter networks from trained ones."""

from egru.compress.prune import prune
from egru.compress.thresholds import raise_thresholds

__all__ = ["prune", "raise_thresholds"]
