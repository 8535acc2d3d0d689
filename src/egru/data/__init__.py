"""Data sets: files in, tensors out."""

from egru.data.digits import Classification, Split, digits

__all__ = ["Classification", "Split", "digits"]
