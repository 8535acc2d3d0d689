"""Smaller networks from trained ones."""

from egru.compress.prune import prune

__all__ = ["prune"]
