"""The CUDA source of the cluster kernels, run on the CPU with one thread per CUDA thread, against float64 autograd."""

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from egru.events import Surrogate
from egru.kernels import run_sequence
from egru.kernels.cuda import cluster, kernel
from egru.kernels.cuda.plan import Chip
from egru.kernels.problem import Problem
from egru.types import Reset, ResetGate

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SHIM = Path(__file__).with_name("emulated_cuda.hpp")
CHIP = Chip(132, 232448)
SHARED = "extern __shared__ __align__(16) float4 memory[];"


class EmulatedFunction:
    """A kernel compiled with g++, launched like :class:`egru.kernels.cuda.driver.Function`."""

    def __init__(self, source: str, name: str, struct: str, blocks: int, bytes: int, folder: Path) -> None:
        self.blocks, self.bytes = blocks, bytes
        assert SHARED in source
        source = source.replace(SHARED, "float4* const memory = block_memory();")
        source = f"""{SHIM.read_text()}
            inline void share(float* place, float value);
            {source}
            inline void share(float* place, float value) {{ share_with(C, place, value); }}
            extern "C" void run(const {struct}* a, int clusters, int bytes) {{
              run_clusters([=] {{ {name}(*a); }}, clusters, C, THREADS, bytes);
            }}"""
        code = folder / "kernel.cpp"
        code.write_text(source)
        library = folder / "kernel.so"
        subprocess.run(
            ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-pthread", "-o", library, code], check=True
        )
        self.library = ctypes.CDLL(str(library))

    def __call__(self, grid: int, args: bytes) -> None:
        self.library.run(args, grid // self.blocks, self.bytes)


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
def cuda_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[kernel.CUDAKernel]:
    """The CUDA backend with its cluster kernels on the CPU."""
    torch.set_default_dtype(torch.float32)

    @functools.cache
    def function(plan: cluster.ClusterPlan, variant: cluster.Variant, device: int) -> EmulatedFunction:
        name = f"cluster_{variant.direction}"
        struct = (cluster.FORWARD if variant.direction == "forward" else cluster.BACKWARD).name
        folder = tmp_path / f"{variant.direction}"
        folder.mkdir()
        return EmulatedFunction(cluster.kernel_source(plan, variant), name, struct, plan.blocks, plan.bytes, folder)

    monkeypatch.setattr(cluster, "_function", function)
    monkeypatch.setattr(cluster, "supports_clusters", lambda _: True)
    monkeypatch.setattr(cluster, "chip", lambda _: CHIP)
    monkeypatch.setattr(cluster, "gather_gradients", emulated_gather)
    monkeypatch.setattr(kernel, "on_device", lambda _: torch.no_grad())
    clear_caches()
    yield kernel.CUDAKernel()
    clear_caches()


def clear_caches() -> None:
    cluster._plan.cache_clear()
    cluster.choose_plan.cache_clear()


def make_problem(T: int, B: int, inputs: int, H: int, gate: ResetGate, reset: Reset, full: bool) -> Problem:
    generator = torch.Generator().manual_seed(T + B + inputs + H)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    c0 = random(B, H)
    return Problem(
        input=random(T, B, inputs),
        c0=c0,
        y0=c0 * (c0 > 0.2),
        weight_ih=random(3 * H, inputs) / inputs**0.5,
        weight_hh=random(3 * H, H) / H**0.5,
        bias_ih=random(3 * H) / 2 if full else None,
        bias_hh=random(3 * H) / 2 if full else None,
        theta=random(H).abs() / 4,
        reset_scale=torch.tensor(0.8),
        keep=(torch.rand(T, 1, H, generator=generator) < 0.2).float() if full else None,
        lengths=torch.randint(1, T + 1, (B,), generator=generator) if full else None,
        reset=reset,
        reset_gate=gate,
        surrogate=Surrogate(width=0.7, height=0.9),
        precision="",
    )


@pytest.mark.parametrize("gate", ["after", "before"])
@pytest.mark.parametrize(
    ("T", "B", "inputs", "H", "rows", "reset", "full"),
    [(4, 3, 3, 7, 2, "output", True), (3, 2, 65, 40, 1, "none", False), (1, 1, 1, 1, 8, "hard", False),
     (3, 5, 6, 33, 4, "hard", True), (4, 11, 2, 70, 8, "threshold", True)],
)  # fmt: skip
def test_sequences_and_gradients_match_float64(
    cuda_kernel: kernel.CUDAKernel, monkeypatch: pytest.MonkeyPatch, T: int, B: int, inputs: int, H: int, rows: int,
    gate: ResetGate, reset: Reset, full: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(cluster, "ROWS", (rows,))
    problem = make_problem(T, B, inputs, H, gate, reset, full)
    pending = cuda_kernel.begin(problem.input, problem.weight_ih, problem.weight_hh, gate, "")
    assert pending is not None
    assert isinstance(pending.plan, cluster.ClusterPlan)
    got = cluster.forward(problem, pending.plan, pending, save=True)
    exact, leaves = reference(problem)
    assert H == 1 or (exact[0] != 0).any()
    for name, expected in zip(("y", "c", "c_last", "y_last"), exact, strict=True):
        torch.testing.assert_close(getattr(got, name).double(), expected.detach(), atol=2e-6, rtol=2e-6)

    grads = [torch.randn_like(part) for part in got[:4]]
    plan = cluster.find_plan(problem.input, H, gate, "", "backward")
    assert plan is not None
    result = cluster.backward(problem, plan, got.c, got.reserve, *grads, input_gradient=True)
    found = [gradient for gradient, leaf in zip(result, problem.tensors()[:8], strict=True) if leaf is not None]
    for gradient, expected in zip(found, torch.autograd.grad(exact, leaves, [g.double() for g in grads]), strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient.double(), expected, atol=1e-5 * max(expected.abs().max().item(), 1), rtol=0)


def reference(problem: Problem) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Run the reference in float64. Returns its outputs and the leaves of the graph, in the order of the fields."""
    tensors = [t.double() if t is not None and t.is_floating_point() else t for t in problem.tensors()]
    leaves = [t.requires_grad_() for t in tensors[:8] if t is not None]
    y, c, state = run_sequence(Problem(*tensors, *problem.options()), "reference")  # pyright: ignore[reportArgumentType]
    return (y, c, state.c, state.y), leaves
