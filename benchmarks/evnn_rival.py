"""EvNN, the authors' code (``evnn_pytorch``), for the benchmarks, where it is installed. Its build needs CUDA."""

from collections.abc import Callable

from torch import nn


def evnn(cuda: bool) -> Callable[[int, int], nn.Module] | str:
    """How to make its layer from numbers of inputs and units, or why it is left out."""
    try:
        import evnn_pytorch  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        return f"EvNN is not installed ({error})"
    return lambda inputs, H: evnn_pytorch.EGRU(inputs, H, use_custom_cuda=cuda)
