"""Delays of events: all engines against autograd, and the delays of a layer."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from egru import Threshold
from egru.continuous import ContinuousEGRU, ContinuousLIF, InputEvents, engines
from egru.continuous.options import Options
from egru.continuous.problem import Engine, Problem
from tests.continuous.networks import EXACT, cotangents, density, network, run, worst_gradient
from tests.continuous.test_engines import autograd

OPTIONS = {
    "pre": {},
    "post": {"reset_side": "post"},
    "one": {"amplitude": "one"},
    "lif": {"cell": "lif", "amplitude": "one"},
}


def delayed_network(seed: int, options: Options, **sizes: Any) -> Problem:
    """Return a random problem whose units have one to three lines each, with delays from 0.02 to 2."""
    problem = network(seed, options, **sizes)
    H = problem.c0.shape[1]
    g = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *(1 + torch.arange(H) % 3).cumsum(0).tolist()])
    L = int(offsets[-1])
    V = torch.randn(3, H, L, generator=g, dtype=torch.float64) * (0.1 if options.cell == "lif" else 0.6)
    delays = 0.02 + 2 * torch.rand(L, generator=g, dtype=torch.float64)
    return dataclasses.replace(problem, V=V, delays=delays, line_offsets=offsets)


@pytest.fixture(params=engines.names())
def engine(request) -> Engine:
    return engines.get(request.param)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_matches_autograd(engine, options):
    problem = delayed_network(4, dataclasses.replace(EXACT, **OPTIONS[options]), hidden=4, drive=0.4)
    events = engine.forward(problem, density)
    assert 20 < len(events.times) < 300
    weights = cotangents(events)
    gradients = engine.backward(problem, events, weights, density)
    assert gradients.delays.abs().min() > 0
    errors = worst_gradient(gradients, autograd(problem, events, weights, density))
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("name", ["compiled", "lockstep"])
def test_engines_agree_with_equal_and_zero_delays(name):
    problem = delayed_network(7, EXACT, hidden=6, batch=3)
    delays = torch.where(torch.arange(len(problem.delays)) % 3 == 0, 0.0, 0.5)
    problem = dataclasses.replace(problem, delays=delays.double())
    (events, gradients), (expected, exact) = (run(engines.get(e), problem) for e in (name, "reference"))
    assert torch.equal(events.units, expected.units)
    assert (events.times - expected.times).abs().max() < 1e-11
    errors = worst_gradient(gradients, exact)
    assert max(errors.values()) < 1e-9, errors


def test_no_delay_is_the_same_as_delays_of_zero(engine):
    problem = network(3, EXACT, hidden=5)
    H = problem.c0.shape[1]
    V = problem.V * (1 - torch.eye(H))
    lines = {"delays": torch.zeros(H), "line_offsets": torch.arange(H + 1), "V": V}
    (events, gradients), (expected, exact) = (run(engine, p) for p in (dataclasses.replace(problem, **lines), problem))
    assert torch.equal(events.units, expected.units)
    assert (events.times - expected.times).abs().max() < 1e-12
    gradients = gradients._replace(V=gradients.V * (1 - torch.eye(H)), delays=exact.delays)
    assert max(worst_gradient(gradients, exact).values()) < 1e-9


def test_checkpoints_with_delays_are_bitwise_equal():
    problem = delayed_network(4, EXACT, hidden=5)
    every = dataclasses.replace(problem, options=dataclasses.replace(EXACT, checkpoint_every=7))
    compiled = engines.get("compiled")
    for a, b in zip(run(compiled, problem)[1], run(compiled, every)[1], strict=True):
        assert torch.equal(a, b)


EVENTS = InputEvents.from_lists(
    [torch.tensor([0.1, 0.5, 1.0, 1.6], dtype=torch.float64), torch.tensor([0.3, 0.9], dtype=torch.float64)],
    [torch.tensor([0, 1, 0, 1]), torch.tensor([1, 0])],
)


@pytest.mark.parametrize("shape", ["axonal", "connection"])
@pytest.mark.parametrize("engine_name", ["compiled", "lockstep"])
def test_gradients_of_trainable_delays_match_differences(shape, engine_name):
    torch.manual_seed(3)
    size, input_size = ((4,), (2,)) if shape == "axonal" else ((4, 4), (4, 2))
    layer = ContinuousEGRU(
        2,
        4,
        delays=0.1 + torch.rand(size),
        input_delays=0.1 + torch.rand(input_size),
        trainable_delays=True,
        engine=engine_name,
    )
    with torch.no_grad():
        layer.U.add_(1.5)
        layer.b[2] = 0.6

    def loss() -> Tensor:
        out = layer(EVENTS, 4.0, [2.0])
        assert len(out.times) > 8
        return out.times.sin().sum() + out.c.square().sum() + out.state.trace.sum()

    loss().backward()
    for module in (layer.delays, layer.input_delays):
        assert module is not None
        assert module.raw is not None
        assert module.raw.grad is not None
        flat, gradient = module.raw.data.view(-1), module.raw.grad.view(-1)
        assert gradient.abs().max() > 0.01
        for k in range(0, len(flat), 5 if engine_name == "lockstep" else 1):  # lockstep takes seconds per loss
            value, ends = flat[k].item(), []
            for step in (1e-6, -1e-6):
                flat[k] = value + step
                ends.append(loss().item())
            flat[k] = value
            assert abs((ends[0] - ends[1]) / 2e-6 - gradient[k]) < 1e-6 * gradient.abs().max().clamp(min=1.0)


def test_delays_per_connection_equal_axonal_delays_that_are_repeated():
    torch.manual_seed(0)
    delays, input_delays = torch.rand(5), torch.rand(2)
    mask = torch.rand(5, 5) < 0.7
    axonal = ContinuousEGRU(2, 5, mask=mask, delays=delays, input_delays=input_delays)
    repeated = ContinuousEGRU(2, 5, mask=mask, delays=delays.expand(5, 5), input_delays=input_delays.expand(5, 2))
    connections = mask.nonzero().T.contiguous()
    listed = ContinuousEGRU(2, 5, connections=connections, delays=delays, input_delays=input_delays)
    with torch.no_grad():
        axonal.b[2] = 0.7
        for layer in (repeated, listed):
            for name in ("U", "b", "threshold"):
                getattr(layer, name).copy_(getattr(axonal, name))
        repeated.V.copy_(axonal.V)
        assert listed.connections is not None
        listed.V.copy_(axonal.V[:, listed.connections[0], listed.connections[1]])
    outputs = [layer(EVENTS, 4.0) for layer in (axonal, repeated, listed)]
    assert len(outputs[0].times) > 10
    for output in outputs[1:]:
        torch.testing.assert_close(output.times, outputs[0].times, rtol=1e-12, atol=0.0)
        assert torch.equal(output.units, outputs[0].units)


def test_input_delay_moves_the_response():
    layer = ContinuousEGRU(2, 3, input_delays=0.25)
    plain = ContinuousEGRU(2, 3)
    with torch.no_grad():
        plain.U.mul_(3.0)
        for name in ("V", "U", "threshold"):
            getattr(layer, name).copy_(getattr(plain, name))
    moved = layer(EVENTS, 4.0).times
    assert len(moved) > 1
    later = EVENTS._replace(times=EVENTS.times + 0.25)
    assert torch.equal(moved, plain(later, 4.0).times)


def test_invalid_delays_are_refused():
    for delays, message in (
        (torch.tensor([0.1, -0.2, 0.3]), r"delays must be non-negative and finite, got -0.2 at index \[1\]"),
        (-1.0, "delays must be non-negative"),
        (torch.full((3,), float("nan")), "delays must be non-negative and finite"),
        (torch.rand(4), r"must be a number or have shape \(3,\) or \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ContinuousEGRU(2, 3, delays=delays)
    with pytest.raises(ValueError, match="must be positive, because they are trainable"):
        ContinuousEGRU(2, 3, delays=0.0, trainable_delays=True)
    with pytest.raises(TypeError, match="input_delays must be a number or a tensor"):
        ContinuousEGRU(2, 3, input_delays=[0.1, 0.2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="list of connections"):
        ContinuousEGRU(2, 3, connections=torch.tensor([[0], [1]]), delays=torch.rand(3, 3))
    layer = ContinuousEGRU(2, 3, delays=0.5)
    with pytest.raises(ValueError, match="state cannot be passed to a layer with delays"):
        layer(EVENTS, 2.0, state=layer.initial_state(2))


def lag_task(count: int, seed: int) -> tuple[InputEvents, Tensor]:
    """Return pairs of events. The class is whether the lag is about 1.0 (1), or about 0.5 or 1.5 (0)."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=g)
    other = torch.where(torch.rand(count, generator=g) < 0.5, 0.5, 1.5)
    lag = torch.where(labels == 1, 1.0, other) + 0.2 * (torch.rand(count, generator=g) - 0.5)
    times = torch.stack([torch.full_like(lag, 0.1), 0.1 + lag], 1)
    return InputEvents.from_padded(times, torch.tensor([0, 1]).expand(count, 2)), labels


def lag_accuracy(delays: Tensor | None) -> float:
    """Train delays and a linear readout of the largest state of each unit. The units forget within 0.06."""
    torch.manual_seed(0)
    layer = ContinuousLIF(
        2, 8, 0.06, 0.06, threshold=Threshold.constant(1e3), input_delays=delays, trainable_delays=delays is not None
    )
    head = torch.nn.Linear(8, 2)
    with torch.no_grad():
        layer.U.fill_(4.0)
    readout_times = torch.linspace(0.1, 3.6, 71)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], 0.03)
    for _ in range(60):
        events, labels = lag_task(60, 0)
        loss = F.cross_entropy(head(layer(events, 4.0, readout_times).c.amax(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    events, labels = lag_task(300, 100)
    with torch.no_grad():
        scores = head(layer(events, 4.0, readout_times).c.amax(1))
    return (scores.argmax(1) == labels).double().mean().item()


def test_lags_longer_than_the_memory_of_the_units_need_delays():
    torch.manual_seed(0)
    assert lag_accuracy(torch.rand(8, 2) * torch.tensor([2.0, 0.2]) + 0.01) > 0.95
    assert lag_accuracy(None) < 0.65
