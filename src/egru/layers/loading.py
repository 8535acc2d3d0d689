"""Comparison of a state dict with the parameters and buffers of a layer."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor


class Comparison(NamedTuple):
    """Differences between a state dict and a layer.

    Attributes:
        missing: Names that the layer requires and the state dict lacks.
        unexpected: Names in the state dict that the layer does not have.
        mismatched: Names whose shapes differ.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]


def compare(expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor], submodules: Collection[str]) -> Comparison:
    """Compare a state dict with the parameters and buffers of a layer.

    A state dict without any thresholds is taken for that of the dense layer, which has none; then thresholds are not
    missing. ``reset_scale`` is never missing.

    Args:
        expected: Parameters and buffers of the layer by name.
        loaded: Entries of the state dict by name.
        submodules: Names of the layer's submodules, whose entries are ignored.
    """
    dense = not any(name.startswith("threshold") for name in loaded)
    optional = {name for name in expected if name == "reset_scale" or (dense and name.startswith("threshold"))}
    return Comparison(
        [name for name in expected if name not in loaded and name not in optional],
        [name for name in loaded if name not in expected and name.split(".")[0] not in submodules],
        [name for name, tensor in expected.items() if name in loaded and loaded[name].shape != tensor.shape],
    )
