"""What the fused steps of all cells share: launching the element-wise kernels, and the gradients they start from."""

import torch
from torch import Tensor

from egru.kernels.cuda import driver
from egru.kernels.cuda.device import architecture
from egru.kernels.cuda.structs import PackedArguments

_BLOCK = 256


def compile_functions(source: str, names: tuple[str, ...], device: int) -> dict[str, driver.Function]:
    """Compile CUDA C++ for a device and return its kernels by name."""
    code = driver.compile_source(source, [architecture(device)])
    return {name: driver.Function(code, name, block=_BLOCK) for name in names}


def launch(function: driver.Function, threads: int, args: PackedArguments) -> None:
    """Launch an element-wise kernel with at least ``threads`` threads."""
    function(-(-threads // _BLOCK), bytes(args.data))


def initial_gradient(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a copy of the gradient of the last state, or zeros."""
    return torch.zeros_like(like) if gradient is None else gradient.clone(memory_format=torch.contiguous_format)
