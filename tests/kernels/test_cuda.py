"""The CUDA kernels against the float64 reference, on the device.

Rounding can move a state across its threshold, after which trajectories part for good. So the forward pass is checked
step by step, each step of the reference starting from what the kernel had carried into it; and the backward pass is
checked on the kernel's own forward pass.
"""

import ctypes
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import egru
from egru import functional
from egru.events import RESETS, EventState, Surrogate
from egru.kernels.cuda import arrange, driver, few, pack, persistent
from egru.kernels.problem import Backward, Forward, Problem
from egru.kernels.registry import get

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GATES = ("after", "before")


@pytest.fixture(autouse=True)
def _single_precision() -> Iterator[None]:
    """The state is float32, and cuBLAS need not be deterministic here; whatever else the test session defaults to."""
    before, dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(before)


# Of the state (absolute) and of gradients (norm).
TOLERANCE = {"": (2e-5, 2e-5), "bfloat16": (2e-3, 1.5e-2), "float16": (1e-3, 4e-3)}


def make_problem(
    T: int,
    B: int,
    inputs: int,
    H: int,
    *,
    reset: str = "output",
    reset_gate: str = "after",
    precision: str = "bfloat16",
    bias: bool = True,
    keep: bool = False,
    ragged: bool = False,
    bounded: bool = False,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator("cuda").manual_seed(seed + 7919 * T + 31 * B + inputs + H)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator) * scale

    c0 = random(B, H, scale=0.3)
    return Problem(
        input=random(T, B, inputs),
        c0=c0,
        y0=c0 * (c0 > 0.1),
        weight_ih=random(3 * H, inputs, scale=1.5 / inputs**0.5),
        weight_hh=random(3 * H, H, scale=1.5 / H**0.5),
        bias_ih=random(3 * H, scale=0.3) if bias else None,
        bias_hh=random(3 * H, scale=0.3) if bias else None,
        theta=0.1 + 0.1 * random(H).abs(),
        reset_scale=torch.tensor(0.8, device="cuda"),
        keep=(random(T, B, H) > 0.5).float() if keep else None,
        lengths=torch.randint(1, T + 1, (B,), device="cuda", generator=generator) if ragged else None,
        reset=reset,
        reset_gate=reset_gate,
        surrogate=Surrogate(width=0.6, height=0.5, bounded=bounded),
        precision=precision,
    )


def in_float64(problem: Problem) -> Problem:
    """The same problem with the operands of products rounded as the kernel rounds them."""
    low = getattr(torch, problem.precision or "float32")
    values = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    for name in ("input", "weight_ih", "weight_hh"):
        values[name] = values[name].to(low)
    doubles = {n: v.double() for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return dataclasses.replace(problem, **doubles, precision="")


def each_step(exact: Problem, low: torch.dtype, out: Forward) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the threshold sees and the gates, every step from the state the kernel carried into it."""
    H = out.c.shape[-1]
    seen = out.c.double()
    e = seen > exact.theta
    carried = seen - exact.reset_scale * exact.theta * e if exact.reset == "threshold" else seen
    c = torch.cat([exact.c0[None], carried[:-1]])
    y = torch.cat([exact.y0[None], out.y[:-1].double()])
    e = torch.cat([(exact.y0 != 0)[None], e[:-1]]).double()
    memory = c * (1 - exact.reset_scale * e) if exact.reset == "hard" else c
    p = torch.nn.functional.linear(exact.input, exact.weight_ih, exact.bias_ih)
    y_low = y.to(low).double()
    update = functional.gru_update(p, y_low, memory, exact.weight_hh, exact.bias_hh, exact.reset_gate)
    state, gates = update.c, update.gates
    if exact.reset_gate == "before":  # the operand of the second product is rounded too
        u, r, _ = gates
        bias_z = None if exact.bias_hh is None else exact.bias_hh[2 * H :]
        operand = (r * y).to(low).double()  # of y itself: what is rounded is the operand, once
        z = torch.tanh(p[..., 2 * H :] + torch.nn.functional.linear(operand, exact.weight_hh[2 * H :], bias_z))
        state, gates = u * z + (1 - u) * memory, (u, r, z)
    if exact.reset == "output":
        state = state - exact.reset_scale * y
    if exact.keep is not None:
        state = exact.keep * c + (1 - exact.keep) * state
    return state, gates


def relative(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def check(problem: Problem) -> dict[str, float]:
    """Runs forward and backward and compares everything; returns the errors."""
    kernel = get("cuda")
    assert kernel.unsupported(problem) is None
    T, B, H = *problem.input.shape[:2], problem.theta.shape[0]
    exact, low = in_float64(problem), getattr(torch, problem.precision or "float32")
    state_tolerance, gradient_tolerance = TOLERANCE[problem.precision]
    out = kernel.forward(problem, True)
    seen, gates = each_step(exact, low, out)
    real = torch.ones(T, B, dtype=torch.bool, device="cuda")
    if problem.lengths is not None:
        real = torch.arange(T, device="cuda")[:, None] < problem.lengths
    mask = real[..., None]
    errors = {"c": ((out.c.double() - seen) * mask).abs().max().item()}
    assert errors["c"] < state_tolerance, errors
    # The kernel's own state decides: exact, so no margin is needed.
    assert torch.equal(out.y, torch.where((out.c > problem.theta) & mask, out.c, 0))
    assert bool(((out.c == 0) | mask).all())
    last = torch.full((B,), T, device="cuda") if problem.lengths is None else problem.lengths
    rows = torch.arange(B, device="cuda")
    c_end, y_end = out.c[last - 1, rows], out.y[last - 1, rows]
    if problem.reset == "threshold":
        c_end = c_end - problem.reset_scale * problem.theta * (c_end > problem.theta)
    torch.testing.assert_close(out.c_last, c_end, rtol=1e-6, atol=1e-6)
    assert torch.equal(out.y_last, y_end)

    generator = torch.Generator("cuda").manual_seed(5)
    grads = [
        torch.randn(*shape, device="cuda", generator=generator) for shape in ((T, B, H), (T, B, H), (B, H), (B, H))
    ]
    got = kernel.backward(problem, out.y, out.c, out.reserve, *grads, input_gradient=True)
    expected = functional.egru_backward(
        grads[0].double(), grads[1].double(), (grads[2].double(), grads[3].double()), exact.input,
        EventState(exact.c0, exact.y0), exact.weight_ih, exact.weight_hh, exact.theta,
        functional.Sequence(out.y.double(), out.c.double(), EventState(exact.c0, exact.y0), gates), reset=exact.reset,
        reset_gate=exact.reset_gate, surrogate=exact.surrogate, reset_scale=exact.reset_scale, keep=exact.keep,
        lengths=exact.lengths,
    )  # fmt: skip
    assert expected.input is not None
    wanted = (
        expected.input, *expected.state, expected.weight_ih, expected.weight_hh, expected.bias, expected.bias_hh,
        expected.theta,
    )  # fmt: skip
    for name, value, target in zip(Backward._fields, got, wanted, strict=True):
        assert value is not None
        assert value.shape == target.shape, name
        errors[name] = relative(value, target)
    worst = max(errors, key=lambda n: errors[n] if n != "c" else 0)
    assert errors[worst] < gradient_tolerance, errors  # NaN fails too
    return errors


@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_every_reset(reset: str, reset_gate: str, precision: str) -> None:
    check(make_problem(9, 20, 12, 40, reset=reset, reset_gate=reset_gate, precision=precision))


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize(
    ("T", "B", "inputs", "H"),
    [(1, 1, 1, 1), (2, 3, 1, 7), (5, 1, 3, 130), (4, 65, 5, 33), (3, 300, 1, 200), (6, 130, 24, 590), (7, 64, 9, 1350),
     (4, 16, 2, 2048), (5, 256, 40, 1024), (2, 3000, 4, 96)],
)  # fmt: skip
def test_shapes(T: int, B: int, inputs: int, H: int, reset_gate: str) -> None:
    check(make_problem(T, B, inputs, H, reset_gate=reset_gate))


@pytest.mark.parametrize("precision", ["bfloat16", "float16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("reset", RESETS)
def test_zoneout_and_lengths(reset: str, reset_gate: str, precision: str) -> None:
    check(make_problem(8, 21, 6, 51, reset=reset, reset_gate=reset_gate, precision=precision, keep=True, ragged=True))


def test_no_bias_and_bounded_surrogate() -> None:
    check(make_problem(8, 21, 6, 50, bias=False, bounded=True))


def test_large_layers_run_step_by_step() -> None:
    check(make_problem(3, 8, 6, 3000))


def test_missing_gradients_count_as_zero() -> None:
    kernel, problem = get("cuda"), make_problem(5, 20, 6, 50)
    out = kernel.forward(problem, True)
    grad = torch.randn_like(out.y)
    zeros, last = torch.zeros_like(out.y), torch.zeros_like(out.c_last)
    got = kernel.backward(problem, out.y, out.c, out.reserve, grad, None, None, None, True)
    want = kernel.backward(problem, out.y, out.c, out.reserve, grad, zeros, last, last, True)
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_long_sequences_repeat_exactly() -> None:
    kernel, problem = get("cuda"), make_problem(300, 130, 1, 590)
    first = kernel.forward(problem, True)
    grad = torch.randn_like(first.y) * 1e-3
    grads = kernel.backward(problem, first.y, first.c, first.reserve, grad, None, None, None, False)
    for _ in range(5):
        again = kernel.forward(problem, True)
        assert torch.equal(first.c, again.c)
        repeated = kernel.backward(problem, again.y, again.c, again.reserve, grad, None, None, None, False)
        assert torch.equal(grads.bias_ih, repeated.bias_ih)
        assert torch.equal(grads.c0, repeated.c0)


@pytest.mark.parametrize("B", [3, 37])
@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
def test_every_output_is_written(reset_gate: str, precision: str, B: int) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is full of NaN; the fixture undoes it
    assert torch.empty(4, device="cuda").isnan().all()
    check(make_problem(6, B, 5, 61, reset_gate=reset_gate, precision=precision, ragged=True))


@pytest.mark.parametrize("precision", ["bfloat16", "float16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize("B", range(1, few.MOST_ROWS + 1))
def test_few_rows(B: int, reset_gate: str, precision: str) -> None:
    for H, inputs in ((9, 3), (75, 1), (300, 6)):
        problem = make_problem(7, B, inputs, H, reset_gate=reset_gate, precision=precision, keep=H == 75, ragged=H > 75)
        assert few.find_few(problem.input, H, reset_gate, precision) is not None
        check(problem)


@pytest.mark.parametrize("precision", ["bfloat16", ""])
@pytest.mark.parametrize("reset_gate", GATES)
def test_few_rows_of_a_large_layer(reset_gate: str, precision: str) -> None:
    for H, B in ((1350, 1), (1350, 2), (1024, 8), (2048, 1)):
        check(make_problem(6, B, 5, H, reset_gate=reset_gate, precision=precision))


def test_few_rows_agree_with_many() -> None:
    """The first rows of a batch, alone and among others: the same events but where rounding decides."""
    problem = make_problem(200, 64, 7, 300)
    rows = dataclasses.replace(problem, input=problem.input[:, :2], c0=problem.c0[:2], y0=problem.y0[:2])
    together, alone = get("cuda").forward(problem, False), get("cuda").forward(rows, False)
    assert (together.c[:20, :2] - alone.c[:20]).abs().median() < 1e-5
    assert torch.equal(alone.c, get("cuda").forward(rows, True).c)


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
    gates = 100 * B * 152 * (8 if precision else 16)
    assert full[0] - lean[0] >= 0.9 * gates
    for a, b in zip(full[1:], lean[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # split-K products may add in another order


@pytest.mark.parametrize("reset_gate", GATES)
@pytest.mark.parametrize(("H", "B"), [(1, 1), (37, 5), (590, 500), (1350, 64), (96, 3000)])
def test_packed_weights_equal_the_plain_version(H: int, B: int, reset_gate: str) -> None:
    plan = persistent.find_plan(make_problem(1, B, 1, H).input, H, reset_gate, "bfloat16")
    assert plan is not None
    weight = torch.randn(3 * H, H, device="cuda")
    for direction, plain in (("forward", pack.pack_forward), ("backward", pack.pack_backward)):
        prepare = arrange.Prepare(torch.bfloat16, 0, plan.padded, 16, 0, plan, reset_gate, direction)
        size = arrange.packed_bytes(plan, reset_gate, direction)
        packed = prepare(weight, None, None).buffer[: size // 2]
        assert torch.equal(packed, plain(weight, plan, reset_gate, torch.bfloat16).flatten()), direction


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

    def one_block_missing(self: driver.Function, grid: int, args: ctypes.Structure) -> None:
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
