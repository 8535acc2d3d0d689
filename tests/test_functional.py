"""The reference implementation: its limits, and the explicit backward pass against autograd."""

import itertools
from typing import Any

import pytest
import torch

import egru
from egru import functional
from egru.events import EventState
from egru.types import RESET_GATES, RESETS, Reset, ResetGate
from tests.helpers import worst

T, B, I, H = 7, 3, 4, 5


def tensors(bias: bool = True, threshold: float = 0.06) -> list[Any]:
    """Return random arguments that require gradients, with states that cross the thresholds often."""
    values = [
        torch.randn(T, B, I), torch.randn(B, H), torch.randn(B, H).relu(), torch.randn(3 * H, I),
        torch.randn(3 * H, H), torch.randn(3 * H) if bias else None, torch.randn(3 * H) if bias else None,
        threshold * (0.5 + torch.rand(H)),
    ]  # fmt: skip
    return [None if x is None else x.requires_grad_() for x in values]


KEEPS = {
    "no zoneout": None,
    "mask": (torch.arange(T * B * H).reshape(T, B, H) % 3 == 0).double(),
    "mix": torch.tensor(0.2),
}


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("reset_gate", RESET_GATES)
@pytest.mark.parametrize("keep", KEEPS)
def test_explicit_backward_equals_autograd(reset, reset_gate, keep):
    for bounded, bias, lengths, scale in itertools.product(
        (False, True), (False, True), (None, torch.tensor([7, 1, 4])), (1.0, 0.6)
    ):
        x, c0, y0, W, V, b, b_hh, theta = tensors(bias)
        options = {
            "reset": reset,
            "reset_gate": reset_gate,
            "surrogate": egru.Surrogate(0.8, 0.9, bounded),
            "reset_scale": scale,
            "keep": KEEPS[keep],
            "lengths": lengths,
        }
        state = EventState(c0, y0)
        result = functional.egru_sequence(x, state, W, V, b, b_hh, theta, **options)
        assert 0.05 < (result.y != 0).double().mean() < 0.9, "the test requires both active and inactive units"
        outputs = (result.y, result.c, *result.state)
        w_y, w_c, w_c_last, w_y_last = (torch.randn_like(out) for out in outputs)
        pairs = zip((w_y, w_c, w_c_last, w_y_last), outputs, strict=True)
        loss = torch.stack([(w * out).sum() for w, out in pairs]).sum()
        wanted = [p for p in (x, c0, y0, W, V, b, b_hh, theta) if p is not None]
        expected = torch.autograd.grad(loss, wanted)
        with torch.no_grad():
            got = functional.egru_backward(w_y, w_c, (w_c_last, w_y_last), x, state, W, V, theta, result, **options)
        biases = (got.bias, got.bias_hh) if bias else ()
        explicit = (got.input, *got.state, got.weight_ih, got.weight_hh, *biases, got.theta)
        assert worst(expected, explicit) <= 1e-12


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("reset_gate", RESET_GATES)
@pytest.mark.parametrize("keep", KEEPS)
def test_explicit_backward_equals_autograd_with_recurrent_clip(reset, reset_gate, keep):
    for lengths in (None, torch.tensor([7, 1, 4])):
        x, c0, y0, W, V, b, b_hh, theta = tensors()
        state = EventState(c0, y0)
        options: dict[str, Any] = {"reset": reset, "reset_gate": reset_gate, "surrogate": egru.Surrogate(0.8, 0.9)}
        options |= {"reset_scale": 0.6, "keep": KEEPS[keep], "lengths": lengths}
        result = functional.egru_sequence(x, state, W, V, b, b_hh, theta, recurrent_clip=0.3, **options)
        outputs = (result.y, result.c, *result.state)
        w_y, w_c, *w_last = grads = [torch.randn_like(out) for out in outputs]
        loss = torch.stack([(w * out).sum() for w, out in zip(grads, outputs, strict=True)]).sum()
        expected = torch.autograd.grad(loss, (x, c0, y0, W, V, b, b_hh, theta))
        with torch.no_grad():
            got, free = (
                functional.egru_backward(
                    w_y, w_c, EventState(*w_last), x, state, W, V, theta, result, recurrent_clip=clip, **options
                )
                for clip in (0.3, 0.0)
            )
        explicit = [got.input, *got.state, got.weight_ih, got.weight_hh, got.bias, got.bias_hh, got.theta]
        assert worst(explicit, list(expected)) < 1e-12
        assert worst([got.weight_hh], [free.weight_hh]) > 1e-3, "the test requires that something is clipped"
        if lengths is None:
            assert max(x.abs().max() for x in got.state) == 0.3


def test_recurrent_clip_matches_a_hand_computed_recursion():
    """A unit that is always active, reset "none", gates independent of y: dc_t/dc_{t-1} = 1 - u at every step."""
    u, clip = torch.sigmoid(torch.tensor(-1.0)).item(), 0.7
    W, V = torch.zeros(3, 1), torch.zeros(3, 1)
    bias = torch.tensor([0.0, 1.0, 0.5])  # r, z = 1 - u, n
    c0, y0, theta = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1), torch.full((1,), -9.0)
    options: dict[str, Any] = {"reset": "none", "surrogate": egru.Surrogate(0.1, 1.0), "recurrent_clip": clip}
    x = torch.zeros(4, 1, 1)
    result = functional.egru_sequence(x, EventState(c0, y0), W, V, bias, None, theta, **options)
    weights = [0.3, -2.0, 1.5, 3.0]  # gradient of y at every step; y = c
    (gradient,) = torch.autograd.grad((torch.tensor(weights)[:, None, None] * result.y).sum(), c0)
    adjoint = 0.0
    for w in reversed(weights):
        adjoint = max(-clip, min(clip, (adjoint + w) * (1 - u)))
    assert gradient.item() == pytest.approx(adjoint, rel=1e-12)


def test_intermediate_gradients_equal_autograd():
    x, c0, y0, W, V, b, b_hh, theta = tensors()
    p = functional.F.linear(x, W, b).detach().requires_grad_()
    surrogate = egru.Surrogate(0.8)
    result = functional.event_sequence(
        lambda p, y, memory: functional.gru_update(p, y, memory, V, b_hh, "before"),
        p, EventState(c0, y0), theta, surrogate=surrogate,
    )  # fmt: skip
    w = torch.randn_like(result.y)
    (expected,) = torch.autograd.grad((w * result.y).sum(), p)
    got = functional.egru_backward(
        w, None, (None, None), x, EventState(c0, y0), W, V, theta, result, surrogate=surrogate, input_gradient=False
    )
    assert got.input is None
    assert worst([expected], [got.a]) <= 1e-12
    slope = surrogate.slope(result.c, theta)
    assert torch.equal(got.k, (result.c > theta) + result.c * slope)


def test_gradients_match_finite_differences_away_from_the_window():
    """If no state is inside the window, the surrogate gradient is the true gradient between events."""
    surrogate = egru.Surrogate(width=1e-4)
    for reset, reset_gate in itertools.product(RESETS, RESET_GATES):

        def run(x, c0, y0, *rest, reset: Reset = reset, reset_gate: ResetGate = reset_gate):
            return functional.egru_sequence(
                x, EventState(c0, y0), *rest, reset=reset, reset_gate=reset_gate, surrogate=surrogate
            )

        for _ in range(50):
            inputs: list[Any] = tensors()
            with torch.no_grad():
                inputs[2].clamp_min_(0.05)  # at y0 = 0 a perturbation would change its event
            if ((run(*inputs).c - inputs[-1]).abs() > 10 * surrogate.width).all():
                break
        else:
            pytest.fail("no random case keeps the margin")
        assert torch.autograd.gradcheck(lambda *a, run=run: run(*a).y, inputs, atol=1e-6, fast_mode=True)


def test_thresholds_above_one_give_no_events_and_no_recurrent_gradient():
    """From the zero state, with all states outside the surrogate's window."""
    x, *_, W, V, b, b_hh, _ = tensors()
    zero = torch.zeros(B, H)
    theta = torch.full((H,), 1.5, requires_grad=True)
    for reset, reset_gate in itertools.product(RESETS, RESET_GATES):
        result = functional.egru_sequence(
            x, EventState(zero, zero), W, V, b, b_hh, theta,
            reset=reset, reset_gate=reset_gate, surrogate=egru.Surrogate(width=0.4),
        )  # fmt: skip
        assert not result.y.any()
        assert (result.c.abs() <= 1).all()
        grads = torch.autograd.grad(result.y.sum() + result.c.sum(), (V, theta))
        assert not grads[0].any()
        assert not grads[1].any()


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_reset_scale_zero_equals_reset_none(scale):
    x, c0, y0, W, V, b, b_hh, theta = tensors()

    def run(reset, scale):
        return functional.egru_sequence(
            x, EventState(c0, y0), W, V, b, b_hh, theta,
            reset=reset, surrogate=egru.Surrogate(), reset_scale=scale,
        ).c  # fmt: skip

    for reset in ("output", "threshold", "hard"):
        assert torch.equal(run(reset, scale), run("none", 1.0)) == (scale == 0)


def test_one_step_matches_a_hand_computed_example():
    """Eqs. 1 and 2 of the paper for one unit."""
    state = EventState(torch.tensor([[0.6]]), torch.tensor([[0.6]]))
    W = torch.tensor([[0.0], [0.0], [1.0]])
    V = torch.tensor([[2.0], [0.0], [1.0]])
    args = (torch.tensor([[0.5]]), state, W, V, None, None, torch.tensor([0.5]))
    r = 1 / (1 + torch.exp(torch.tensor(-1.2)))
    before = 0.5 * torch.tanh(0.5 + r * 0.6) + 0.5 * 0.6
    states: dict[Reset, torch.Tensor] = {
        "output": before - 0.6,
        "none": before,
        "hard": before - 0.5 * 0.6,
        "threshold": before - 0.5,
    }
    for reset, expected in states.items():
        c, y = functional.egru_step(*args, reset=reset, surrogate=egru.Surrogate())
        torch.testing.assert_close(c[0, 0], expected)
        seen = before if reset == "threshold" else expected
        torch.testing.assert_close(y[0, 0], torch.where(seen > 0.5, seen, 0.0))


def test_unknown_option_names_raise_value_error():
    x, c0, y0, W, V, b, b_hh, theta = tensors()
    with pytest.raises(ValueError, match="reset must be one of output, threshold, hard, none; got 'soft'"):
        functional.egru_step(
            x[0], EventState(c0, y0), W, V, b, b_hh, theta,
            reset="soft",  # pyright: ignore[reportArgumentType]
            surrogate=egru.Surrogate(),
        )  # fmt: skip
    with pytest.raises(ValueError, match="reset_gate must be one of before, after; got 'during'"):
        functional.egru_sequence(
            x, EventState(c0, y0), W, V, b, b_hh, theta,
            reset_gate="during",  # pyright: ignore[reportArgumentType]
            surrogate=egru.Surrogate(),
        )  # fmt: skip
