"""Compile CUDA C++ at first use and launch it. NVRTC and the driver are called through ctypes: only torch is required.

Machine code is cached on disk by source, options and compiler version (``cache.py``).
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import struct
from collections.abc import Sequence

import torch

from egru.kernels.cuda import cache


class CudaError(RuntimeError):
    """A call into NVRTC or the driver failed."""


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    folders = [""]
    spec = importlib.util.find_spec("nvidia")
    for root in [] if spec is None else list(spec.submodule_search_locations or []):
        folders += [str(f) + "/" for f in sorted(pathlib.Path(root).glob("*/lib"))]
    for home in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        folders.append(f"{home}/lib64/")
    for folder in folders:
        for name in names:
            try:
                return ctypes.CDLL(folder + name)
            except OSError:
                continue
    raise CudaError(f"{names[0]} was not found; install torch with CUDA, or set CUDA_HOME")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError("libcuda.so.1 was not found; install the NVIDIA driver") from error


def _check(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{call} failed: {(text.value or b'unknown error').decode()} ({status})")


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """Return the machine code of ``source``, from the cache on disk if possible.

    Raises:
        CudaError: If NVRTC is missing or cannot compile the source.
    """
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256("\0".join([source, *options, f"{major.value}.{minor.value}"]).encode()).hexdigest()
    code = cache.load(key)
    if code is None:
        code = _compile(nvrtc, source, options)
        cache.store(key, code)
    return code


def _compile(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"egru.cu", 0, None, None)
    try:
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        if status:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"NVRTC could not compile the kernel (status {status}):\n{log.value.decode()}")
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


_CONFIG = struct.Struct("7I4xPPI4x")  # CUlaunchConfig: grid, block, shared bytes, stream, attributes and their number
_COOPERATIVE, _CLUSTER_DIMENSION = 2, 4  # CU_LAUNCH_ATTRIBUTE_*
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_Arguments = ctypes.c_char_p * 1


class Function:
    """A kernel loaded on the current device.

    Args:
        code: Machine code from :func:`compile_source`.
        name: Name of the kernel.
        block: Threads per block.
        shared: Bytes of dynamic shared memory per block.
        cooperative: Whether all blocks must be resident at the same time.
        cluster: Blocks per cluster, which can read each other's shared memory.
    """

    def __init__(
        self, code: bytes, name: str, *, block: int, shared: int = 0, cooperative: bool = False, cluster: int = 1
    ):
        driver = _driver()
        torch.cuda.synchronize()  # makes torch's context current
        self._device = torch.cuda.current_device()
        self._context = ctypes.c_void_p()
        _check(driver.cuCtxGetCurrent(ctypes.byref(self._context)), "cuCtxGetCurrent")
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), code), "cuModuleLoadData")
        _check(
            driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), "cuModuleGetFunction"
        )
        if shared:
            _check(driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared), "cuFuncSetAttribute")
        if cluster > _PORTABLE_CLUSTER:
            _check(driver.cuFuncSetAttribute(self._function, _LARGE_CLUSTERS, 1), "cuFuncSetAttribute")
        if cluster > 1:
            self._attribute = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
        else:
            self._attribute = _Attribute(_COOPERATIVE, 0, (ctypes.c_uint * 16)(1))
        self._tail = (ctypes.addressof(self._attribute), 1) if cooperative or cluster > 1 else (0, 0)
        self._launch = driver.cuLaunchKernelEx
        self.block, self.shared = block, shared

    def __call__(self, grid: int, args: bytes) -> None:
        """Launch ``grid`` blocks on torch's current stream. ``args`` is the packed argument struct."""
        # No Stream object and no ctypes structures: creating them takes as long as the launch.
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # pyright: ignore[reportPrivateUsage]
        config = _CONFIG.pack(grid, 1, 1, self.block, 1, 1, self.shared, stream, *self._tail)
        status = self._launch(config, self._function, _Arguments(args), None)
        if status == _NO_CONTEXT:  # a thread that has not used CUDA before
            _check(_driver().cuCtxSetCurrent(self._context), "cuCtxSetCurrent")
            status = self._launch(config, self._function, _Arguments(args), None)
        if status:
            _check(status, "cuLaunchKernelEx")
