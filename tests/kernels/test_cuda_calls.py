"""Calls of the CUDA kernels on the device: layers, compilers, graphs, streams, failures, and many calls in a row."""

import pathlib
import threading

import pytest
import torch
from torch import Tensor

import egru
from egru.kernels.cuda import driver
from egru.kernels.problem import Backward, Forward
from egru.kernels.registry import get
from egru.types import ResetGate
from tests.kernels.cuda_problems import GATES, check, make_problem, single_precision

__all__ = ["single_precision"]  # a fixture for every test here

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("B", [2, 40])
@pytest.mark.parametrize("precision", ["bfloat16", ""])
def test_lean_layers_save_less_and_give_the_same_gradients(precision: str, B: int) -> None:
    runs = []
    for lean in (False, True):
        torch.manual_seed(0)
        layer = egru.EGRU(20, 150, lean=lean, device="cuda")
        x = torch.randn(100, B, 20, device="cuda")
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=bool(precision)):
            y, _ = layer(x)
        saved = torch.cuda.memory_allocated() - before
        y.square().sum().backward()
        runs.append((saved, y.detach(), *[p.grad for p in layer.parameters()]))
    full, lean = runs
    gates = 100 * B * 150 * (4 if precision else 16)  # two fp16 values for "before", or four float32
    assert full[0] - lean[0] >= 0.9 * gates
    for a, b in zip(full[1:], lean[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # split-K products may sum in another order


@pytest.mark.parametrize(("reset_gate", "most"), [("after", 14), ("before", 12)])
def test_low_precision_saves_no_more_than_a_dense_layer(reset_gate: ResetGate, most: int) -> None:
    """cuDNN's bf16 GRU saves six numbers and its output: 14 bytes per unit and step."""
    T, B, H = 60, 40, 150
    layer = egru.EGRU(1, H, reset_gate=reset_gate, device="cuda")
    x = torch.randn(T, B, 1, device="cuda")
    saved: set[int] = set()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        y, state = layer(x)
    allocated = torch.cuda.memory_allocated() - before
    ends = 2 * state.c.numel() * 4
    assert allocated <= T * B * H * most + ends + 4096  # thresholds, and rounding to blocks of 512 bytes

    def record(tensor: Tensor) -> Tensor:
        saved.add(tensor.data_ptr())
        return tensor

    with (
        torch.autocast("cuda", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor),
    ):
        second, _ = layer(x)
    assert torch.equal(second, y)
    assert second.data_ptr() not in saved, "the backward pass does not read y"


@pytest.mark.parametrize("B", [2, 40])
@pytest.mark.parametrize("precision", ["bfloat16", ""])
def test_replayed_cuda_graph_gives_the_same_results(precision: str, B: int) -> None:
    kernel, problem = get("cuda"), make_problem(7, B, 6, 90, precision=precision)
    grad = torch.randn(7, B, 90, device="cuda")

    def both() -> tuple[Forward, Backward]:
        out = kernel.forward(problem, True)
        return out, kernel.backward(problem, out.y, out.c, out.reserve, grad, None, None, None, True)

    want_forward, want_backward = both()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward, backward = both()
    problem.input.copy_(problem.input * 1.0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(forward.c, want_forward.c)
    for a, b in zip(backward, want_backward, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("B", [1, 64])
def test_concurrent_streams_give_the_same_results(B: int) -> None:
    kernel = get("cuda")
    problems = [make_problem(40, B, 8, 256, seed=seed) for seed in range(2)]
    want = [kernel.forward(p, False) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        got: list[Forward] = []
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(kernel.forward(problem, False))
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.c, b.c)


def test_runs_in_a_thread_that_has_not_used_cuda() -> None:
    kernel, problem = get("cuda"), make_problem(4, 20, 6, 50)
    want = kernel.forward(problem, False).c.clone()  # compiles the kernels and fills the allocator's cache
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(kernel.forward(problem, False).c))
    thread.start()
    thread.join()
    assert torch.equal(results[0], want)


def test_layer_under_autocast_has_finite_gradients() -> None:
    torch.manual_seed(0)
    layer = egru.EGRU(20, 70, num_layers=2, device="cuda")
    x = torch.randn(12, 9, 20, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = layer(x)
    y.square().sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("B", [2, 30])
@pytest.mark.parametrize("precision", ["bfloat16", ""])
def test_an_early_start_does_not_change_the_results(precision: str, B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer enqueues work on its input before the problem is complete."""
    torch.manual_seed(0)
    layer = egru.EGRU(21, 70, num_layers=2, bidirectional=True, dropconnect=0.3, device="cuda")
    runs = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr("egru.layers.egru.begin_sequence", lambda *_: None)
        x = torch.randn(9, B, 21, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
        torch.manual_seed(2)
        with torch.autocast("cuda", torch.bfloat16, enabled=bool(precision)):
            y, state = layer(x)
        layer.zero_grad()
        (y.square().sum() + state.c.sum()).backward()
        runs.append((y.detach(), x.grad, *[p.grad.clone() for p in layer.parameters() if p.grad is not None]))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_layer_equals_the_eager_one() -> None:
    torch.manual_seed(0)
    layer = egru.EGRU(20, 70, reset_gate="after", device="cuda")
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(6, 9, 20, device="cuda")
    results = []
    for run in (layer, compiled):
        with torch.autocast("cuda", torch.bfloat16):
            y, _ = run(x)
        layer.zero_grad()
        y.square().sum().backward()
        gradient = layer.get_parameter("weight_hh_l0").grad
        assert gradient is not None
        results.append((y.detach(), gradient.clone()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("B", [3, 20])
def test_a_stalled_kernel_times_out_and_the_next_call_raises(B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, problem = get("cuda"), make_problem(4, B, 6, 50)
    want = kernel.forward(problem, False)
    launch = driver.Function.__call__

    def one_block_missing(self: driver.Function, grid: int, args: bytes) -> None:
        launch(self, grid - 1 if self.shared else grid, args)  # only kernels with groups use dynamic shared memory

    monkeypatch.setattr(driver.Function, "__call__", one_block_missing)
    kernel.forward(problem, False)
    torch.cuda.synchronize()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="waited more than two seconds"):
        kernel.forward(problem, False)
    assert torch.equal(kernel.forward(problem, False).c, want.c)


@pytest.mark.slow
def test_many_calls_of_mixed_shapes_neither_hang_nor_leak() -> None:
    """Checks the memory of torch, the driver and the host, and that every result repeats."""
    kernel = get("cuda")
    shapes = [(3, 5, 4, 24), (6, 70, 1, 130), (4, 9, 3, 590), (5, 64, 8, 256), (2, 600, 1, 64), (8, 1, 6, 700)]
    problems = [make_problem(*shape, reset_gate=gate) for shape in shapes for gate in GATES]
    problems.append(make_problem(3, 6, 4, 40, precision=""))
    for problem in problems:
        check(problem)
    first: dict[int, tuple[Tensor, ...]] = {}
    memory: list[tuple[int, int, int]] = []
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for call in range(10_000):
        index = call * 7 % len(problems)
        problem = problems[index]
        out = kernel.forward(problem, True)
        grads = kernel.backward(problem, out.y, out.c, out.reserve, out.y, None, None, None, True)
        assert grads.c0 is not None
        results = (out.c, out.y_last, grads.c0, grads.theta)
        expected = first.setdefault(index, results)
        wrong += sum(
            (a != b).any() for a, b in zip(results, expected, strict=True)
        )  # these are bit-identical when repeated
        del out, grads, results, expected
        if call in (999, 9_999):
            torch.cuda.synchronize()
            resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
            memory.append((torch.cuda.memory_allocated(), -torch.cuda.mem_get_info()[0], resident))
    assert wrong.item() == 0
    early, late = memory
    assert late[0] == early[0], "torch has leaked tensors"
    assert late[1] <= early[1], "the driver has leaked memory"
    assert late[2] - early[2] < 16 << 20, "the host has leaked memory"
