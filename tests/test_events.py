import pytest
import torch

import egru
from egru.events import emit


def test_state_at_the_threshold_emits_no_event():
    c = torch.tensor([0.4, 0.5, 0.6])
    y, e = emit(c, c, torch.tensor(0.5), egru.Surrogate())
    assert e.tolist() == [0, 0, 1]
    assert y.tolist() == [0, 0, 0.6]


def test_gradient_is_the_specified_slope():
    surrogate = egru.Surrogate(width=0.5, height=0.7)
    c = torch.linspace(-1, 2, 61, requires_grad=True)
    theta = torch.tensor(0.4, requires_grad=True)
    y, e = emit(c, c, theta, surrogate)
    slope = 0.7 * (1 - (c - theta).abs() / 0.5).clamp_min(0)
    k = (c > theta) + c * slope
    (grad_c, grad_theta) = torch.autograd.grad(y.sum(), (c, theta), retain_graph=True)
    torch.testing.assert_close(grad_c, k)
    torch.testing.assert_close(grad_theta, -(c * slope).sum())
    (through_events,) = torch.autograd.grad(e.sum(), c)
    torch.testing.assert_close(through_events, slope)


def test_bounded_clamps_the_output_slope_only():
    c = torch.linspace(-2, 2, 81, requires_grad=True)
    theta = torch.tensor(0.3, requires_grad=True)
    free, _ = emit(c, c, theta, egru.Surrogate(height=1.0))
    bound, _ = emit(c, c, theta, egru.Surrogate(height=1.0, bounded=True))
    free_c, free_theta = torch.autograd.grad(free.sum(), (c, theta))
    bound_c, bound_theta = torch.autograd.grad(bound.sum(), (c, theta))
    assert free_c.min() < 0
    assert free_c.max() > 1
    torch.testing.assert_close(bound_c, free_c.clamp(0, 1))
    torch.testing.assert_close(bound_theta, free_theta)


@pytest.mark.parametrize("shape", ["triangle", "rectangle", "fast_sigmoid"])
def test_compact_shapes_vanish_outside_the_window(shape):
    surrogate = egru.Surrogate(width=0.25, shape=shape)
    c = torch.linspace(-3, 3, 601)
    outside = (c - 0.1).abs() >= 0.25 + 1e-12
    slope = surrogate.slope(c, torch.tensor(0.1))
    assert surrogate.slope(torch.tensor(0.1), torch.tensor(0.1)) == 1
    assert bool((slope[outside] == 0).all()) == surrogate.compact


def test_registered_shape_can_be_used_and_names_are_unique():
    egru.register_surrogate("parabola_for_test", lambda x: (1 - x**2).clamp_min(0), compact=True)
    layer = egru.EGRU(2, 3, surrogate=egru.Surrogate(shape="parabola_for_test"))
    y, _ = layer(torch.randn(4, 2, 2))
    y.sum().backward()
    assert layer.get_parameter("threshold_l0").grad is not None
    with pytest.raises(ValueError, match="already registered"):
        egru.register_surrogate("triangle", torch.abs, compact=True)
    with pytest.raises(ValueError, match="identifier"):
        egru.register_surrogate("not a name", torch.abs, compact=True)
    with pytest.raises(TypeError, match="callable"):
        egru.register_surrogate("number", 3, compact=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width must be positive, got 0"),
        ({"width": -1.0}, "width must be positive, got -1.0"),
        ({"width": float("nan")}, "width must be a finite number, got nan"),
        ({"width": True}, "width must be a finite number, got True"),
        ({"height": -0.1}, "height must not be negative, got -0.1"),
        ({"height": "1"}, "height must be a finite number, got '1'"),
        ({"shape": "square"}, "unknown shape 'square'; registered: triangle"),
    ],
)
def test_invalid_surrogate_raises_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        egru.Surrogate(**arguments)
