"""Conversion and compression of trained networks: event layers, thresholds, pruning of units."""

from egru.compress.convert import convert
from egru.compress.prune import prune
from egru.compress.thresholds import raise_thresholds

__all__ = ["convert", "prune", "raise_thresholds"]
