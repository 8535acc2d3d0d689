"""Parity and gradients of every kernel, at every level and number of threads, against the float64 reference.

Kernels that support float64 must agree with the reference up to rounding. In float32, events must be equal for
problems whose states keep a margin from the threshold, and errors may exceed those of plain torch only by a small
factor. To test a new kernel, add it to ``IMPLEMENTATIONS``.

All combinations of cell, reset and option are compared with the reference. Each runs at two SIMD levels, with packed
weights at one and without at the other; the levels take turns (see ``spread``).
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from egru import compiled, functional
from egru.events import EventState, compared, has_event
from egru.kernels import Problem, get, run_sequence
from egru.kernels.cpu import kernel as cpu_kernel
from egru.types import RESET_GATES, RESETS, Backend, Reset, ResetGate
from tests.kernels.parity_cases import EVENT_OPTIONS, FORMS, OPTIONS, Case, Result, error, reference, run

FLOAT64_ERROR = 1e-12
"""Relative to the largest entry of a tensor. Sums of a few hundred terms have errors about 1000 times smaller."""
FLOAT32_FACTOR = 8
"""Bound on a kernel's float32 error, relative to that of plain torch. Both round every product and sum once, but in a
different order and with a different exp, so that errors are of the same size but not equal."""
MARGIN = 2e-5
"""Minimum distance of states from thresholds in float32 cases. Closer, two correct results could differ by an event."""


class Implementation(NamedTuple):
    kernel: Backend
    device: str = "cpu"
    level: str | None = None
    threads: int = 1
    dtype: torch.dtype = torch.float64
    direct: bool = False
    """CPU kernel: multiply the weights without packing them, at any size."""
    skip: bool = False
    """CPU kernel: skip zero blocks of packed weights, even where that is slower."""

    def convert(self, problem: Problem, dtype: torch.dtype | None = None) -> Problem:
        """Return the problem in this kernel's type (or ``dtype``) and on its device."""
        fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
        tensors = {name: x.to(self.device) for name, x in fields.items() if isinstance(x, Tensor)}
        floats = {name: x.to(dtype or self.dtype) for name, x in tensors.items() if x.is_floating_point()}
        return dataclasses.replace(problem, **{**tensors, **floats})

    def __str__(self) -> str:
        products = "direct" if self.direct else "skip" if self.skip else None
        return "-".join(str(part) for part in (self.kernel, self.level, self.threads, products) if part is not None)

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        before, limits = torch.get_num_threads(), cpu_kernel.limits
        rows = 1 << 30 if self.direct else 0
        cpu_kernel.limits = cpu_kernel.Limits(
            direct_forward=rows, direct_backward=rows, one_thread=0, per_thread=1, own_threads=0,
            zero_blocks=0.0 if self.skip else 2.0,
        )  # fmt: skip
        torch.set_num_threads(self.threads)
        if self.level is not None:
            assert compiled.core is not None
            compiled.core.force_level(self.level)
        try:
            yield get(self.kernel)
        finally:
            torch.set_num_threads(before)
            cpu_kernel.limits = limits
            if self.level is not None and compiled.core is not None:
                compiled.core.force_level("auto")


LEVELS = tuple(compiled.core.levels()) if compiled.core is not None else ()
IMPLEMENTATIONS = [
    *(
        Implementation("cpu", level=level, threads=2, direct=direct)  # other numbers of threads: see the last tests
        for level in LEVELS
        for direct in (False, True)
    ),
    pytest.param(Implementation("cuda", "cuda", dtype=torch.float32), marks=pytest.mark.cuda),
]


@pytest.fixture(params=IMPLEMENTATIONS, ids=str)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return request.param


def spread(*choices: Iterable[Any]) -> list[Any]:
    """Return every combination of ``choices``, for the CPU kernel at two levels and for the CUDA kernel.

    The first level packs the weights, and the second, which is the next one, does not. If the choices have as many
    values as there are levels, every combination of all choices but one runs at every level, packed and not.
    """
    parameters = []
    for numbered in itertools.product(*(enumerate(values) for values in choices)):
        turn, combination = sum(i for i, _ in numbered), [value for _, value in numbered]
        for direct in (False, True) if LEVELS else ():
            level = LEVELS[(turn + direct) % len(LEVELS)]
            parameters.append((*combination, Implementation("cpu", level=level, threads=2, direct=direct)))
        parameters.append(pytest.param(*combination, *IMPLEMENTATIONS[-1].values, marks=pytest.mark.cuda))
    return parameters


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that an element which a kernel does not write is detected."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(before)


# ---- bounds ----------------------------------------------------------------------------------------------------------


def assert_within(errors: dict[str, float], bound: float | dict[str, float]) -> None:
    bounds = bound if isinstance(bound, dict) else dict.fromkeys(errors, bound)
    wrong = {name: (x, bounds[name]) for name, x in errors.items() if not x <= bounds[name]}
    assert not wrong, f"(error, bound): {wrong}"


def parity(implementation: Implementation, case: Case) -> tuple[Problem, Result, dict[str, float]]:
    """Return a problem for ``implementation``, the expected results, and a bound on the error of each."""
    if implementation.dtype == torch.float64:
        return case.problem(), reference(case), dict.fromkeys(reference(case), FLOAT64_ERROR)
    # Plain torch may compute a small tensor exactly by chance: take the largest bound of three draws.
    draws = list(itertools.islice(margin_problems(case), 3))
    bounds = [float32_bounds(*draw) for draw in draws]
    problem, expected = draws[0]
    return implementation.convert(problem), expected, {name: max(b[name] for b in bounds) for name in expected}


def float32_bounds(problem: Problem, expected: Result) -> dict[str, float]:
    plain = error(run(get("reference"), Implementation("reference").convert(problem, torch.float32)), expected)
    return {name: FLOAT32_FACTOR * max(x, torch.finfo(torch.float32).eps) for name, x in plain.items()}


def assert_parity(result: Result, expected: Result, bounds: dict[str, float]) -> None:
    """Assert that events are equal and errors within ``bounds``."""
    assert torch.equal(result["y"].cpu() != 0, expected["y"] != 0), "events differ"
    assert_within(error(result, expected), bounds)


# ---- the reference itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", RESET_GATES)
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("per_unit", [False, True])
def test_reference_equals_autograd(gate: ResetGate, reset: Reset, per_unit: bool) -> None:
    problem = Case(reset=reset, reset_gate=gate, keep="mask", lengths=True, scale_per_unit=per_unit).problem()
    names = ("input", "c0", "y0", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "theta")
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in names}
    result = functional.egru_sequence(
        leaves["input"], EventState(leaves["c0"], leaves["y0"]), *(leaves[name] for name in names[3:]),
        reset=problem.reset, reset_gate=problem.reset_gate, surrogate=problem.surrogate,
        reset_scale=problem.reset_scale, keep=problem.keep, lengths=problem.lengths,
    )  # fmt: skip
    outputs = (result.y, result.c, *result.state)
    g = torch.Generator().manual_seed(1)
    grads = torch.autograd.grad(
        outputs, list(leaves.values()), [torch.randn(x.shape, generator=g).to(x) for x in outputs]
    )
    expected = {"y": result.y, "c": result.c, "c_last": result.state.c, "y_last": result.state.y}
    expected |= {f"grad_{name}": x for name, x in zip(names, grads, strict=True)}
    assert_within(error(run(get("reference"), problem), {k: x.detach() for k, x in expected.items()}), FLOAT64_ERROR)


# ---- every kernel ----------------------------------------------------------------------------------------------------


def assert_matches_reference(case: Case, implementation: Implementation) -> None:
    problem, expected, bounds = parity(implementation, case)
    if case.zero_blocks:
        implementation = implementation._replace(skip=True)
    with implementation.active() as kernel:
        assert kernel.unsupported(problem) is None
        assert_parity(run(kernel, problem), expected, bounds)


@pytest.mark.parametrize(("form", "reset", "option", "implementation"), spread(FORMS, RESETS, OPTIONS), ids=str)
def test_every_option_matches_the_reference(
    form: str, reset: Reset, option: str, implementation: Implementation
) -> None:
    assert_matches_reference(Case(reset=reset, **FORMS[form], **OPTIONS[option]), implementation)


def assert_events_match_reference(case: Case, implementation: Implementation) -> None:
    if implementation.kernel == "cuda" and case.cell == "gru":
        pytest.skip("CUDA kernels of the GRU do not support signed and delta events")
    problem = case.problem()
    rate = has_event(seen(problem, reference(case)), problem.theta, case.events).double().mean()
    assert 0.1 < rate < 0.95
    assert_matches_reference(case, implementation)


@pytest.mark.parametrize(("form", "reset", "option", "implementation"), spread(FORMS, RESETS, EVENT_OPTIONS), ids=str)
def test_signed_events_match_the_reference(
    form: str, reset: Reset, option: str, implementation: Implementation
) -> None:
    case = Case(events="signed", reset=reset, **FORMS[form], **EVENT_OPTIONS[option])
    assert_events_match_reference(case, implementation)


@pytest.mark.parametrize("form", ["after", "lstm-output"])
@pytest.mark.parametrize("option", EVENT_OPTIONS)
def test_delta_events_match_the_reference(form: str, option: str, implementation: Implementation) -> None:
    case = Case(events="delta", reset="none", **FORMS[form], **EVENT_OPTIONS[option])
    assert_events_match_reference(case, implementation)


PER_UNIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "lean-lengths-zoneout": {"lengths": True, "keep": "mask", "H": 70, "lean": True},
}


@pytest.mark.parametrize(("form", "reset", "option", "implementation"), spread(FORMS, RESETS, PER_UNIT), ids=str)
def test_reset_scale_per_unit_matches_the_reference(
    form: str, reset: Reset, option: str, implementation: Implementation
) -> None:
    case = Case(reset=reset, **FORMS[form], scale_per_unit=True, **PER_UNIT[option])
    if implementation.kernel == "cuda" and reset != "none":
        problem, _, _ = parity(implementation, case)
        message = "it requires one reset_scale for all units, got one per unit"
        assert get(implementation.kernel).unsupported(problem) == message
        return
    assert_matches_reference(case, implementation)


@pytest.mark.parametrize("form", FORMS)
def test_odd_sizes_match_the_reference(form: str, implementation: Implementation) -> None:
    """Every combination of three sizes occurs, in turn with packed and with unpacked weights."""
    steps = (1, 2, 9)
    with implementation.active() as kernel:
        for (h, H), (i, I), (b, B) in itertools.product(*map(enumerate, ((1, 7, 33, 64, 100), (1, 5, 64), (1, 3, 17)))):
            T = steps[(h + i + b + implementation.direct) % 3]
            case = Case(T=T, B=B, I=I, H=H, **FORMS[form], lean=(H + I + B + T) % 2 == 0)
            problem, expected, bounds = parity(implementation, case)
            assert_parity(run(kernel, problem), expected, bounds)


@pytest.mark.parametrize(("form", "reset", "H", "implementation"), spread(FORMS, RESETS, (7, 100)), ids=str)
def test_float32_error_is_that_of_plain_torch(form: str, reset: Reset, H: int, implementation: Implementation) -> None:
    case = Case(reset=reset, **FORMS[form], H=H, B=17, I=64, density=0.3)
    problem, expected = margin_problem(case)
    with implementation.active() as kernel:
        result = run(kernel, implementation.convert(problem, torch.float32))
    assert_parity(result, expected, float32_bounds(problem, expected))


@pytest.mark.parametrize("form", ["after", "lstm-output"])
@pytest.mark.parametrize("options", [{"events": "signed"}, {"events": "delta", "reset": "none"}], ids=str)
def test_float32_error_of_two_sided_events_is_that_of_plain_torch(
    options: dict[str, Any], form: str, implementation: Implementation
) -> None:
    if implementation.kernel == "cuda" and form == "after":
        pytest.skip("CUDA kernels of the GRU do not support signed and delta events")
    problem, expected = margin_problem(Case(H=70, B=5, I=64, density=0.3, **FORMS[form], **options))
    with implementation.active() as kernel:
        result = run(kernel, implementation.convert(problem, torch.float32))
    assert_parity(result, expected, float32_bounds(problem, expected))


def seen(problem: Problem, result: Result) -> Tensor:
    """Return what is compared with the thresholds, according to a result."""
    return compared(result["c"], torch.cat([problem.y0[None].to(result["y"]), result["y"][:-1]]), problem.events)


def margin_problems(case: Case) -> Iterator[tuple[Problem, Result]]:
    """Yield random problems whose states all keep the margin from the threshold in float64."""
    for seed in range(100):
        problem, result = case.problem(seed), reference(case, seed)
        value = seen(problem, result)
        if ((value if problem.events == "positive" else value.abs()) - problem.theta).abs().min() > MARGIN:
            yield problem, result
    raise AssertionError(f"too few of 100 seeds keep the margin of {MARGIN}")


def margin_problem(case: Case) -> tuple[Problem, Result]:
    return next(margin_problems(case))


@pytest.mark.parametrize("form", FORMS)
def test_strided_views_match_contiguous_tensors(form: str, implementation: Implementation) -> None:
    """Inputs, weights and gradients that are transposed, expanded or offset views."""
    problem, expected, bounds = parity(implementation, Case(**FORMS[form], keep="mask", lengths=True, B=4))

    def view(x: Tensor) -> Tensor:
        padded = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan")).to(x)
        padded[..., 2:-1] = x
        return padded[..., 2:-1]

    strided = dataclasses.replace(
        problem,
        input=problem.input.transpose(0, 1).contiguous().transpose(0, 1),
        weight_ih=problem.weight_ih.T.contiguous().T,
        **{
            name: view(getattr(problem, name))
            for name in ("c0", "y0", "weight_hh", "bias_ih", "bias_hh", "theta", "keep")
        },
    )
    with implementation.active() as kernel:
        assert_parity(run(kernel, strided), expected, bounds)
        every_second = dataclasses.replace(problem, input=torch.stack([problem.input] * 2, -1)[..., 0])
        assert_parity(run(kernel, every_second), expected, bounds)
        forward = kernel.forward(problem, True)
        grad = torch.tensor(0.5).to(forward.y).expand(forward.y.shape)
        got = kernel.backward(problem, forward.y, forward.c, forward.reserve, grad, None, None, None, False)
        dense = grad.contiguous()
        want = kernel.backward(problem, forward.y, forward.c, forward.reserve, dense, None, None, None, False)
        assert got.input is None
        assert all(torch.equal(a, b) for a, b in zip(got[1:], want[1:], strict=True))


@pytest.mark.parametrize("missing", range(4))
def test_absent_gradients_are_zero(missing: int, implementation: Implementation) -> None:
    problem = implementation.convert(Case(B=2, T=4).problem())
    with implementation.active() as kernel:
        forward = kernel.forward(problem, True)
        grads: list[Tensor | None] = [torch.ones_like(x) for x in forward[:4]]
        grads[missing] = None
        got = kernel.backward(problem, forward.y, forward.c, forward.reserve, *grads, True)
        grads[missing] = torch.zeros_like(forward[missing])
        want = kernel.backward(problem, forward.y, forward.c, forward.reserve, *grads, True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_outputs_do_not_depend_on_save(implementation: Implementation) -> None:
    problem = implementation.convert(Case().problem())
    with implementation.active() as kernel:
        saved, unsaved = kernel.forward(problem, True), kernel.forward(problem, False)
    assert unsaved.reserve.numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(saved[:4], unsaved[:4], strict=True))


def test_run_sequence_propagates_gradients_to_all_leaves(implementation: Implementation) -> None:
    exact, _ = margin_problem(Case(B=2, T=4))
    names = ("input", "c0", "y0", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "theta")
    results = []
    reference = Implementation("reference")
    runs = [(reference, torch.float64), (implementation, implementation.dtype)]
    if implementation.dtype == torch.float32:
        runs.append((reference, torch.float32))
    for one, dtype in runs:
        problem = one.convert(exact, dtype)
        leaves = {name: getattr(problem, name).clone().requires_grad_() for name in names}
        with one.active():
            y, c, state = run_sequence(dataclasses.replace(problem, **leaves), one.kernel)
            (y.square().sum() + (c * 0.3).sum() + state.c.sum() + state.y.sum()).backward()
        results.append({"y": y.detach(), **{name: x.grad for name, x in leaves.items()}})
    bounds = dict.fromkeys(results[0], FLOAT64_ERROR)
    if len(results) == 3:  # the third is plain torch in float32
        plain = error(results[2], results[0])
        bounds = {name: FLOAT32_FACTOR * max(x, torch.finfo(torch.float32).eps) for name, x in plain.items()}
    assert_parity(results[1], results[0], bounds)


# ---- bitwise equality ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not LEVELS, reason=f"requires the compiled core: {compiled.missing}")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_bits_do_not_depend_on_threads(level: str, form: str, lean: bool, direct: bool) -> None:
    dtype = torch.float32 if lean == direct else torch.float64
    problem = Case(**FORMS[form], H=100, B=19, T=30, I=40, density=0.4, lean=lean).problem(dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        with Implementation("cpu", level=level, threads=threads, direct=direct).active() as kernel:
            results.append(run(kernel, problem))
    for other in results[1:]:
        assert all(torch.equal(x, other[name]) for name, x in results[0].items())


@pytest.mark.skipif(not LEVELS, reason=f"requires the compiled core: {compiled.missing}")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [4, 12, 30])  # direct, direct in the backward pass only, packed
def test_lean_has_the_same_bits(form: str, batch: int) -> None:
    case = Case(**FORMS[form], H=40, B=batch, T=3, I=5, density=0.4)
    saved, recomputed = (run(get("cpu"), case._replace(lean=lean).problem()) for lean in (False, True))
    assert all(torch.equal(x, recomputed[name]) for name, x in saved.items())
