"""Sparse storage of weights, and checkpoints from which the backward pass repeats the run."""

import dataclasses

import pytest
import torch

from egru import compiled
from egru.continuous import ContinuousEGRU, InputEvents, engines
from egru.continuous.options import Options
from egru.continuous.problem import DIFFERENTIABLE, Problem
from tests.continuous.networks import EXACT, cotangents, density, network, run, worst_gradient

pytestmark = pytest.mark.skipif(compiled.core is None, reason=f"no compiled core: {compiled.missing}")
OPTIONS = {
    "paper": EXACT,
    "all": dataclasses.replace(EXACT, self_connections=True, reset_side="post", amplitude="one"),
}


@pytest.fixture(params=OPTIONS)
def options(request) -> Options:
    return OPTIONS[request.param]


def with_connections(problem: Problem) -> tuple[Problem, Problem]:
    """Return the same random sparse network with masks and with lists of connections."""
    g = torch.Generator().manual_seed(9)
    H, D = problem.U.shape[1:]
    mask, input_mask = torch.rand(H, H, generator=g) < 0.4, torch.rand(H, D, generator=g) < 0.6
    pairs = [torch.stack(m.t().nonzero(as_tuple=True)[::-1]) for m in (mask, input_mask)]
    masked = dataclasses.replace(problem, mask=mask, input_mask=input_mask)
    sparse = dataclasses.replace(
        problem,
        V=problem.V[:, pairs[0][0], pairs[0][1]],
        U=problem.U[:, pairs[1][0], pairs[1][1]],
        connections=pairs[0],
        input_connections=pairs[1],
        channels=D,
    )
    return masked, sparse


@pytest.mark.parametrize("engine", list(engines.names()))
def test_connections_equal_a_mask(engine, options):
    masked, sparse = with_connections(network(4, options, hidden=7))
    assert sparse.connections is not None
    assert sparse.input_connections is not None
    (events, expected), (other, gradients) = (run(engines.get(engine), problem) for problem in (masked, sparse))
    assert len(events.times) > 20
    assert torch.equal(events.times, other.times)
    for name in DIFFERENTIABLE:
        dense = getattr(expected, name)
        if name == "V":
            dense = dense[:, sparse.connections[0], sparse.connections[1]]
        if name == "U":
            dense = dense[:, sparse.input_connections[0], sparse.input_connections[1]]
        assert torch.equal(dense, getattr(gradients, name)), name


def test_large_sparse_layer_stores_no_matrix():
    torch.manual_seed(0)
    H, fan = 4096, 41  # one per cent
    connections = torch.stack([torch.rand(H, H).topk(fan, 1).indices.flatten(), torch.arange(H).repeat_interleave(fan)])
    inputs = torch.stack([torch.arange(H), torch.arange(H) % 16])
    model = ContinuousEGRU(16, H, connections=connections, input_connections=inputs)
    assert model.V.shape == (3, H * fan)
    assert sum(p.numel() for p in model.parameters()) < 4 * H * fan
    events = InputEvents.from_lists([torch.rand(30) * 2], [torch.randint(16, (30,))], [torch.full((30,), 2.0)])
    output = model(events, 3.0, [3.0])
    assert len(output.times) > 50
    output.c.sum().backward()
    assert model.V.grad is not None
    assert model.V.grad.shape == model.V.shape
    assert (model.V.grad != 0).any()


def test_connections_are_sorted_with_their_weights():
    model = ContinuousEGRU(2, 3, connections=torch.tensor([[2, 0, 1], [1, 1, 0]]))
    assert model.connections is not None
    assert model.connections.tolist() == [[1, 0, 2], [0, 1, 1]]
    assert model.V.shape == (3, 3)
    assert set(model.state_dict()) >= {"connections", "V"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"connections": torch.tensor([[0, 3], [0, 1]])}, r"receivers of connections must be from 0 to 2, got 3 at"),
        ({"input_connections": torch.tensor([[0], [2]])}, r"sources of input_connections must be from 0 to 1, got 2"),
        ({"connections": torch.tensor([[0, 0], [1, 1]])}, r"connections must be distinct, got \[0, 1\] twice"),
        ({"connections": torch.zeros(2, 1)}, r"must be an int64 tensor of shape \(2, connections\), got torch.float32"),
        ({"connections": torch.zeros(3, 1).long()}, r"must have shape \(2, connections\), got \(3, 1\)"),
        (
            {"connections": torch.zeros(2, 1).long(), "mask": torch.ones(3, 3).bool()},
            "connections and mask exclude each other",
        ),
    ],
)
def test_invalid_connections(options, message):
    with pytest.raises(ValueError, match=f"ContinuousEGRU: .*{message}"):
        ContinuousEGRU(2, 3, **options)


@pytest.mark.parametrize("every", [1, 7, 1000])
@pytest.mark.parametrize("running", [None, density])
def test_checkpoints_do_not_change_a_bit(every, running, options):
    engine = engines.get("compiled")
    for hidden, horizon in ((6, 12.0), (300, 1.0)):  # the second network uses a heap
        plain = network(5, options, hidden=hidden, horizon=horizon)
        if hidden == 300:
            plain = with_connections(plain)[1]
            V = plain.V[:, ::20]
            assert plain.connections is not None
            plain = dataclasses.replace(plain, V=V, connections=plain.connections[:, ::20])
        checked = dataclasses.replace(plain, options=dataclasses.replace(plain.options, checkpoint_every=every))
        (events, expected), (other, gradients) = (run(engine, problem, running) for problem in (plain, checked))
        assert len(events.times) > 20
        for name in ("times", "units", "c_read", "o_read", "a_last"):
            assert torch.equal(getattr(events, name), getattr(other, name)), name
        for name in (*DIFFERENTIABLE, "floored"):
            assert torch.equal(getattr(expected, name), getattr(gradients, name)), name


def test_memory_with_checkpoints_grows_with_the_root_of_the_events():
    engine, memory = engines.get("compiled"), {}
    for horizon, every in ((25.0, 40), (100.0, 80), (400.0, 160), (400.0, None)):
        problem = network(5, Options(checkpoint_every=every), batch=1, hidden=64, horizon=horizon, drive=0.5)
        events = engine.forward(problem)
        memory[horizon, every] = events.tape[0].record_bytes
        assert len(events.times) > 20 * horizon
    assert memory[400.0, 160] < 3 * memory[100.0, 80] < 9 * memory[25.0, 40]
    assert memory[400.0, 160] < 0.15 * memory[400.0, None]


def test_checkpoints_require_the_compiled_engine():
    model = ContinuousEGRU(2, 3, checkpoint_every=5, engine="lockstep")
    events = InputEvents.from_lists([torch.zeros(1)], [torch.zeros(1).long()])
    with pytest.raises(ValueError, match="engine='lockstep' cannot run this call: it does not support checkpoint"):
        model(events, 1.0)
    problem = network(0, Options(checkpoint_every=5))
    problem = dataclasses.replace(problem, c0=torch.empty_like(problem.c0, device="meta"))
    with pytest.raises(ValueError, match=r"no engine can run this call .*compiled: .*lockstep: .*reference: "):
        engines.choose("auto", problem)
    assert ContinuousEGRU(2, 3, checkpoint_every=5)(events, 1.0).state.c.shape == (1, 3)


def test_running_loss_matches_the_reference_engine(options):
    for seed in range(2):
        problem = network(seed, options)
        (events, gradients), (exact, expected) = (
            run(engines.get(name), problem, density) for name in ("compiled", "reference")
        )
        assert events.integral is not None
        assert exact.integral is not None
        assert (events.integral - exact.integral).abs().max() < 1e-11
        assert max(worst_gradient(gradients, expected).values()) < 1e-10


def test_running_loss_with_forced_and_simultaneous_events():
    problem = network(3, dataclasses.replace(EXACT, above_threshold="fire"), hidden=4)
    c0 = problem.c0.clone()
    c0[:, :2] = problem.theta[:2] + 0.1  # two forced events at time 0
    a0 = problem.a0.clone()
    a0[:, 2, :2] = 2.0
    problem = dataclasses.replace(problem, c0=c0, a0=a0)
    (events, gradients), (exact, expected) = (
        run(engines.get(name), problem, density) for name in ("compiled", "reference")
    )
    assert int((events.times == 0).sum()) >= 2
    assert events.integral is not None
    assert exact.integral is not None
    assert (events.integral - exact.integral).abs().max() < 1e-11
    assert max(worst_gradient(gradients, expected).values()) < 1e-10


def test_running_loss_over_a_long_silence_uses_few_nodes():
    still = network(9, Options(), batch=1, horizon=2.0, inputs=2)
    still = dataclasses.replace(
        still, b=torch.full_like(still.b, -1.0), tau_s=torch.tensor(1e-3), tau_m=torch.tensor(1.0), V=0 * still.V
    )
    events = engines.get("compiled").forward(still, lambda c, t, sample: c.square().sum(1))
    exact = engines.get("reference").forward(still, lambda c, t, sample: c.square().sum(1))
    assert events.tape[0].node_count < 4000
    assert events.integral is not None
    assert exact.integral is not None
    assert (events.integral - exact.integral).abs().max() < 1e-9
    weights = cotangents(events)
    assert torch.isfinite(
        engines.get("compiled").backward(still, events, weights, lambda c, t, sample: c.square().sum(1)).V
    ).all()
