"""Fused steps of the CUDA backend against the float64 reference: on a GPU, and compiled for the host without one."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import egru
from egru.events import has_event
from egru.kernels import Problem, get, registry
from egru.types import RESET_GATES, RESETS, Compare, Events, Reset
from tests.kernels import parity_cases
from tests.kernels import test_parity as parity
from tests.kernels.cuda_on_host import HostKernels, host_kernels, on_host
from tests.kernels.parity_cases import EVENT_OPTIONS, OPTIONS, Case, Result, run
from tests.kernels.test_parity import Implementation

__all__ = ["host_kernels"]  # a fixture

HOST = Implementation("cuda", "cpu", dtype=torch.float32)
GPU = Implementation("cuda", "cuda", dtype=torch.float32)
FORMS: dict[str, dict[str, Any]] = {name: parity_cases.FORMS[name] for name in ("lstm", "lstm-output")}


@pytest.fixture
def on_cpu(host_kernels: HostKernels) -> Iterator[None]:
    with on_host(host_kernels):
        yield


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(GPU, id="gpu", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    if request.param is HOST:
        context = on_host(request.getfixturevalue("host_kernels"))
    else:
        context = contextlib.nullcontext()
    with context:
        yield request.param


# ---- float32 on the host; on a GPU test_parity.py runs these and more ------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("form", FORMS)
def test_lstm_matches_the_reference(form: str, reset: Reset, option: str, on_cpu: None) -> None:
    parity.assert_matches_reference(Case(reset=reset, **FORMS[form], **OPTIONS[option]), HOST)


@pytest.mark.parametrize("option", EVENT_OPTIONS)
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("form", FORMS)
def test_signed_events_of_the_lstm_match_the_reference(form: str, reset: Reset, option: str, on_cpu: None) -> None:
    case = Case(events="signed", reset=reset, **FORMS[form], **EVENT_OPTIONS[option])
    parity.assert_events_match_reference(case, HOST)


@pytest.mark.parametrize("option", EVENT_OPTIONS)
def test_delta_events_of_the_lstm_match_the_reference(option: str, on_cpu: None) -> None:
    case = Case(events="delta", reset="none", **FORMS["lstm-output"], **EVENT_OPTIONS[option])
    parity.assert_events_match_reference(case, HOST)


@pytest.mark.parametrize("form", FORMS)
def test_odd_sizes_strides_and_saving_on_the_host(form: str, on_cpu: None) -> None:
    for T, B, I, H in ((1, 1, 1, 1), (2, 3, 5, 7), (9, 17, 1, 33), (2, 1, 64, 100)):
        parity.assert_matches_reference(Case(T=T, B=B, I=I, H=H, **FORMS[form]), HOST)
    parity.test_strided_views_match_contiguous_tensors(form, HOST)
    problem = HOST.convert(Case(**FORMS[form]).problem())
    saved, unsaved = get("cuda").forward(problem, True), get("cuda").forward(problem, False)
    assert unsaved.reserve.numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(saved[:4], unsaved[:4], strict=True))


@pytest.mark.parametrize("option", ["plain", "lean-lengths-zoneout", "bounded"])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("reset_gate", RESET_GATES)
def test_gru_matches_the_reference_on_the_host(reset_gate: Any, reset: Reset, option: str, on_cpu: None) -> None:
    parity.assert_matches_reference(Case(reset=reset, reset_gate=reset_gate, **OPTIONS[option]), HOST)


# ---- low precision ---------------------------------------------------------------------------------------------------

LOW = {"bfloat16": (5e-3, 1e-2), "float16": (1e-3, 4e-3)}
"""Margin of the states from the thresholds, and the largest error of a result relative to its norm."""


def low_problem(case: Case, precision: str) -> tuple[Problem, Result]:
    """Return a problem whose events do not depend on rounding, and the reference's results."""
    margin, _ = LOW[precision]
    for seed in range(300):
        problem = dataclasses.replace(case.problem(seed), precision=precision)
        result = run(get("reference"), problem)
        value = parity.seen(problem, result)
        distance = (value if problem.events == "positive" else value.abs()) - problem.theta
        rate = has_event(value, problem.theta, problem.events).double().mean()
        if distance.abs().min() > margin and 0.1 < rate < 0.9:
            return problem, result
    raise AssertionError(f"none of 300 seeds keeps the margin of {margin}")


def norm_errors(result: Result, expected: Result) -> dict[str, float]:
    return {name: ((result[name].to(x) - x).norm() / x.norm().clamp_min(1e-30)).item() for name, x in expected.items()}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("option", [{}, {"keep": "share", "lengths": True}, {"bounded": True}], ids=str)
@pytest.mark.parametrize(
    ("reset", "compare", "events"),
    [(reset, compare, "positive") for reset in RESETS for compare in ("cell", "output")]
    + [("threshold", "output", "signed"), ("hard", "cell", "signed"), ("none", "output", "delta")],
)
def test_low_precision_matches_the_reference(
    reset: Reset, compare: Compare, events: Events, option: dict[str, Any], precision: str, device: Implementation
) -> None:
    case = Case(T=5, B=2, I=4, H=6, reset=reset, cell="lstm", compare=compare, events=events, **option)
    problem, expected = low_problem(case, precision)
    result = run(get("cuda"), device.convert(problem))
    assert torch.equal(result["y"].cpu() != 0, expected["y"] != 0), "events differ"
    parity.assert_within(norm_errors(result, expected), LOW[precision][1])


def test_fp16_keeps_forget_gates_near_1(device: Implementation) -> None:
    """Over 500 steps the gradient of c0 is the product of the forget gates, 1 - 6e-4 each."""
    problem = device.convert(Case(T=500, B=1, I=1, H=2, reset="none", cell="lstm", theta=100.0).problem())
    zero = torch.zeros_like
    assert problem.bias_ih is not None
    bias = zero(problem.bias_ih)
    bias[2:4] = 7.4
    weights = {name: zero(getattr(problem, name)) for name in ("weight_ih", "weight_hh", "bias_hh")}
    problem = dataclasses.replace(problem, precision="float16", bias_ih=bias, **weights)
    out = get("cuda").forward(problem, True)
    one = torch.ones_like(out.c_last)
    got = get("cuda").backward(problem, out.y, out.c, out.reserve, None, None, one, None, False)
    assert got.c0 is not None
    expected = torch.sigmoid(torch.tensor(7.4, dtype=torch.float64)) ** 500
    torch.testing.assert_close(got.c0.cpu().double(), expected.expand(1, 2), rtol=1e-3, atol=0)


# ---- on a GPU only ---------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["", "bfloat16", "float16"])
@pytest.mark.parametrize("theta", [-6.0, 20.0])  # all units emit events, and none does
@pytest.mark.parametrize(
    ("T", "B", "I", "H"), [(4, 65, 5, 33), (3, 300, 1, 200), (4, 130, 24, 590), (3, 64, 9, 1350), (3, 8, 6, 3000)]
)
def test_large_shapes_match_the_reference(T: int, B: int, I: int, H: int, theta: float, precision: str) -> None:
    case = Case(T=T, B=B, I=I, H=H, cell="lstm", theta=theta, width=40.0, reset_scale=0.1, lengths=True)
    problem = dataclasses.replace(GPU.convert(case.problem()), precision=precision)
    expected = run(get("reference"), GPU.convert(problem, torch.float64))
    bound = LOW[precision][1] if precision else 5e-6
    parity.assert_within(norm_errors(run(get("cuda"), problem), expected), bound)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_run_on_the_kernel_and_repeat_bit_for_bit(dtype: torch.dtype) -> None:
    layer = egru.ELSTM(20, 150, num_layers=2, bidirectional=True, backend="cuda", device="cuda", dtype=torch.float32)
    x = torch.randn(30, 8, 20, device="cuda", dtype=torch.float32)
    results = []
    for _ in range(2):
        layer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y, _ = layer(x)
        y.float().square().sum().backward()
        results.append([y.detach(), *[p.grad for p in layer.parameters()]])
    assert all(torch.isfinite(value).all() for value in results[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].count_nonzero() > 0


# ---- problems that are refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cell": "gru", "events": "signed"}, "it does not support events='signed' in a GRU"),
        ({"events": "delta"}, "it requires reset='none' and compare='output' with events='delta'"),
        ({"recurrent_clip": 1.0}, "it does not support recurrent_clip"),
        ({"scale_per_unit": True}, "it requires one reset_scale for all units, got one per unit"),
    ],
)
def test_unsupported_options_of_the_lstm_are_refused_by_name(change: dict[str, Any], reason: str) -> None:
    clip = change.pop("recurrent_clip", 0.0)
    problem = HOST.convert(dataclasses.replace(Case(**{"cell": "lstm", **change}).problem(), recurrent_clip=clip))
    assert registry.unsupported_options("cuda", problem) == reason
