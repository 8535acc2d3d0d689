"""Signed and delta events: definitions, limits, and the explicit backward pass against autograd."""

import itertools
from typing import Any

import pytest
import torch

import egru
from egru import functional
from egru.events import EventState, compared, emit, has_event
from egru.types import RESET_GATES, RESETS, Events
from tests.helpers import worst
from tests.test_functional import KEEPS, tensors

CASES = [("signed", reset, gate) for reset, gate in itertools.product(RESETS, RESET_GATES)]
CASES += [("delta", "none", "after")]


def two_sided_tensors(bias: bool = True) -> list[Any]:
    """Return random arguments whose outputs may be negative, with states that cross the thresholds often."""
    values = tensors(bias, threshold=0.5)
    values[2] = (torch.randn_like(values[2]) * (torch.rand_like(values[2]) < 0.5)).requires_grad_()
    return values


def previous(first, y):
    return torch.cat([first[None], y[:-1]])


@pytest.mark.parametrize(("events", "reset", "gate"), CASES)
@pytest.mark.parametrize("keep", KEEPS)
def test_explicit_backward_equals_autograd(events, reset, gate, keep):
    negative = 0
    for bounded, bias, lengths, clip in itertools.product(
        (False, True), (False, True), (None, torch.tensor([7, 1, 4])), (0.0, 0.3)
    ):
        x, c0, y0, W, V, b, b_hh, theta = two_sided_tensors(bias)
        options: dict[str, Any] = {"events": events, "reset": reset, "reset_gate": gate, "reset_scale": 0.6}
        options |= {"surrogate": egru.Surrogate(0.8, 0.9, bounded), "keep": KEEPS[keep], "lengths": lengths}
        options |= {"recurrent_clip": clip}
        state = EventState(c0, y0)
        result = functional.egru_sequence(x, state, W, V, b, b_hh, theta, **options)
        fired = has_event(compared(result.c, previous(y0, result.y), events), theta, events)
        valid = torch.arange(7)[:, None] < (torch.tensor([7, 7, 7]) if lengths is None else lengths)
        assert 0.05 < fired[valid].double().mean() < 0.95, "the test requires both active and inactive units"
        negative += (result.y < 0).sum().item()
        outputs = (result.y, result.c, *result.state)
        w_y, w_c, *w_last = grads = [torch.randn_like(out) for out in outputs]
        wanted = [p for p in (x, c0, y0, W, V, b, b_hh, theta) if p is not None]
        expected = torch.autograd.grad(outputs, wanted, grads)
        with torch.no_grad():
            got = functional.egru_backward(w_y, w_c, EventState(*w_last), x, state, W, V, theta, result, **options)
        biases = (got.bias, got.bias_hh) if bias else ()
        explicit = (got.input, *got.state, got.weight_ih, got.weight_hh, *biases, got.theta)
        assert worst(expected, explicit) <= 1e-12
    assert negative > 100


@pytest.mark.parametrize(("events", "reset", "gate"), CASES)
def test_gradients_match_finite_differences_away_from_the_window(events, reset, gate):
    surrogate = egru.Surrogate(width=1e-4)

    def run(x, c0, y0, *rest):
        return functional.egru_sequence(
            x, EventState(c0, y0), *rest, events=events, reset=reset, reset_gate=gate, surrogate=surrogate
        )

    for _ in range(50):
        inputs: list[Any] = two_sided_tensors()
        with torch.no_grad():
            inputs[2][inputs[2].abs() < 0.05] = 0.05  # at y0 = 0 a perturbation would change its event
        result = run(*inputs)
        seen = compared(result.c, previous(inputs[2], result.y), events)
        if ((seen.abs() - inputs[-1]).abs() > 10 * surrogate.width).all():
            break
    else:
        pytest.fail("no random case keeps the margin")
    assert torch.autograd.gradcheck(lambda *a: run(*a).y, inputs, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("bounded", [False, True])
def test_slopes_are_those_of_the_specification(bounded):
    surrogate = egru.Surrogate(0.5, 0.7, bounded)
    theta = torch.tensor(0.4, requires_grad=True)
    c = torch.linspace(-2, 2, 80, requires_grad=True)  # does not contain 0
    m = torch.tensor(0.3, requires_grad=True)
    y, e = emit(c, c, theta, surrogate, signed=True)
    s = 0.7 * (1 - (c.abs() - theta).abs() / 0.5).clamp_min(0)
    k = (c.abs() > theta) + c.abs() * s
    k = k.clamp(0, 1) if bounded else k
    torch.testing.assert_close(y, c * (c.abs() > theta))
    grad_c, grad_theta = torch.autograd.grad(y.sum(), (c, theta), retain_graph=True)
    torch.testing.assert_close(grad_c, k)
    torch.testing.assert_close(grad_theta, -(c * s).sum())
    (through_events,) = torch.autograd.grad(e.sum(), c)
    torch.testing.assert_close(through_events, s * c.sign())

    d = c - m
    held, _ = emit(c, d, theta, surrogate, signed=True, hold=m)
    s = 0.7 * (1 - (d.abs() - theta).abs() / 0.5).clamp_min(0)
    k = (d.abs() > theta) + d.abs() * s
    k = k.clamp(0, 1) if bounded else k
    torch.testing.assert_close(held, torch.where(d.abs() > theta, c, m))
    grad_c, grad_m, grad_theta = torch.autograd.grad(held.sum(), (c, m, theta))
    torch.testing.assert_close(grad_c, k)
    torch.testing.assert_close(grad_m, (1 - k).sum())
    torch.testing.assert_close(grad_theta, -(d * s).sum())


def test_forward_mode_equals_reverse_mode_of_held_outputs():
    theta = torch.rand(6)
    c, m = torch.randn(5, 6), torch.randn(5, 6)

    def run(c, m, theta):
        return emit(c, c - m, theta, egru.Surrogate(), signed=True, hold=m)[0]

    tangents = (torch.randn(5, 6), torch.randn(5, 6), torch.randn(6))
    jvp = torch.func.jvp(run, (c, m, theta), tangents)[1]
    vjp = torch.func.vjp(run, c, m, theta)[1]
    w = torch.randn(5, 6)
    expected = sum((g * t).sum() for g, t in zip(vjp(w), tangents, strict=True))
    torch.testing.assert_close((w * jvp).sum(), expected)


def test_delta_output_holds_between_events():
    """The output changes exactly at events, to the state, and never differs from it by more than the threshold."""
    x, c0, y0, W, V, b, b_hh, theta = (t.detach() for t in two_sided_tensors())
    x = torch.randn(60, *x.shape[1:])
    result = functional.egru_sequence(
        x, EventState(c0, y0), W, V, b, b_hh, theta,
        events="delta", reset="none", reset_gate="after", surrogate=egru.Surrogate(),
    )  # fmt: skip
    before = previous(y0, result.y)
    fired = (result.c - before).abs() > theta
    assert 0.1 < fired.double().mean() < 0.9
    assert torch.equal(result.y, torch.where(fired, result.c, before))
    assert ((result.c - result.y).abs() <= theta).all()
    assert torch.equal(result.state.y, result.y[-1])


@pytest.mark.parametrize("events", ["signed", "delta"])
def test_state_at_the_threshold_emits_no_event(events: Events):
    value = torch.tensor([-0.6, -0.5, 0.0, 0.5, 0.6])
    assert has_event(value, torch.tensor(0.5), events).tolist() == [True, False, False, False, True]
    _, e = emit(value, value, torch.tensor(0.5), egru.Surrogate(), signed=True)
    assert e.tolist() == [1, 0, 0, 0, 1]


def test_incompatible_options_raise_value_error():
    x, c0, y0, W, V, b, b_hh, theta = tensors()
    arguments = (EventState(c0, y0), W, V, b, b_hh, theta)
    options: dict[str, Any] = {"events": "delta", "surrogate": egru.Surrogate()}
    with pytest.raises(ValueError, match=r"events='delta' requires reset='none' .* got reset='hard'"):
        functional.egru_sequence(x, *arguments, reset="hard", reset_gate="after", **options)
    with pytest.raises(ValueError, match=r"requires .* reset_gate='after', got reset='none' and reset_gate='before'"):
        functional.egru_step(x[0], *arguments, reset="none", reset_gate="before", **options)
    with pytest.raises(ValueError, match="events must be one of positive, signed, delta; got 'negative'"):
        functional.egru_sequence(x, *arguments, **{**options, "events": "negative"})
