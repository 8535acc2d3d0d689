"""Problems for the CUDA kernels, and the comparison of their results with the float64 reference.

Rounding can move a state across its threshold, after which the trajectories differ. The forward pass is therefore
checked step by step: each step of the reference starts from the state that the kernel carried into it. The backward
reference runs on the kernel's forward pass.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from egru import functional
from egru.events import EventState, Surrogate
from egru.kernels.problem import Backward, Forward, Problem
from egru.kernels.registry import get
from egru.types import Reset, ResetGate

GATES = ("after", "before")


@pytest.fixture(autouse=True)
def single_precision() -> Iterator[None]:
    """Use float32 and allow nondeterministic cuBLAS, regardless of the session's defaults."""
    before, dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(before)


# Largest errors of the state (absolute) and of gradients (relative, by norm).
TOLERANCE = {"": (2e-5, 2e-5), "bfloat16": (2e-3, 1.5e-2), "float16": (1e-3, 4e-3)}


def make_problem(
    T: int,
    B: int,
    inputs: int,
    H: int,
    *,
    reset: Reset = "output",
    reset_gate: ResetGate = "after",
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
    """Return the problem in float64, with the operands of products rounded as the kernel rounds them."""
    low = getattr(torch, problem.precision or "float32")
    values = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    for name in ("input", "weight_ih", "weight_hh"):
        values[name] = values[name].to(low)
    doubles = {n: v.double() for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return dataclasses.replace(problem, **doubles, precision="")


def reference_steps(exact: Problem, low: torch.dtype, out: Forward) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the reference's state before the threshold and its gates, each step from the kernel's previous state."""
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
    if exact.reset_gate == "before":  # the kernel also rounds the operand of the second product
        u, r, _ = gates
        bias_z = None if exact.bias_hh is None else exact.bias_hh[2 * H :]
        operand = (r * y).to(low).double()  # rounded once: y itself is not rounded here
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
    """Run forward and backward, compare all results with the reference, and return the errors."""
    kernel = get("cuda")
    assert kernel.unsupported(problem) is None
    T, B, H = *problem.input.shape[:2], problem.theta.shape[0]
    exact, low = in_float64(problem), getattr(torch, problem.precision or "float32")
    state_tolerance, gradient_tolerance = TOLERANCE[problem.precision]
    out = kernel.forward(problem, True)
    seen, gates = reference_steps(exact, low, out)
    real = torch.ones(T, B, dtype=torch.bool, device="cuda")
    if problem.lengths is not None:
        real = torch.arange(T, device="cuda")[:, None] < problem.lengths
    mask = real[..., None]
    errors = {"c": ((out.c.double() - seen) * mask).abs().max().item()}
    assert errors["c"] < state_tolerance, errors
    # Events follow exactly from the kernel's state, so no margin is needed.
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
    gradients = kernel.backward(problem, out.y, out.c, out.reserve, *grads, input_gradient=True)
    expected = functional.egru_backward(
        grads[0].double(), grads[1].double(), (grads[2].double(), grads[3].double()), exact.input,
        EventState(exact.c0, exact.y0), exact.weight_ih, exact.weight_hh, exact.theta,
        functional.Sequence(out.y.double(), out.c.double(), EventState(exact.c0, exact.y0), gates), reset=exact.reset,
        reset_gate=exact.reset_gate, surrogate=exact.surrogate, reset_scale=exact.reset_scale, keep=exact.keep,
        lengths=exact.lengths,
    )  # fmt: skip
    assert expected.input is not None
    targets = (
        expected.input, *expected.state, expected.weight_ih, expected.weight_hh, expected.bias, expected.bias_hh,
        expected.theta,
    )  # fmt: skip
    for name, value, target in zip(Backward._fields, gradients, targets, strict=True):
        assert value is not None
        assert value.shape == target.shape, name
        errors[name] = relative(value, target)
    worst = max(errors, key=lambda n: errors[n] if n != "c" else 0)
    assert errors[worst] < gradient_tolerance, errors  # NaN fails too
    return errors
