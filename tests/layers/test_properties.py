"""Properties that hold for all shapes, dtypes and options, tested with Hypothesis."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import egru
from egru.types import RESETS, THRESHOLD_KINDS
from tests.helpers import worst

sizes = st.integers(1, 7)


@st.composite
def layers(draw, dtypes=(torch.float64, torch.float32)):
    return egru.EGRU(
        draw(sizes),
        draw(sizes),
        draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bidirectional=draw(st.booleans()),
        reset=draw(st.sampled_from(RESETS)),
        reset_gate=draw(st.sampled_from(("before", "after"))),
        threshold=egru.Threshold(
            draw(st.sampled_from(THRESHOLD_KINDS)), per_unit=draw(st.booleans()), trainable=draw(st.booleans())
        ),
        surrogate=egru.Surrogate(draw(st.floats(0.01, 3)), draw(st.floats(0, 2)), draw(st.booleans())),
        reset_scale=draw(st.floats(0, 1.5)),
        dropconnect=draw(st.sampled_from((0.0, 0.5))),
        zoneout=draw(st.sampled_from((0.0, 0.3))),
        dtype=draw(st.sampled_from(dtypes)),
    )


def make_input(layer, T, B):
    shape = (B, T) if layer.batch_first else (T, B)
    return torch.randn(*shape, layer.input_size, dtype=layer.reset_scale.dtype)


@given(layers(), sizes, sizes, st.booleans())
def test_shapes_dtypes_and_finite_gradients(layer, T, B, training):
    layer.train(training)
    x = make_input(layer, T, B).requires_grad_()
    y, state = layer(x)
    assert y.shape == (*x.shape[:2], layer.hidden_size * layer.num_directions)
    assert y.dtype == x.dtype
    assert state.c.shape == state.y.shape == (layer.num_layers * layer.num_directions, B, layer.hidden_size)
    (y.sum() + state.c.sum()).backward()
    for tensor in (x, *(p for p in layer.parameters() if p.requires_grad)):
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()


@given(layers(), sizes, sizes)
def test_output_is_zero_or_a_state_above_the_threshold(layer, T, B):
    layer.eval()
    records = []
    layer.observe(records.append)
    layer(make_input(layer, T, B))
    assert len(records) == layer.num_layers * layer.num_directions
    for record in records:
        events = record.c > record.theta
        assert torch.equal(record.y, torch.where(events, record.c, 0))


@given(layers(dtypes=(torch.float64,)), st.integers(2, 7), sizes, st.data())
def test_two_chunks_equal_one_call(layer, T, B, data):
    if layer.bidirectional:
        return
    layer.eval()
    x = make_input(layer, T, B)
    dim = 1 if layer.batch_first else 0
    cut = data.draw(st.integers(1, T - 1))
    whole, end = layer(x)
    first, state = layer(x.narrow(dim, 0, cut))
    second, last = layer(x.narrow(dim, cut, T - cut), state)
    assert worst([whole, *end], [torch.cat([first, second], dim), *last]) <= 1e-12


@given(layers(dtypes=(torch.float64,)), sizes, st.integers(2, 5))
def test_sequences_of_a_batch_are_independent(layer, T, B):
    layer.eval()
    x = make_input(layer, T, B)
    dim = 0 if layer.batch_first else 1
    whole, _ = layer(x)
    single, _ = layer(x.narrow(dim, 1, 1))
    assert worst([whole.narrow(dim, 1, 1)], [single]) <= 1e-12


@given(layers(), sizes, sizes)
def test_results_do_not_depend_on_which_gradients_are_needed(layer, T, B):
    """Neither saving for the backward pass nor the input's gradient may change the numbers."""
    layer.eval()
    x = make_input(layer, T, B)
    with torch.no_grad():
        without_grad, _ = layer(x)
    y, _ = layer(x)
    assert torch.equal(without_grad, y)
    y.sum().backward()
    grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    layer(x.requires_grad_())[0].sum().backward()
    assert all(
        torch.equal(g, p.grad)
        for g, p in zip(grads, (p for p in layer.parameters() if p.grad is not None), strict=True)
    )
