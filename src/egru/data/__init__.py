"""Data sets: files in, tensors out."""

from egru.data.digits import Classification, Split, digits
from egru.data.pokerdvs import Recording, Recordings, pokerdvs

__all__ = ["Classification", "Recording", "Recordings", "Split", "digits", "pokerdvs"]
