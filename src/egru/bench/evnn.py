"""The layer of EvNN, the code of the paper's authors (``evnn_pytorch``), if it is installed. Building it needs CUDA."""

from collections.abc import Callable

from torch import nn


def find_evnn(cuda: bool) -> Callable[[int, int], nn.Module] | str:
    """Return a function that makes an EvNN layer from its numbers of inputs and units, or why there is none."""
    try:
        import evnn_pytorch  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        return f"EvNN is not installed ({error})"
    return lambda inputs, units: evnn_pytorch.EGRU(inputs, units, use_custom_cuda=cuda)
