"""Errors name the argument, the value received and what is accepted."""

import functools
from typing import Any

import pytest
import torch

import egru


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_size": 0}, ValueError, "EGRU: input_size must be at least 1, got 0"),
        ({"hidden_size": -2}, ValueError, "hidden_size must be at least 1, got -2"),
        ({"hidden_size": 2.5}, TypeError, "hidden_size must be an int, got float 2.5"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
        ({"num_layers": True}, TypeError, "num_layers must be an int, got bool True"),
        ({"dropout": 1.5}, ValueError, "dropout must be a probability, 0 <= p <= 1; got 1.5"),
        ({"dropconnect": 1.0}, ValueError, "dropconnect must be a probability, 0 <= p < 1; got 1.0"),
        ({"zoneout": -0.1}, ValueError, "zoneout must be a probability, 0 <= p < 1; got -0.1"),
        ({"reset": "soft"}, ValueError, "reset must be one of output, threshold, hard, none; got 'soft'"),
        ({"events": "both"}, ValueError, "EGRU: events must be one of positive, signed, delta; got 'both'"),
        (
            {"events": "delta", "reset_gate": "after"},
            ValueError,
            "EGRU: events='delta' requires reset='none' and reset_gate='after', got reset='output'",
        ),
        (
            {"events": "delta", "reset": "none"},
            ValueError,
            "EGRU: events='delta' requires .* got reset='none' and reset_gate='before'",
        ),
        (
            {"events": "signed", "threshold": egru.Threshold.constant(-0.5)},
            ValueError,
            r"EGRU: events='signed' requires thresholds of at least 0, got Threshold\(.*mean=-0.5",
        ),
        ({"reset_gate": "v3"}, ValueError, "reset_gate must be one of before, after; got 'v3'"),
        ({"dropout_mode": "locked"}, ValueError, "dropout_mode must be one of variational, plain; got 'locked'"),
        ({"backend": "tpu"}, ValueError, "backend must be one of auto, .*reference; got 'tpu'"),
        ({"threshold": 0.5}, TypeError, "threshold must be an egru.Threshold, got float 0.5"),
        ({"surrogate": "triangle"}, TypeError, "surrogate must be an egru.Surrogate, got str 'triangle'"),
        ({"reset_scale": -1.0}, ValueError, "reset_scale must be finite and not negative, got -1.0"),
        ({"reset_scale": torch.ones(2)}, TypeError, "reset_scale must be a number"),
        ({"dtype": torch.int64}, TypeError, "dtype must be a floating type, got torch.int64"),
    ],
)
def test_invalid_constructor_arguments_raise(arguments, error, message):
    with pytest.raises(error, match=message):
        egru.EGRU(**{"input_size": 3, "hidden_size": 4, **arguments})


def test_ernn_rejects_resets_of_a_memory():
    with pytest.raises(ValueError, match="ERNN: reset must be one of output, none; got 'hard'"):
        egru.ERNN(3, 4, reset="hard")


@pytest.mark.parametrize("layer", [egru.EGRU, egru.ERNN])
@pytest.mark.parametrize("events", ["signed", "delta"])
def test_negative_threshold_of_two_sided_events_raises(layer, events):
    options: dict[str, Any] = {"reset_gate": "after"} if layer is egru.EGRU else {}
    layer = layer(3, 4, events=events, reset="none", threshold=egru.Threshold.constant(0.1), **options)
    layer.get_parameter("threshold_l0").data[2] = -0.25
    with pytest.raises(ValueError, match=f"threshold contains -0.25; events='{events}' requires .* of at least 0"):
        layer(torch.zeros(5, 2, 3))


def test_elstm_refuses_changes_of_the_memory_cell():
    with pytest.raises(ValueError, match="ELSTM: events='delta' requires compare='output', got compare='cell'"):
        egru.ELSTM(3, 4, events="delta", reset="none")


def test_dropout_with_one_layer_warns():
    with pytest.warns(UserWarning, match="acts between layers and num_layers=1 has none"):
        egru.EGRU(3, 4, dropout=0.5)


STATE = egru.EventState(torch.zeros(1, 2, 4, dtype=torch.float64), torch.zeros(1, 2, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("x", "state", "error", "message"),
    [
        (torch.zeros(5, 2, 2), None, ValueError, r"input has 2 features \(shape \(5, 2, 2\)\), expected 3"),
        (torch.zeros(5), None, ValueError, r"shape \(time, batch, features\) or \(time, features\), got \(5,\)"),
        (torch.zeros(0, 2, 3), None, ValueError, r"input is empty, shape \(0, 2, 3\)"),
        (torch.zeros(5, 2, 3).float(), None, TypeError, r"input is torch.float32, the parameters are torch.float64"),
        (torch.zeros(5, 2, 3).long(), None, TypeError, r"input is torch.int64"),
        ([1.0], None, TypeError, "input must be a Tensor or PackedSequence, got list"),
        (torch.zeros(5, 2, 3, device="meta"), None, ValueError, "input is on meta, the parameters are on cpu"),
        (
            torch.zeros(5, 2, 3),
            [torch.zeros(1, 2, 4)],
            TypeError,
            r"hx must be egru.EventState\(c, y\), .*, or a Tensor that stands for both; got list",
        ),
        (torch.zeros(5, 2, 3), torch.zeros(1, 4), ValueError, r": hx has shape \(1, 4\), expected \(1, 2, 4\)"),
        (torch.zeros(5, 3, 3), STATE, ValueError, r"state.c has shape \(1, 2, 4\), expected \(1, 3, 4\)"),
        (torch.zeros(5, 2, 3), (STATE.c, STATE.y.half()), TypeError, r"state.y is torch.float16"),
        (torch.zeros(5, 2, 3), (STATE.c, None), TypeError, r"state.y must be a Tensor, got NoneType"),
        (torch.zeros(5, 3), STATE, ValueError, r"state.c has shape \(1, 2, 4\), expected \(1, 4\)"),
        (torch.full((5, 2, 3), float("nan")), None, ValueError, "input contains nan; expected finite values"),
        (torch.full((5, 2, 3), -float("inf")), None, ValueError, "input contains -inf; expected finite values"),
        (torch.zeros(5, 2, 3), (STATE.c / 0, STATE.y), ValueError, r"state.c contains nan"),
        (torch.zeros(5, 2, 3), (STATE.c, STATE.y / 0), ValueError, r"state.y contains nan"),
    ],
)
def test_invalid_input_or_state_raises(x, state, error, message):
    if isinstance(x, torch.Tensor) and x.dtype == torch.float32 and "float32" not in message:
        x = x.double()  # parameters are created before the fixture sets the default dtype
    if isinstance(state, torch.Tensor):
        state = state.double()
    with pytest.raises(error, match=message):
        egru.EGRU(3, 4)(x, state)


@pytest.mark.parametrize("make", [egru.EGRU, egru.ELSTM, egru.ERNN])
def test_nan_in_input_or_weights_raises(make):
    layer = make(3, 4)
    with pytest.raises(ValueError, match="input contains nan; expected finite values"):
        layer(torch.full((5, 2, 3), float("nan")))
    with torch.no_grad():
        layer.get_parameter("weight_ih_l0")[1] = float("nan")
    with pytest.raises(ValueError, match="weight_ih contains nan; expected finite values"):
        layer(torch.ones(5, 2, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["weight_ih", "weight_hh", "bias_ih", "bias_hh"])
@pytest.mark.parametrize("hidden_size", [4, 70])
@pytest.mark.parametrize(
    "make",
    [egru.EGRU, egru.ELSTM, egru.ERNN]
    + [functools.partial(make, backend="reference") for make in (egru.EGRU, egru.ELSTM)],
)
def test_weights_of_inactive_units_and_inputs_are_checked(make, hidden_size, name, bad):
    """Kernels skip these weights, so that NaN there would not change the outputs. Infinite biases saturate gates."""
    layer = make(3, hidden_size)
    with torch.no_grad():
        layer.get_parameter("threshold_l0").fill_(50.0)
        layer.get_parameter(name + "_l0").view(-1)[-1] = bad
    with pytest.raises(ValueError, match=f"{name} contains {bad}; expected finite values"):
        layer(torch.tensor([1.0, 1.0, 0.0]).expand(5, 2, 3))


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM])
def test_reset_scale_that_requires_a_gradient_raises(layer_class):
    layer, x = layer_class(3, 4), torch.ones(5, 2, 3)
    layer.reset_scale.requires_grad_()
    name = layer_class.__name__
    with pytest.raises(
        ValueError, match=f"{name}: reset_scale must not require a gradient, because no kernel computes"
    ):
        layer(x)
    with torch.no_grad():
        layer(x)


def test_layers_without_kernels_have_a_gradient_of_reset_scale():
    layer, x = egru.ERNN(3, 4, threshold=egru.Threshold.constant(-1.0)), torch.randn(5, 2, 3)
    layer.reset_scale.requires_grad_()
    layer(x)[0].sum().backward()
    assert layer.reset_scale.grad is not None
    assert layer.reset_scale.grad.abs() > 0


@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM])
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0", "threshold_l0"])
def test_nan_in_a_parameter_raises(name, layer_class):
    """``NaN > theta`` is false, so without a check a broken unit would look inactive."""
    layer = layer_class(3, 4)
    with torch.no_grad():
        layer.get_parameter(name).view(-1)[1] = float("nan")
    with pytest.raises(ValueError, match=f"{name.removesuffix('_l0')} contains nan"):
        layer(torch.ones(5, 2, 3), egru.EventState(torch.ones(1, 2, 4), torch.ones(1, 2, 4)))


def test_invalid_cell_input_raises():
    cell = egru.EGRUCell(3, 4)
    with pytest.raises(ValueError, match=r"shape \(batch, features\) or \(features,\), got \(1, 2, 3\)"):
        cell(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"state.c has shape \(2, 5\), expected \(2, 4\)"):
        cell(torch.zeros(2, 3), egru.EventState(torch.zeros(2, 5), torch.zeros(2, 5)))
    with pytest.raises(TypeError, match=r"hx must be egru.EventState"):
        cell(torch.zeros(2, 3), [torch.zeros(2, 4)])


@pytest.mark.parametrize("hx", [torch.zeros(1, 2, 4).double(), (STATE.y, STATE.c)])
def test_elstm_requires_an_event_state(hx):
    """A tensor leaves the memory open, and a tuple (h, c) of ``torch.nn.LSTM`` is in the opposite order."""
    with pytest.raises(TypeError, match=r"ELSTM: hx must be egru.EventState\(c, y\), .*; got (Tensor|tuple)"):
        egru.ELSTM(3, 4)(torch.zeros(5, 2, 3), hx)


def test_double_backward_raises():
    layer = egru.EGRU(3, 4)
    (grad,) = torch.autograd.grad(
        layer(torch.randn(3, 2, 3))[0].sum(), layer.get_parameter("weight_hh_l0"), create_graph=True
    )
    with pytest.raises(RuntimeError):
        grad.sum().backward()
