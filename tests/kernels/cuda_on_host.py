"""Run the fused steps of the CUDA kernels on the CPU: their source, compiled as C++ with a loop over the threads.

Conversions to bf16 and fp16 (``operand.cuh``, inline assembly) are replaced. Everything else is the code that runs on
a GPU, with the host side and cuBLAS's products in plain torch.
"""

import contextlib
import ctypes
import itertools
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch

from egru.kernels.cuda import cluster, kernel, lstm_steps, persistent, products, small_batch, sources, steps, stepwise
from egru.types import COMPARES, EVENTS, RESET_GATES, RESETS

COMPILER = shutil.which("c++")
STRUCTS = {
    "lstm_forward": "LstmForward",
    "lstm_backward": "LstmBackward",
    "forward_gates": "StepForward",
    "forward_state": "StepForward",
    "backward_state": "StepBackward",
    "backward_reset": "StepBackward",
}
SHIM = """
#include <cmath>
#include <cstring>
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float __fdividef(float a, float b) { return a / b; }
static struct { int x; } blockIdx, threadIdx, blockDim;
static unsigned short half_bits(float x) {
  _Float16 h = (_Float16)x;
  unsigned short bits;
  memcpy(&bits, &h, 2);
  return bits;
}
static float half_value(unsigned short bits) {
  _Float16 h;
  memcpy(&h, &bits, 2);
  return (float)h;
}
static unsigned short bfloat_bits(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
"""
OPERAND = """
#if LOW == 0
static Operand to_operand(float x) { return x; }
#elif LOW == 1
static Operand to_operand(float x) { return bfloat_bits(x); }
#else
static Operand to_operand(float x) { return half_bits(x); }
#endif
static u32 pack_half(float a, float b) {
  a = fminf(fmaxf(a, -65504.f), 65504.f), b = fminf(fmaxf(b, -65504.f), 65504.f);
  return half_bits(a) | (u32)half_bits(b) << 16;
}
static float2 unpack_half(u32 d) { return {half_value(d & 0xffff), half_value(d >> 16)}; }
static float bias(const float* p, int i) { return p ? p[i] : 0.f; }
"""
RUN = """
extern "C" void {symbol}(int blocks, int threads, const void* packed) {{
  {space}::{struct} arguments;
  memcpy(&arguments, packed, sizeof arguments);
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {space}::{name}(arguments);
}}
"""


def all_sources() -> dict[str, tuple[str, ...]]:
    """Return the names of the kernels in the source of every combination of options."""
    found = {}
    for reset, precision in itertools.product(RESETS, sources.PRECISIONS):
        for reset_gate in RESET_GATES:
            names = ("forward_gates", "forward_state", "backward_state", "backward_reset")
            found[stepwise.kernel_source(reset, reset_gate, precision)] = names
        for compare, events in itertools.product(COMPARES, EVENTS):
            if events != "delta" or (reset, compare) == ("none", "output"):
                found[lstm_steps.kernel_source(reset, compare, events, precision)] = lstm_steps.NAMES
    return found


class HostKernels:
    """The kernels of :func:`all_sources`, compiled for this machine."""

    def __init__(self, folder: pathlib.Path) -> None:
        operand = (pathlib.Path(sources.__file__).parent / "source" / "operand.cuh").read_text()
        self._spaces: dict[str, str] = {}
        text = [SHIM]
        for i, (source, names) in enumerate(all_sources().items()):
            space = self._spaces[source] = f"variant{i}"
            assert operand in source
            body = source.replace(operand, OPERAND).replace('extern "C" __global__', "static")
            defined = [line.split()[1] for line in body.splitlines() if line.startswith("#define")]
            text.append("".join(f"#undef {name}\n" for name in defined))
            text.append(f"namespace {space} {{\n{body}\n}}\n")
            text += [
                RUN.format(symbol=f"{space}_{name}", space=space, struct=STRUCTS[name], name=name) for name in names
            ]
        (folder / "steps.cpp").write_text("".join(text))
        command = [COMPILER or "c++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "steps.cpp", "-o", "steps.so"]
        subprocess.run(command, cwd=folder, check=True, timeout=300)
        self._library = ctypes.CDLL(str(folder / "steps.so"))

    def functions(self, source: str, names: tuple[str, ...], device: int) -> dict[str, Callable[[int, bytes], None]]:
        """Return functions in place of :func:`egru.kernels.cuda.steps.compile_functions`."""
        return {name: self._function(f"{self._spaces[source]}_{name}") for name in names}

    def _function(self, symbol: str) -> Callable[[int, bytes], None]:
        run = self._library[symbol]
        return lambda grid, args: run(grid, 256, args)


@contextlib.contextmanager
def on_host(kernels: HostKernels) -> Iterator[None]:
    """Let the CUDA backend run on CPU tensors, always in fused steps."""
    caches = (lstm_steps._functions, stepwise._functions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "compile_functions", kernels.functions)
        patch.setattr(products, "product", lambda a, b: a.float() @ b.float())
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(kernel, "on_device", lambda index: contextlib.nullcontext())
        for module in (cluster, persistent, small_batch):
            patch.setattr(module, "find_plan", lambda *_, **__: None)
        for cached in caches:
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in caches:
                cached.cache_clear()


@pytest.fixture(scope="session")
def host_kernels() -> Iterator[HostKernels]:
    if COMPILER is None:
        pytest.skip("requires a C++ compiler (c++)")
    with tempfile.TemporaryDirectory() as folder:
        yield HostKernels(pathlib.Path(folder))
