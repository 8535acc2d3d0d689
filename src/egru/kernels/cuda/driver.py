"""CUDA C++ compiled at first use: NVRTC and the driver through ctypes, so that nothing but torch is needed.

Machine code is cached on disk, keyed by source, options and compiler version (``EGRU_CACHE_DIR`` overrides the place).
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Sequence

import torch

SOURCE = pathlib.Path(__file__).parent / "source"


class CudaError(RuntimeError):
    """A call into NVRTC or the driver failed."""


def cache_folder() -> pathlib.Path:
    named = os.environ.get("EGRU_CACHE_DIR")
    base = pathlib.Path(named) if named else pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "egru"
    return base.expanduser() / "cuda"


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
    raise CudaError(f"{names[0]} was not found: install torch with CUDA, or set CUDA_HOME")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError("libcuda.so.1 was not found: no NVIDIA driver on this machine") from error


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """Machine code for ``source``; from the cache on disk where it is known."""
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256("\0".join([source, *options, f"{major.value}.{minor.value}"]).encode()).hexdigest()
    path = cache_folder() / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
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
            raise CudaError(f"NVRTC could not compile ({status}):\n{log.value.decode()}")
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    try:  # a cache that cannot be written costs time, not correctness
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code.raw)
        os.replace(file.name, path)
    except OSError:
        pass
    return code.raw


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_*
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Function:
    """One kernel, loaded on one device, with its launch shape."""

    def __init__(self, code: bytes, name: str, *, block: int, shared: int = 0, cooperative: bool = False):
        driver = _driver()
        torch.cuda.synchronize()  # makes torch's context current
        self._context = ctypes.c_void_p()
        _check(driver.cuCtxGetCurrent(ctypes.byref(self._context)), "cuCtxGetCurrent")
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), code), "cuModuleLoadData")
        _check(
            driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), "cuModuleGetFunction"
        )
        if shared:
            _check(driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared), "cuFuncSetAttribute")
        attributes: list[_Attribute] = []
        if cooperative:
            attributes.append(_Attribute(_COOPERATIVE, 0, (ctypes.c_uint * 16)(1)))
        self._attributes = (_Attribute * max(1, len(attributes)))(*attributes)
        self._count = len(attributes)
        self.block, self.shared = block, shared

    def __call__(self, grid: int, args: "ctypes.Structure | ctypes.Array[ctypes.c_char]") -> None:
        driver = _driver()
        driver.cuCtxSetCurrent(self._context)  # autograd's threads may not have used CUDA before
        # No Stream object: making one costs as much as a launch.
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        config = _LaunchConfig(grid, 1, 1, self.block, 1, 1, self.shared, stream, self._attributes, self._count)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        status = driver.cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        if status:
            _check(status, "cuLaunchKernelEx")
