"""GPU energy from NVML, the library of the NVIDIA driver, called through ctypes."""

import ctypes
import sys

import torch

from egru.energy.unavailable import CounterUnavailable

LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


class Gpu:
    """The energy counter of a GPU, in millijoules since the driver was loaded (Volta and later).

    Args:
        library: The loaded library, initialised.
        handle: The device.
        name: Name of the counter.
        source: Where it is read.

    Raises:
        CounterUnavailable: If the GPU has no such counter.
    """

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, name: str, source: str) -> None:
        self.name, self.source = name, source
        self._library, self._handle = library, handle
        self.joules()

    def joules(self) -> float:
        """Return the joules since the driver was loaded."""
        value = ctypes.c_ulonglong()
        _call(self._library, "nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(value))
        return value.value * 1e-3

    def close(self) -> None:
        """Shut the library down. Every counter has initialised it once."""
        self._library.nvmlShutdown()


def counter(device: torch.device, library: str = LIBRARY) -> Gpu:
    """Return the energy counter of a CUDA device.

    Raises:
        CounterUnavailable: If NVML is missing, or the GPU is not found or has no energy counter.
    """
    return open_gpu(_uuid(device), _name(device), library)


def open_gpu(uuid: str, name: str, library: str = LIBRARY) -> Gpu:
    """Return the energy counter of the GPU with this UUID, without its prefix "GPU-"; raises as :func:`counter`.

    If NVML does not know the UUID, as in some containers, and there is a single GPU, that one is used.
    """
    try:
        loaded = ctypes.CDLL(library)
    except OSError:
        raise CounterUnavailable(f"GPU: {library}, the NVML library of the NVIDIA driver, is not installed") from None
    _call(loaded, "nvmlInit_v2")
    try:
        handle = ctypes.c_void_p()
        try:
            _call(loaded, "nvmlDeviceGetHandleByUUID", ctypes.c_char_p(f"GPU-{uuid}".encode()), ctypes.byref(handle))
        except CounterUnavailable:
            count = ctypes.c_uint()
            _call(loaded, "nvmlDeviceGetCount_v2", ctypes.byref(count))
            if count.value != 1:
                raise
            _call(loaded, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(handle))
        return Gpu(loaded, handle, name, "NVML, energy counter of the GPU")
    except CounterUnavailable:
        loaded.nvmlShutdown()
        raise


def _call(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    """Call a function of NVML, whose result is 0 or an error number."""
    try:
        error = getattr(library, function)(*arguments)
    except AttributeError:
        raise CounterUnavailable(f"GPU: this version of NVML has no {function}") from None
    if error:
        library.nvmlErrorString.restype = ctypes.c_char_p
        message = library.nvmlErrorString(error)
        reason = message.decode(errors="replace") if message else f"error {error}"
        raise CounterUnavailable(f"GPU: {function} of NVML failed: {reason}")


def _uuid(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "unknown"))


def _name(device: torch.device) -> str:
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
