"""ContinuousEGRU, ContinuousStack and InputEvents: outputs, gradients, carried state and constructors."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

import egru
from egru.continuous import ContinuousEGRU, ContinuousStack, InputEvents, engines
from tests.helpers import PATIENCE, weighted_sum

ENGINES = list(engines.names())


def grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def events(batch: int = 2, count: int = 8, horizon: float = 6.0, channels: int = 3, seed: int = 1) -> InputEvents:
    g = torch.Generator().manual_seed(seed)
    times = [torch.rand(count - s, generator=g, dtype=torch.float64) * horizon for s in range(batch)]
    which = [torch.randint(channels, (count - s,), generator=g) for s in range(batch)]
    values = [torch.rand(count - s, generator=g, dtype=torch.float64) + 0.5 for s in range(batch)]
    return InputEvents.from_lists(times, which, values)


def layer(hidden: int = 5, inputs: int = 3, seed: int = 0, **options) -> ContinuousEGRU:
    torch.manual_seed(seed)
    model = ContinuousEGRU(inputs, hidden, 0.8, 1.1, 1.5, **options)
    sign = -1 if options.get("bias_sign") == "-" else 1
    with torch.no_grad():  # biases at which units emit events without input
        model.b.copy_(sign * (torch.randn(3, hidden) * 0.3 + torch.tensor([[1.0], [0.0], [0.9]])))
    return model


def test_output_shapes_order_and_trace():
    model, inputs = layer(), events()
    out = model(inputs, 6.0, [1.0, 2.5, 6.0])
    assert out.times.shape == out.units.shape == out.amplitudes.shape == (int(out.offsets[-1]),)
    assert out.c.shape == out.trace.shape == (2, 3, 5)
    torch.testing.assert_close(out.amplitudes, model.thresholds()[out.units])
    assert out.state.a.shape == (2, 3, 5)
    torch.testing.assert_close(out.state.c, out.c[:, -1])
    assert (out.samples.bincount(minlength=2) == out.counters.events).all()
    for s in range(2):
        assert (out.times[out.samples == s].diff() >= 0).all()
    # The trace is a sum over events.
    decay = torch.exp(-(2.5 - out.times) / 1.5) * out.amplitudes * (out.times <= 2.5)
    direct = torch.zeros(2, 5).index_put_((out.samples, out.units), decay, accumulate=True)
    torch.testing.assert_close(out.trace[:, 1], direct)


@pytest.mark.parametrize("engine", ENGINES)
def test_state_that_rounds_to_its_threshold_can_be_passed_on(engine):
    threshold = egru.Threshold("identity", mean=2.0, std=0.0)
    exact = ContinuousEGRU(1, 64, threshold=threshold)
    model = ContinuousEGRU(1, 64, threshold=threshold, engine=engine, dtype=torch.float32)
    empty = torch.zeros(0)
    nothing = InputEvents(empty, empty.long(), empty, torch.tensor([0, 0]))
    with torch.no_grad():
        exact.V.zero_()
        exact.b.copy_(torch.randn(3, 64).float())
        exact.b[2] = (exact.b[2].abs() + 0.5).float()
        model.load_state_dict(exact.state_dict())
        model.threshold.copy_(exact(nothing, 1.0).state.c[0])
        nothing = nothing._replace(times=empty.float(), values=empty.float())
        out = model(nothing, 1.0)
    assert engine == "lockstep" or len(out.times) < 64  # its tolerance for simultaneous events is larger
    assert (out.state.c < model.thresholds()).all()
    model(nothing, 1.0, state=out.state)


@pytest.mark.parametrize("engine", ENGINES)
def test_second_derivatives_raise(engine):
    model = layer(engine=engine)
    out = model(events(), 6.0, [1.0, 2.5])
    (grad,) = torch.autograd.grad(out.c.sum(), list(model.parameters())[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.grad(grad.square().sum(), list(model.parameters()), allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad.square().sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_transforms_and_forward_mode_are_refused(engine):
    model, inputs = layer(engine=engine), events()

    def loss(U: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"U": U}, (inputs, 6.0)).state.c.sum()

    U = model.U.detach()
    message = "ContinuousEGRU: torch.func transforms and forward-mode differentiation are not supported"
    for transform in (torch.func.jacfwd, torch.func.jacrev, torch.func.grad, torch.func.hessian):
        with pytest.raises(RuntimeError, match=message):
            transform(loss)(U)
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(loss, (U,), (U,))
    with pytest.raises(RuntimeError, match=message):
        torch.func.vmap(loss)(torch.stack([U, U]))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        loss(forward_ad.make_dual(U, U))


@pytest.mark.parametrize("engine", ENGINES)
def test_all_inputs_and_parameters_have_gradients(engine):
    model = layer(engine=engine, trainable_tau=True, threshold=egru.Threshold(mean=-1.0))
    inputs = events()
    inputs = inputs._replace(times=inputs.times.requires_grad_(), values=inputs.values.requires_grad_())
    start = model.initial_state(2)._replace(trace=torch.ones(2, 5, requires_grad=True))
    start.a.requires_grad_()
    start.c.requires_grad_()
    out = model(inputs, 6.0, [1.0, 2.5, 6.0], start)
    assert out.counters.floored is None
    weighted_sum([out.times, out.amplitudes, out.c, out.trace]).backward()
    assert out.counters.floored is not None
    differentiable = {
        **dict(model.named_parameters()),
        "times": inputs.times,
        "values": inputs.values,
        **start._asdict(),
    }
    for name, tensor in differentiable.items():
        assert tensor.grad is not None, name
        assert torch.isfinite(tensor.grad).all(), name
        assert tensor.grad.abs().max() > 0, name


ALTERNATIVES = {"bias_sign": "-", "start": "rest", "amplitude": "one", "reset_side": "post"}


@pytest.mark.parametrize("options", [{}, ALTERNATIVES], ids=["default", "alternatives"])
def test_gradcheck(options):
    model = layer(2, nodes=12, panel=1.0, grazing_floor=0.0, engine="reference", **options)
    inputs = events(1, 3, 3.0)
    names = [name for name, _ in model.named_parameters()]

    def call(times, values, *parameters):
        out = torch.func.functional_call(
            model,
            dict(zip(names, parameters, strict=True)),
            (inputs._replace(times=times, values=values), 3.0, [2.0, 3.0]),
        )
        return out.times, out.amplitudes, out.c, out.trace, out.state.a, out.state.c, out.state.trace

    arguments = (inputs.times, inputs.values, *(p.detach() for p in model.parameters()))
    assert len(call(*arguments)[0]) > 0
    assert torch.autograd.gradcheck(call, [a.clone().requires_grad_() for a in arguments], eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_masked_connections_have_no_effect_and_no_gradient(engine):
    mask, input_mask = torch.rand(5, 5) < 0.5, torch.rand(5, 3) < 0.7
    sparse = layer(engine=engine, mask=mask, input_mask=input_mask)
    plain = layer(engine=engine)
    with torch.no_grad():
        plain.V.mul_(mask)
        plain.U.mul_(input_mask)
    left, right = sparse(events(), 6.0, [3.0, 6.0]), plain(events(), 6.0, [3.0, 6.0])
    assert torch.equal(left.units, right.units)
    torch.testing.assert_close(left.times, right.times, rtol=0, atol=1e-12)
    weighted_sum([left.times, left.c]).backward()
    weighted_sum([right.times, right.c]).backward()
    torch.testing.assert_close(grad(sparse.V), grad(plain.V) * mask, rtol=0, atol=1e-11)
    torch.testing.assert_close(grad(sparse.U), grad(plain.U) * input_mask, rtol=0, atol=1e-11)
    assert set(sparse.state_dict()) >= {"mask", "input_mask"}


def test_bias_sign_minus_negates_the_bias():
    plus, minus = layer(), layer(bias_sign="-")
    assert torch.equal(minus.b, -plus.b)
    left, right = plus(events(), 6.0, [6.0]), minus(events(), 6.0, [6.0])
    assert torch.equal(left.times, right.times)
    assert torch.equal(left.c, right.c)


def test_activations_that_start_at_rest_stay_there():
    model = layer(start="rest")
    none = InputEvents.from_lists([torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)])
    with torch.no_grad():
        model.b[2] = -1.0
    torch.testing.assert_close(model(none, 3.0).state.a[0], model.b.detach())


def test_two_calls_with_carried_state_match_one_call():
    """Events, traces and gradients are equal."""
    model, inputs = layer(nodes=12, panel=1.0), events(1)
    cut, horizon = 2.7, 6.0
    early = inputs.times <= cut
    first = InputEvents.from_lists([inputs.times[early]], [inputs.channels[early]], [inputs.values[early]])
    second = InputEvents.from_lists([inputs.times[~early] - cut], [inputs.channels[~early]], [inputs.values[~early]])
    whole = model(inputs, horizon, [horizon])
    weighted_sum([whole.times, whole.c, whole.trace, *whole.state]).backward()
    expected = [grad(p).clone() for p in model.parameters()]
    model.zero_grad()
    one = model(first, cut)
    two = model(second, horizon - cut, [horizon - cut], one.state)
    assert len(one.times) > 0
    assert len(two.times) > 0
    times = torch.cat([one.times, two.times + cut])
    torch.testing.assert_close(times, whole.times, rtol=0, atol=1e-12)
    torch.testing.assert_close(two.trace, whole.trace, rtol=0, atol=1e-12)
    weighted_sum([times, two.c, two.trace, *two.state]).backward()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e, rtol=0, atol=1e-11)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradient_through_a_stack_matches_differences(engine):
    """The gradient of the lower layer passes through its event times and amplitudes."""
    torch.manual_seed(3)
    options = {"nodes": 12, "panel": 1.0, "grazing_floor": 0.0, "engine": engine}
    stack = ContinuousStack(layer(4, 3, **options), layer(3, 4, seed=5, **options))
    inputs = events(1, 6, 4.0)

    def value() -> torch.Tensor:
        low, high = stack(inputs, 4.0, [3.0, 4.0])
        assert len(low.times) > 2
        assert len(high.times) > 1
        return weighted_sum([high.times, high.amplitudes, high.c, high.trace])

    value().backward()
    lower = stack.layers[0]
    assert isinstance(lower, ContinuousEGRU)
    for parameter in (lower.V, lower.U, lower.b, lower.threshold):
        index = int(grad(parameter).abs().argmax())
        flat, h = parameter.data.view(-1), 2e-5
        gradient = float(grad(parameter).view(-1)[index])
        values = []
        with torch.no_grad():
            for k in (-2, -1, 1, 2):
                flat[index] += k * h
                values.append(value().item())
                flat[index] -= k * h
        difference = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
        assert abs(gradient) > 1e-4
        assert abs(difference - gradient) < 1e-6 * max(1.0, abs(gradient))


def test_running_loss_is_integrated_and_differentiable():
    model = layer(2, nodes=12, panel=1.0)
    inputs = events(2, 4, 3.0)
    out = model(inputs, 3.0, running_loss=lambda c, t, sample: torch.ones_like(t) * (1 + sample))
    torch.testing.assert_close(out.integral, torch.tensor([3.0, 6.0]))

    def call(b):
        run = torch.func.functional_call(
            model, {"b": b}, (inputs, 3.0), {"running_loss": lambda c, t, sample: (c**2).sum(-1) * t}
        )
        return run.integral

    assert torch.autograd.gradcheck(call, [model.b.detach().clone().requires_grad_()], atol=1e-6)


def test_engines_agree():
    outs = [layer(engine=name)(events(), 6.0, [3.0]) for name in ENGINES]
    for out in outs[1:]:
        assert torch.equal(out.units, outs[0].units)
        torch.testing.assert_close(out.times, outs[0].times, rtol=0, atol=1e-10)


def test_float32_is_close_to_float64():
    model = layer(8)
    inputs = events()
    exact = model(inputs, 6.0, [6.0])
    exact.c.sum().backward()
    gradient = grad(model.V).clone()
    model.zero_grad()
    model.float()
    single = model(inputs._replace(times=inputs.times.float(), values=inputs.values.float()), 6.0, [6.0])
    assert single.times.dtype == torch.float32
    assert torch.equal(single.units, exact.units)
    assert (single.times - exact.times).abs().max() < 1e-5
    single.c.sum().backward()
    assert (grad(model.V) - gradient).abs().max() < 1e-3 * gradient.abs().max()


def test_training_moves_the_first_event_to_half_its_time():
    model = layer(4)
    inputs = events(1, 6, 3.0)
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    goal = model(inputs, 4.0).times[0].item() / 2
    for _ in range(100):
        loss = (model(inputs, 2.0).times[0] - goal).square()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert abs(model(inputs, 2.0).times[0].item() - goal) < 0.02 * goal


def test_state_dict_and_pickle_preserve_the_layer():
    model = layer(trainable_tau=True)
    other = layer(seed=9, trainable_tau=True)
    other.load_state_dict(model.state_dict())
    unpickled = pickle.loads(pickle.dumps(model))
    out = [m(events(), 6.0, [6.0]) for m in (model, other, unpickled)]
    assert torch.equal(out[0].times, out[1].times)
    assert torch.equal(out[0].times, out[2].times)
    assert set(layer().state_dict()) == {"V", "U", "b", "threshold", "fixed_tau"}


def test_thresholds_can_be_shared_or_fixed():
    shared = layer(threshold=egru.Threshold(mean=-1.0, per_unit=False))
    out = shared(events(), 6.0, [6.0])
    out.c.sum().backward()
    assert grad(shared.threshold).shape == (1,)
    fixed = layer(threshold=egru.Threshold.constant(0.3))
    assert (fixed(events(), 6.0).amplitudes == 0.3).all()


def test_from_padded_equals_from_lists():
    times = torch.tensor([[2.0, 1.0, 0.5], [0.3, 9.0, 9.0]])
    channels = torch.tensor([[0, 1, 2], [1, 0, 0]])
    padded = InputEvents.from_padded(times, channels, lengths=torch.tensor([3, 1]))
    ragged = InputEvents.from_lists([times[0], times[1, :1]], [channels[0], channels[1, :1]])
    for left, right in zip(padded, ragged, strict=True):
        assert torch.equal(left, right)
    assert padded.times.tolist() == [0.5, 1.0, 2.0, 0.3]
    assert padded.channels.tolist() == [2, 1, 0, 1]
    assert padded.offsets.tolist() == [0, 3, 4]
    assert padded.batch == 2


def test_from_series_and_from_irregular():
    x = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    every = InputEvents.from_series(x, 0.5)
    assert every.times.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert every.channels.tolist() == [0, 1, 0, 1]
    assert every.values.tolist() == [1.0, 0.0, 0.0, 2.0]
    sparse = InputEvents.from_series(x, 0.5, start=1.0, drop_zeros=True)
    assert sparse.times.tolist() == [1.0, 1.5]
    assert sparse.values.tolist() == [1.0, 2.0]
    seen = InputEvents.from_irregular(torch.tensor([[0.2, 0.7]]), x, torch.tensor([[False, True]]))
    assert seen.times.tolist() == [0.7, 0.7]
    x.requires_grad_()
    InputEvents.from_series(x, 0.5).values.sum().backward()
    assert (grad(x) == 1).all()


def test_exit_with_a_live_graph_prints_nothing():
    code = """
from egru.continuous import ContinuousEGRU, InputEvents
import torch
events = InputEvents.from_lists([torch.tensor([0.3, 0.4])], [torch.tensor([0, 1])])
out = ContinuousEGRU(2, 8)(events, 2.0, [2.0])
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
