"""The CUDA source of the cluster kernels, run on the CPU with a coroutine per CUDA thread, against float64 autograd."""

import ctypes
import dataclasses
import functools
import hashlib
import mmap
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from egru.events import Surrogate
from egru.kernels import run_sequence
from egru.kernels.cuda import cluster, kernel
from egru.kernels.cuda.plan import Chip
from egru.kernels.cuda.tensors import start_state
from egru.kernels.problem import Forward, Problem
from egru.types import Reset, ResetGate

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="requires Linux and a C++ compiler (g++)"
)

SHIM = Path(__file__).with_name("emulated_cuda.hpp")
CHIP = Chip(132, 232448)
COMPILE = ["g++", "-std=c++20", "-O0", "-w", "-fPIC"]
SHARED = "extern __shared__ __align__(16) float4 memory[];"


class EmulatedFunction:
    """A kernel compiled with g++, launched like :class:`egru.kernels.cuda.driver.Function`."""

    def __init__(self, source: str, name: str, struct: str, blocks: int, bytes: int, folder: Path) -> None:
        self.blocks, self.bytes = blocks, bytes
        assert SHARED in source
        source = source.replace(SHARED, "float4* const memory = block_memory();")
        source = f"""
            #include "{SHIM.name}"
            inline void share(float* place, float value);
            {source}
            inline void share(float* place, float value) {{ share_with(C, place, value); }}
            static const {struct}* arguments;
            static void run_thread() {{
              {name}(*arguments);
              current->state = FINISHED;
            }}
            extern "C" bool run(const {struct}* a, int clusters, int bytes) {{
              arguments = a;
              return run_clusters(run_thread, clusters, C, THREADS, bytes);
            }}"""
        code = folder / f"{hashlib.sha256(source.encode()).hexdigest()}.cpp"
        library = code.with_suffix(".so")
        if not library.exists():
            code.write_text(source)
            subprocess.run([*COMPILE, "-shared", "-o", library, code], check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.run.restype = ctypes.c_bool

    def __call__(self, grid: int, args: bytes) -> None:
        assert grid % self.blocks == 0
        assert self.library.run(args, grid // self.blocks, self.bytes), "invalid memory access or deadlock"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the precompiled shim, which halves the time of each compilation."""
    folder = tmp_path_factory.mktemp("emulated")
    shutil.copy(SHIM, folder)
    subprocess.run([*COMPILE, "-x", "c++-header", SHIM.name], cwd=folder, check=True)
    return folder


def emulated_gather(
    problem: Problem, padded: int, hh: Tensor, hh_z: Tensor | None, ih: Tensor, sums: int, parts: int
) -> tuple[Tensor, ...]:
    """What ``source/gather.cu`` does with the results of a cluster kernel."""
    H, after = padded, problem.reset_gate == "after"
    flat = torch.frombuffer((ctypes.c_float * (parts * 2 * H)).from_address(sums), dtype=torch.float32)
    theta, sum_z = flat.view(parts, 2, H).sum(0)
    blocks = hh[: (4 if after else 3) * H].unflatten(0, (-1, H))
    first = 1 if after else 0
    v_z = blocks[0, :, :H] if hh_z is None else hh_z
    r, u = blocks[first, :, H], blocks[first + 1, :, H]
    weight_hh = torch.cat([blocks[first, :, :H], blocks[first + 1, :, :H], v_z])
    bias_hh_z = blocks[0, :, H] if after else sum_z
    return ih.clone(), weight_hh, torch.cat([r, u, sum_z]), torch.cat([r, u, bias_hh_z]), theta.clone()


@pytest.fixture
def cuda_kernel(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[kernel.CUDAKernel]:
    """The CUDA backend with its cluster kernels on the CPU. Memory that they do not write is NaN."""
    torch.set_default_dtype(torch.float32)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN

    @functools.cache
    def function(plan: cluster.ClusterPlan, variant: cluster.Variant, device: int) -> EmulatedFunction:
        name = f"cluster_{variant.direction}"
        struct = (cluster.FORWARD if variant.direction == "forward" else cluster.BACKWARD).name
        return EmulatedFunction(cluster.kernel_source(plan, variant), name, struct, plan.blocks, plan.bytes, folder)

    monkeypatch.setattr(cluster, "_function", function)
    monkeypatch.setattr(cluster, "is_hopper", lambda _: True)
    monkeypatch.setattr(cluster, "chip", lambda _: CHIP)
    monkeypatch.setattr(cluster, "gather_gradients", emulated_gather)
    monkeypatch.setattr(kernel, "on_device", lambda _: torch.no_grad())
    clear_caches()
    yield kernel.CUDAKernel()
    torch.use_deterministic_algorithms(deterministic)
    clear_caches()


def clear_caches() -> None:
    cluster._plan.cache_clear()
    cluster.choose_plan.cache_clear()


def at_page_end(tensor: Tensor) -> Tensor:
    """Copy a tensor to memory that is followed by an inaccessible page, after at most 15 bytes."""
    end = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    page = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + end
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    offset = (end - tensor.nbytes) // 16 * 16
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return flat.view(tensor.shape).copy_(tensor)


def make_problem(T: int, B: int, inputs: int, H: int, gate: ResetGate, reset: Reset, full: bool) -> Problem:
    generator = torch.Generator().manual_seed(T + B + inputs + H)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    c0 = random(B, H)
    return Problem(
        input=random(T, B, inputs),
        c0=c0,
        y0=c0 * (c0.abs() > 0.2),
        weight_ih=random(3 * H, inputs) / inputs**0.5,
        weight_hh=random(3 * H, H) / H**0.5,
        bias_ih=random(3 * H) / 2 if full else None,
        bias_hh=random(3 * H) / 2 if full else None,
        theta=random(H).abs() / 4,
        reset_scale=torch.tensor(0.8),
        keep=(torch.rand(T, B, H, generator=generator) < 0.2).float() if full else None,
        lengths=torch.randint(1, T + 1, (B,), generator=generator) if full else None,
        reset=reset,
        reset_gate=gate,
        surrogate=Surrogate(width=0.7, height=0.9, bounded=full),
        precision="",
    )


@pytest.mark.parametrize("gate", ["after", "before"])
@pytest.mark.parametrize(
    ("T", "B", "inputs", "H", "rows", "lanes", "reset", "full"),
    [(4, 3, 3, 7, 2, 1, "output", True), (3, 2, 65, 40, 1, 1, "none", False), (1, 1, 1, 1, 8, 1, "hard", False),
     (3, 5, 6, 33, 4, 1, "hard", True), (4, 11, 2, 70, 8, 1, "threshold", True), (4, 3, 3, 7, 2, 4, "output", True),
     (3, 2, 65, 40, 1, 4, "none", False), (1, 1, 1, 1, 2, 4, "hard", False), (3, 5, 21, 33, 4, 4, "hard", True),
     (4, 3, 2, 70, 1, 4, "threshold", True), (2, 3, 64, 128, 2, 4, "output", False)],
)  # fmt: skip
def test_sequences_and_gradients_match_float64(
    cuda_kernel: kernel.CUDAKernel, monkeypatch: pytest.MonkeyPatch, T: int, B: int, inputs: int, H: int, rows: int,
    lanes: int, gate: ResetGate, reset: Reset, full: bool,
) -> None:  # fmt: skip
    choose_division(monkeypatch, rows, lanes)
    problem = make_problem(T, B, inputs, H, gate, reset, full)
    tensors = [None if tensor is None else at_page_end(tensor) for tensor in problem.tensors()]
    problem = Problem(*tensors, *problem.options())  # pyright: ignore[reportArgumentType]
    forward_plan = cluster.find_plan(problem.input, H, gate, "")
    assert forward_plan is not None
    assert (forward_plan.rows, forward_plan.lanes) == (rows, lanes)
    got, plan = run_forward(cuda_kernel, problem, save=True)
    exact, leaves = reference(problem)
    assert H == 1 or (exact[0] != 0).any()
    for name, expected in zip(("y", "c", "c_last", "y_last"), exact, strict=True):
        torch.testing.assert_close(getattr(got, name).double(), expected.detach(), atol=2e-6, rtol=2e-6)

    grads = [at_page_end(torch.randn_like(part)) for part in got[:4]]
    result = cluster.backward(problem, plan, at_page_end(got.c), at_page_end(got.reserve), *grads, input_gradient=True)
    found = [gradient for gradient, leaf in zip(result, problem.tensors()[:8], strict=True) if leaf is not None]
    for gradient, expected in zip(found, torch.autograd.grad(exact, leaves, [g.double() for g in grads]), strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient.double(), expected, atol=1e-5 * max(expected.abs().max().item(), 1), rtol=0)


@pytest.mark.parametrize("gate", ["after", "before"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_views_and_absent_gradients_give_the_same_result(
    cuda_kernel: kernel.CUDAKernel, monkeypatch: pytest.MonkeyPatch, gate: ResetGate, lanes: int
) -> None:
    choose_division(monkeypatch, 2, lanes)
    problem = make_problem(4, 3, 3, 7, gate, "output", full=True)
    assert problem.keep is not None
    c0, y0 = torch.randn(7), torch.randn(7).relu()
    copies = dataclasses.replace(problem, c0=c0.repeat(3, 1), y0=y0.repeat(3, 1))
    views = dataclasses.replace(
        problem,
        c0=c0.expand(3, 7),
        y0=y0.expand(3, 7),
        input=problem.input.transpose(0, 1).contiguous().transpose(0, 1),
        weight_ih=problem.weight_ih.T.contiguous().T,
        weight_hh=problem.weight_hh.T.contiguous().T,
        keep=problem.keep.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    )
    assert start_state(views)[2] == 0
    expected, plan = run_forward(cuda_kernel, copies, save=True)
    for save in (False, True):
        got, _ = run_forward(cuda_kernel, views, save)
        assert (got.reserve.numel() > 0) is save
        torch.testing.assert_close(got[:4], expected[:4], rtol=0, atol=0)
    for present in range(4):
        grads = [torch.randn_like(part) if i == present else torch.zeros_like(part) for i, part in enumerate(got[:4])]
        absent = [grad if i == present else None for i, grad in enumerate(grads)]
        exact = cluster.backward(copies, plan, expected.c, expected.reserve, *grads, input_gradient=True)
        result = cluster.backward(views, plan, got.c, got.reserve, *absent, input_gradient=False)
        assert result.input is None
        torch.testing.assert_close(result[1:], exact[1:], rtol=1e-6, atol=1e-6)


def choose_division(monkeypatch: pytest.MonkeyPatch, rows: int, lanes: int) -> None:
    """Let all plans have ``rows`` rows per cluster, and forward kernels ``lanes`` lanes per unit."""
    monkeypatch.setattr(cluster, "ROWS", (rows,))
    monkeypatch.setattr(cluster, "STEP_OVERHEAD", 1.0 if lanes == 1 else 30.0)
    monkeypatch.setattr(cluster, "BLOCK_STEP_OVERHEAD", 30.0 if lanes == 1 else 1.0)


def run_forward(cuda_kernel: kernel.CUDAKernel, problem: Problem, save: bool) -> tuple[Forward, cluster.ClusterPlan]:
    """Run the forward pass. Returns its result and the plan of the backward pass."""
    units, gate = problem.theta.shape[0], problem.reset_gate
    pending = cuda_kernel.begin(problem.input, problem.weight_ih, problem.weight_hh, gate, "")
    assert pending is not None
    assert isinstance(pending.plan, cluster.ClusterPlan)
    plan = cluster.find_plan(problem.input, units, gate, "", "backward")
    assert plan is not None
    return cluster.forward(problem, pending.plan, pending, save), plan


def reference(problem: Problem) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Run the reference in float64. Returns its outputs and the leaves of the graph, in the order of the fields."""
    tensors = [t.double() if t is not None and t.is_floating_point() else t for t in problem.tensors()]
    leaves = [t.requires_grad_() for t in tensors[:8] if t is not None]
    y, c, state = run_sequence(Problem(*tensors, *problem.options()), "reference")  # pyright: ignore[reportArgumentType]
    return (y, c, state.c, state.y), leaves
