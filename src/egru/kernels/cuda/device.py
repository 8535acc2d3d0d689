"""Properties of the device, the device guard, and the check for kernels that timed out."""

import contextlib
import ctypes
import functools
from typing import Any, cast

import torch
from torch import Tensor

from egru.kernels.cuda.plan import Chip

_CURRENT = contextlib.nullcontext()


def on_device(index: int) -> contextlib.AbstractContextManager[object]:
    """Make a device current; like ``torch.cuda.device``, but free if it is current already."""
    return _CURRENT if torch.cuda.current_device() == index else torch.cuda.device(index)


@functools.cache
def chip(device: int) -> Chip:
    """Return the properties that plans depend on."""
    properties = cast(Any, torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
    return Chip(properties.multi_processor_count, properties.shared_memory_per_block_optin)


@functools.cache
def architecture(device: int) -> str:
    """Return the NVRTC option for this device."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"--gpu-architecture=sm_{major}{minor}"


@functools.cache
def is_hopper(device: int) -> bool:
    """Return whether the device can run the persistent kernels and the cluster kernels."""
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _error_flag() -> Tensor:
    # Pinned host memory: kernels write to it only on failure, and the host reads it without synchronising.
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)


@functools.cache
def error_address() -> int:
    """Return the address that a kernel sets to 1 when its blocks time out waiting for each other."""
    return _error_flag().data_ptr()


@functools.cache
def _error_word() -> ctypes.c_int:
    return ctypes.c_int.from_address(error_address())  # reading a tensor takes microseconds


def raise_if_stalled() -> None:
    """Raise RuntimeError if an earlier kernel timed out. Launches do not synchronise, so this runs at the next call."""
    if _error_word().value != 0:
        _error_word().value = 0
        raise RuntimeError(
            "an earlier egru CUDA kernel timed out because its blocks waited more than two seconds for each other, and "
            "its results are invalid; use backend='reference' to avoid these kernels"
        )
