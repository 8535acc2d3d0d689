"""The CUDA kernels as they are called: layers, compilers, graphs, streams, failures, many calls. On the device."""

import pathlib
import threading

import pytest
import torch
from torch import Tensor

import egru
from egru.kernels.cuda import driver
from egru.kernels.problem import Backward, Forward
from egru.kernels.registry import get
from tests.kernels.cuda_problems import GATES, check, make_problem, single_precision

__all__ = ["single_precision"]  # for every test here

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("B", [2, 40])
@pytest.mark.parametrize("precision", ["bfloat16", ""])
def test_lean_layers_save_less_and_give_the_same_gradients(precision: str, B: int) -> None:
    found = []
    for lean in (False, True):
        torch.manual_seed(0)
        layer = egru.EGRU(20, 150, lean=lean, device="cuda")
        x = torch.randn(100, B, 20, device="cuda")
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=bool(precision)):
            y, _ = layer(x)
        saved = torch.cuda.memory_allocated() - before
        y.square().sum().backward()
        found.append((saved, y.detach(), *[p.grad for p in layer.parameters()]))
    full, lean = found
    gates = 100 * B * 150 * (4 if precision else 16)  # two of fp16 in the "before" form, four of float32
    assert full[0] - lean[0] >= 0.9 * gates
    for a, b in zip(full[1:], lean[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # split-K products may add in another order


@pytest.mark.parametrize(("reset_gate", "most"), [("after", 14), ("before", 12)])
def test_low_precision_holds_no_more_than_a_dense_layer(reset_gate: str, most: int) -> None:
    """cuDNN's GRU in bf16 keeps six numbers and its output, 14 bytes a unit and step."""
    T, B, H = 60, 40, 150
    layer = egru.EGRU(1, H, reset_gate=reset_gate, device="cuda")
    x = torch.randn(T, B, 1, device="cuda")
    saved: set[int] = set()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        y, state = layer(x)
    held = torch.cuda.memory_allocated() - before
    ends = 2 * state.c.numel() * 4
    assert held <= T * B * H * most + ends + 4096  # thresholds, and blocks of 512 bytes

    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.data_ptr())
        return tensor

    with torch.autocast("cuda", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        again, _ = layer(x)
    assert torch.equal(again, y)
    assert again.data_ptr() not in saved, "the backward pass does not read y"


@pytest.mark.parametrize("B", [2, 40])
@pytest.mark.parametrize("precision", ["bfloat16", ""])
def test_captured_in_a_cuda_graph(precision: str, B: int) -> None:
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
def test_two_streams_at_once(B: int) -> None:
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


def test_a_thread_that_has_not_used_cuda() -> None:
    kernel, problem = get("cuda"), make_problem(4, 20, 6, 50)
    want = kernel.forward(problem, False).c.clone()  # everything is compiled, and memory is there
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(kernel.forward(problem, False).c))
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)


def test_the_layer_under_autocast() -> None:
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
def test_an_early_start_changes_nothing(precision: str, B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer starts on its input before the problem is complete; the kernel alone does not."""
    torch.manual_seed(0)
    layer = egru.EGRU(21, 70, num_layers=2, bidirectional=True, dropconnect=0.3, device="cuda")
    found = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr("egru.layers.egru.begin_sequence", lambda *_: None)
        x = torch.randn(9, B, 21, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
        torch.manual_seed(2)
        with torch.autocast("cuda", torch.bfloat16, enabled=bool(precision)):
            y, state = layer(x)
        layer.zero_grad()
        (y.square().sum() + state.c.sum()).backward()
        found.append((y.detach(), x.grad, *[p.grad.clone() for p in layer.parameters() if p.grad is not None]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_compiled_layer_equals_the_eager_one() -> None:
    torch.manual_seed(0)
    layer = egru.EGRU(20, 70, reset_gate="after", device="cuda")
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(6, 9, 20, device="cuda")
    found = []
    for run in (layer, compiled):
        with torch.autocast("cuda", torch.bfloat16):
            y, _ = run(x)
        layer.zero_grad()
        y.square().sum().backward()
        gradient = layer.get_parameter("weight_hh_l0").grad
        assert gradient is not None
        found.append((y.detach(), gradient.clone()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("B", [3, 20])
def test_a_stalled_group_gives_up_and_the_next_call_raises(B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, problem = get("cuda"), make_problem(4, B, 6, 50)
    want = kernel.forward(problem, False)
    launch = driver.Function.__call__

    def one_block_missing(self: driver.Function, grid: int, args: bytes) -> None:
        launch(self, grid - 1 if self.shared else grid, args)  # only persistent kernels ask for shared memory

    monkeypatch.setattr(driver.Function, "__call__", one_block_missing)
    kernel.forward(problem, False)
    torch.cuda.synchronize()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="waited more than two seconds"):
        kernel.forward(problem, False)
    assert torch.equal(kernel.forward(problem, False).c, want.c)


@pytest.mark.slow
def test_many_calls_of_mixed_shapes() -> None:
    """No hang, no leak (of torch's memory, of the driver's, of the host's), and every result as it was first."""
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
        found = (out.c, out.y_last, grads.c0, grads.theta)
        expected = first.setdefault(index, found)
        wrong += sum((a != b).any() for a, b in zip(found, expected, strict=True))  # all of these repeat to the bit
        del out, grads, found, expected
        if call in (999, 9_999):
            torch.cuda.synchronize()
            resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
            memory.append((torch.cuda.memory_allocated(), -torch.cuda.mem_get_info()[0], resident))
    assert wrong.item() == 0
    early, late = memory
    assert late[0] == early[0], "torch holds more tensors than before"
    assert late[1] <= early[1], "the driver has less memory left"
    assert late[2] - early[2] < 16 << 20, "the host holds more"
