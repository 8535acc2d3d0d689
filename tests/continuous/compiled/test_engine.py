"""The compiled engine: masks, threads, dispatch levels and limits.

test_engines.py tests its results together with those of the other engines.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from egru import compiled
from egru.continuous import engines
from egru.continuous.compiled import CompiledEngine
from egru.continuous.limits import EventLimitError
from egru.continuous.options import Options
from egru.continuous.problem import DIFFERENTIABLE, Events, Gradients, Problem
from egru.continuous.quadrature import gauss_legendre
from egru.continuous.reference.crossing import window
from egru.continuous.reference.flow import FlowSettings, flow
from tests.continuous.networks import EXACT, cotangents, network, run, worst_gradient
from tests.continuous.reference.random_units import first_above_on_grid, units

pytestmark = pytest.mark.skipif(compiled.core is None, reason=f"no compiled core: {compiled.missing}")

ENGINE = CompiledEngine()


def outputs(events: Events, gradients: Gradients) -> dict[str, Tensor]:
    results = {name: getattr(events, name) for name in ("times", "units", "offsets", "c_read", "o_read", "a_last")}
    return results | gradients._asdict()


def masked_network(hidden: int, fan: int, options: Options, seed: int = 0, **sizes) -> Problem:
    """Return a masked problem: each source reaches at most ``fan`` units. Masked weights are not zero."""
    problem = network(seed, options, hidden=hidden, **sizes)
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(hidden, hidden, dtype=torch.bool)
    mask.scatter_(0, torch.randint(hidden, (fan, hidden), generator=g), True)
    input_mask = torch.rand(hidden, 3, generator=g) < 0.5
    V = problem.V * (hidden / fan) ** 0.5
    return dataclasses.replace(problem, V=V, mask=mask, input_mask=input_mask)


def unmasked(problem: Problem) -> Problem:
    """Return the same problem with zeros instead of a mask."""
    return dataclasses.replace(problem.with_dense_weights(), mask=None, input_mask=None)


def mask_gradients(gradients: Gradients, problem: Problem) -> Gradients:
    V, U = problem.weight_gradients(gradients.V, gradients.U)
    return gradients._replace(V=V, U=U)


@pytest.mark.parametrize(("hidden", "horizon"), [(9, 12.0), (300, 3.0)])
@pytest.mark.parametrize("options", [EXACT, dataclasses.replace(EXACT, self_connections=True, reset_side="post")])
def test_mask_equals_zero_weights(hidden, horizon, options):
    """Also covers the heap, which is used for 300 units. Masked weights have no gradient."""
    sparse = masked_network(hidden, 6, options, horizon=horizon)
    assert sparse.mask is not None
    assert sparse.input_mask is not None
    dense = unmasked(sparse)
    events, gradients = run(ENGINE, sparse)
    exact_events, exact = run(ENGINE, dense)
    assert len(events.times) > 20
    assert torch.equal(events.units, exact_events.units)
    for name in ("times", "c_read", "o_read", "a_last"):
        assert (getattr(events, name) - getattr(exact_events, name)).abs().max() < 1e-12, name
    assert (gradients.V[:, ~sparse.mask] == 0).all()
    assert (gradients.U[:, ~sparse.input_mask] == 0).all()
    assert max(worst_gradient(gradients, mask_gradients(exact, sparse)).values()) < 1e-11


@pytest.mark.parametrize("name", list(engines.names()))
def test_every_engine_supports_masks(name):
    problem = masked_network(7, 3, EXACT, horizon=5.0)
    dense = unmasked(problem)
    engine = engines.get(name)
    events, gradients = run(engine, problem)
    exact_events, exact = run(engine, dense)
    assert len(events.times) > 5
    assert (events.times - exact_events.times).abs().max() < 1e-12
    assert not torch.equal(exact.V, mask_gradients(exact, problem).V)
    assert not torch.equal(exact.U, mask_gradients(exact, problem).U)
    assert max(worst_gradient(gradients, mask_gradients(exact, problem)).values()) < 1e-11


def test_event_updates_only_connected_units():
    """An event updates four receivers and the emitter, not all 300 units."""
    problem = masked_network(300, 4, EXACT, batch=1, horizon=3.0)
    events = ENGINE.forward(problem)
    inputs = len(problem.input_times) * 300 + 4 * 300  # an upper bound: inputs, readouts, start
    assert int(events.counters.flow_evaluations) < inputs + 20 * len(events.times)


def test_zero_weights_without_a_mask_have_gradients():
    problem = network(5)
    problem = dataclasses.replace(problem, V=problem.V * (torch.rand(5, 5) < 0.5), U=torch.zeros_like(problem.U))
    events, gradients = run(ENGINE, problem)
    reference = engines.get("reference")
    exact = reference.backward(problem, reference.forward(problem), cotangents(events))
    assert max(worst_gradient(gradients, exact).values()) < 1e-11
    emitters = events.units.unique()
    absent = (problem.V == 0) & ~torch.eye(5, dtype=torch.bool)
    assert absent[:, :, emitters].any()
    assert (gradients.V[:, :, emitters][absent[:, :, emitters]] != 0).all()
    assert (gradients.U != 0).any()


def test_results_do_not_depend_on_the_number_of_threads():
    problem = network(6, Options(), batch=37, hidden=11)
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(outputs(*run(ENGINE, problem)))
    torch.set_num_threads(1)
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


def test_dispatch_levels_agree():
    assert compiled.core is not None
    problem = network(7, Options(), batch=3, hidden=19)
    results = {}
    try:
        for level in compiled.core.levels():
            compiled.core.force_level(level)
            results[level] = run(ENGINE, problem)
    finally:
        compiled.core.force_level("auto")
    events, gradients = results["plain"]
    for level, (other, gradients) in results.items():
        assert torch.equal(events.units, other.units), level
        assert (events.times - other.times).abs().max() < 1e-12, level
        assert max(worst_gradient(gradients, gradients).values()) < 1e-11, level


@pytest.mark.parametrize("nodes", [1, 3, 4, 5, 6, 8, 16, 32])
def test_number_of_nodes(nodes):
    """Numbers with a special kernel, and others."""
    panel = 0.02 if nodes < 4 else 0.5
    problem = network(8, Options(nodes=nodes, panel=panel), batch=1, horizon=3.0)
    exact = engines.get("reference").forward(dataclasses.replace(problem, options=EXACT))
    events = ENGINE.forward(problem)
    tolerance = {1: 1e-3, 3: 1e-9, 4: 1e-7, 5: 1e-8, 6: 1e-10}.get(nodes, 1e-11)
    assert torch.equal(events.units, exact.units)
    assert (events.times - exact.times).abs().max() < tolerance


@pytest.mark.parametrize("b_u", [-9.0, -2.0, 0.0])
def test_crossing_at_rest_matches_the_closed_form(b_u):
    """Slow gates: units cross long after the activations have reached their biases. Also the gradient, by autograd."""
    one = torch.tensor(1.0)
    b = torch.tensor([[b_u], [0.0], [0.8]], requires_grad=True)
    theta, tau_m = torch.tensor([0.6], requires_grad=True), torch.tensor(40.0, requires_grad=True)
    empty = torch.empty(0)
    problem = Problem(
        torch.zeros(3, 1, 1), torch.zeros(3, 1, 1), b.detach(), theta.detach(), one, tau_m.detach(), one,
        b.detach()[None], torch.zeros(1, 1), empty, torch.empty(0, dtype=torch.int64), empty,
        torch.zeros(2, dtype=torch.int64), torch.tensor([9e5]), 1e6, dataclasses.replace(EXACT, max_events=10**9),
    )  # fmt: skip
    z, rate = torch.tanh(b[2]), torch.sigmoid(b[0]) / tau_m
    period = torch.log(z / (z - theta)) / rate
    problem = dataclasses.replace(problem, horizon=2.5 * period.item(), readout_times=2.25 * period.detach())
    events = ENGINE.forward(problem)
    assert len(events.times) == 2
    exact = torch.cat([period, 2 * period])
    assert ((events.times - exact) / exact).abs().max() < 1e-12
    c = z * (1 - torch.exp(-rate * 0.25 * period.detach() + rate * (exact[1] - 2 * period.detach())))
    assert (events.c_read[0, 0] - c).abs().max() < 1e-12
    weights = cotangents(events, only="times")
    weights.c_read[:] = 0.7
    gradients = ENGINE.backward(problem, events, weights)
    total = (weights.times * exact).sum() + 0.7 * c.sum()
    right = torch.autograd.grad(total, (b, theta, tau_m))
    # In the closed form, a0 is b: add the gradient of a0 to that of b.
    by_b = gradients.b + gradients.a0[0]
    for name, value, other in (
        ("b", by_b, right[0]),
        ("theta", gradients.theta, right[1]),
        ("tau_m", gradients.tau_m, right[2]),
    ):
        assert ((value - other).abs().max() / other.abs().max()) < 1e-11, name


def unconnected(a, b, c, theta, horizon: float) -> Problem:
    """Return a problem of units without connections."""
    count, one, empty = len(c), torch.tensor(1.0), torch.empty(0)
    return Problem(
        torch.zeros(3, count, count), torch.zeros(3, count, 1), torch.as_tensor(b), torch.as_tensor(theta),
        0.7 * one, 1.1 * one, one, torch.as_tensor(a)[None], torch.as_tensor(c)[None], empty,
        torch.empty(0, dtype=torch.int64), empty, torch.zeros(2, dtype=torch.int64), empty, horizon, EXACT,
        torch.zeros(count, count, dtype=torch.bool),
    )  # fmt: skip


def test_no_crossing_is_missed():
    """Check G: 20,000 units without connections, against a fine grid."""
    count, hidden, horizon, steps = 20_000, 500, 4.0, 200
    a, b, c, theta = units(count, seed=5)
    extreme = np.arange(count) % 7 == 0
    a[:, extreme] *= 4
    b[:, extreme] *= 2
    first = np.full(count, np.inf)
    for start in range(0, count, hidden):
        part = slice(start, start + hidden)
        problem = unconnected(a[:, part], b[:, part], c[part], theta[part], horizon)
        events = ENGINE.forward(problem)
        for t, n in zip(reversed(events.times.tolist()), reversed(events.units.tolist()), strict=True):
            first[start + n] = t  # keep the first of each unit
    grid = first_above_on_grid(a, b, c, theta, horizon, FlowSettings(0.7, 1.1, gauss_legendre(6), 0.5), steps)
    assert np.isfinite(grid).sum() > count / 20
    assert not (np.isfinite(grid) & np.isinf(first)).any()  # missed
    caught = np.isfinite(grid)
    assert (first[caught] <= grid[caught] + 1e-12).all()  # late
    assert (first[caught] > grid[caught] - horizon / steps - 1e-12).all()  # early
    hit = np.isfinite(first)
    settings = FlowSettings(0.7, 1.1, gauss_legendre(12), 1.0)
    assert abs(flow(a[:, hit], b[:, hit], c[hit], first[hit], settings) - theta[hit]).max() < 1e-13
    assert (hit & ~caught).sum() < count / 200  # above the threshold only between two grid points


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, -1e-9, -1e-6, -1e-3])
def test_grazing_is_decided_exactly(gap):
    """The largest c of each unit is ``gap`` above its threshold: all units emit, or none."""
    a, b, c, theta = units(3000, seed=7)
    settings = FlowSettings(0.7, 1.1, gauss_legendre(12), 1.0)
    w0, w1 = window(a, b, theta, settings)
    closing = (w0 == 0) & (w1 < 3)
    a, b, c, theta, w1 = a[:, closing], b[:, closing], c[closing], theta[closing], w1[closing]
    top = flow(a, b, c, w1, settings)
    c = c + (theta + gap - top) / (flow(a, b, c + 1, w1, settings) - top)  # c(w1) is affine in c
    good = (c < theta - 2 * abs(gap)) & (c > -2)
    a, b, c, theta, w1 = a[:, good], b[:, good], c[good], theta[good], w1[good]
    count = len(c)
    assert count > 100
    events = ENGINE.forward(unconnected(a, b, c, theta, 3.0))
    first = np.full(count, np.inf)
    for t, n in zip(reversed(events.times.tolist()), reversed(events.units.tolist()), strict=True):
        first[n] = t
    assert (first < w1).all() if gap > 0 else np.isinf(first).all()


def test_float32_results_are_rounded_float64_results():
    problem = network(10)
    small = {name: getattr(problem, name).float() for name in DIFFERENTIABLE}
    small = dataclasses.replace(problem, **small, readout_times=problem.readout_times.float())
    wide = dataclasses.replace(
        small,
        **{name: getattr(small, name).double() for name in DIFFERENTIABLE},
        readout_times=small.readout_times.double(),
    )
    events, gradients = run(ENGINE, small)
    assert {events.times.dtype, events.c_read.dtype, gradients.V.dtype, gradients.tau_s.dtype} == {torch.float32}
    exact = ENGINE.forward(wide)
    assert torch.equal(events.times, exact.times.float())
    weights = cotangents(events)
    weights = dataclasses.replace(
        weights,
        **{f.name: v.double() for f in dataclasses.fields(weights) if (v := getattr(weights, f.name)) is not None},
    )
    for name, value in ENGINE.backward(wide, exact, weights)._asdict().items():
        assert torch.equal(getattr(gradients, name), value.to(getattr(gradients, name).dtype)), name


def limited(problem: Problem, events: int) -> Problem:
    return dataclasses.replace(problem, options=dataclasses.replace(problem.options, max_events=events))


def test_event_limit_is_exact():
    problem = network(11, batch=8)
    counts = ENGINE.forward(problem).counters.events
    most, sample = int(counts.max()), int(counts.argmax())
    assert int(counts.sort().values[-2]) < most
    assert torch.equal(ENGINE.forward(limited(problem, most)).counters.events, counts)
    with pytest.raises(EventLimitError, match=rf"sample {sample} emitted more than {most - 1} events \(max_events="):
        ENGINE.forward(limited(problem, most - 1))


def test_event_limit_error_names_the_first_sample():
    """Sample 0 has so many inputs that sample 1 exceeds the limit earlier, in another thread."""
    problem, idle = network(11), 40_000
    times = problem.input_times[:9]
    problem = dataclasses.replace(
        problem,
        input_times=torch.cat([torch.zeros(idle), times]),
        input_channels=torch.cat([torch.zeros(idle, dtype=torch.int64), problem.input_channels[:9]]),
        input_values=torch.cat([torch.zeros(idle), problem.input_values[:9]]),
        input_offsets=torch.tensor([0, idle + 9, idle + 9]),
    )
    assert (ENGINE.forward(problem).counters.events > 1).all()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with pytest.raises(EventLimitError, match="sample 0 emitted more than 1 events"):
            ENGINE.forward(limited(problem, 1))
    torch.set_num_threads(1)


def test_unsupported_problems_are_rejected_with_a_reason(monkeypatch):
    problem = network(12)
    assert "nodes" in str(ENGINE.unsupported(dataclasses.replace(problem, options=Options(nodes=33))))
    assert "panels" in str(ENGINE.unsupported(dataclasses.replace(problem, options=Options(panel=21.0))))
    assert "bfloat16" in str(ENGINE.unsupported(dataclasses.replace(problem, c0=problem.c0.bfloat16())))
    assert "meta" in str(ENGINE.unsupported(dataclasses.replace(problem, c0=problem.c0.to("meta"))))
    monkeypatch.setattr(compiled, "core", None)
    monkeypatch.setattr(compiled, "missing", "no core today")
    assert ENGINE.unsupported(problem) == "no core today"
    assert engines.choose("auto", problem).name != "compiled"
    with pytest.raises(ValueError, match="no core today"):
        engines.choose("compiled", problem)
