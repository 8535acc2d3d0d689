"""The engine in a service: streams that advance separately, copies and states."""

import copy
import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from egru import EGRU, EventEngine, Threshold
from egru.runtime.network import Trace
from egru.types import WEIGHT_FORMATS, WeightFormat
from tests.runtime.networks import SUMMARIES, in_float64, network

neg_view = torch._neg_view  # pyright: ignore[reportPrivateImportUsage]
pytestmark = pytest.mark.usefixtures("float32")


def assert_same_state(engine: EventEngine, other: EventEngine) -> None:
    state, expected = engine.state, other.state
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", SUMMARIES)
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_masked_steps_equal_separate_streams(weights: WeightFormat, trace: Trace | None, threads: int) -> None:
    """Four streams that advance at random steps compute the same bits as four engines."""
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    engine = EventEngine(network(), weights, threads, 4, trace=trace)
    assert engine._core is not None
    engine._core.always_divide(True)
    singles = [EventEngine(network(), weights, trace=trace) for _ in range(4)]
    generator = torch.Generator().manual_seed(0)
    for t in range(30):
        x = torch.randn(4, 20, generator=generator)
        mask = torch.rand(4, generator=generator) < 0.6 if t else torch.zeros(4, dtype=torch.bool)
        x[~mask] = torch.nan  # ignored
        out = torch.full((4, 6), 7.0)
        y = engine.step(x, mask=mask) if t % 2 else engine.step(x, out, mask=mask)
        for s in range(4):
            expected = singles[s].step(x[s]) if mask[s] else torch.full((6,), 0.0 if t % 2 else 7.0)
            assert torch.equal(y[s], expected)
        if t == 15:
            engine.reset([False, True, False, True])
            singles[1].reset()
            singles[3].reset(torch.tensor([True]))
    assert engine.activity.steps == sum(single.activity.steps for single in singles)
    assert engine.activity.macs == sum(single.activity.macs for single in singles)
    assert engine.activity.events == tuple(np.sum([single.activity.events for single in singles], 0))


@pytest.mark.parametrize("trace", SUMMARIES)
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_masked_steps_match_float64(runner: str, weights: WeightFormat, trace: Trace | None) -> None:
    """int8 is compared step by step in test_engine.py: it rounds activations, which amplifies differences."""
    engine = EventEngine(network(), weights, streams=3, trace=trace)
    torch.manual_seed(4)
    sequences = torch.randn(3, 12, 20)
    expected = torch.stack([in_float64(weights, trace, x) for x in sequences])
    done = [0, 0, 0]
    while min(done) < 12:
        mask = [n < 12 and bool(torch.rand(()) < 0.5) for n in done]
        y = engine.step(torch.stack([x[min(n, 11)] for x, n in zip(sequences, done, strict=True)]), mask=mask)
        for s in range(3):
            if mask[s]:
                torch.testing.assert_close(y[s].double(), expected[s, done[s]], rtol=0, atol=5e-6)
                done[s] += 1
            else:
                assert not y[s].any()


def test_masked_tokens_and_sparse_inputs(runner: str) -> None:
    embedding = nn.Embedding(9, 20)
    for table in (1 << 20, 0):
        engine = EventEngine(network(), embedding=embedding, streams=3, token_table=table)
        single = EventEngine(network(), embedding=embedding, token_table=table)
        y = engine.step([4, -1, 99], mask=[True, False, False])
        assert torch.equal(y[0], single.step(4))
        assert not y[1:].any()
        assert engine.activity == single.activity
        with pytest.raises(ValueError, match="token id 99 is outside the embedding"):
            engine.step([4, -1, 99], mask=[True, False, True])
    one = EventEngine(network(), embedding=embedding)
    assert not one.step(4, mask=[False]).any()
    assert torch.equal(one.step(4, mask=[True]), EventEngine(network(), embedding=embedding).step(4))
    pairs: list[Any] = [([3], [1.0]), ([99], [1.0])]
    engine = EventEngine(network(), streams=2)
    y = engine.step(pairs, mask=np.array([True, False]))
    assert torch.equal(y[0], EventEngine(network()).step(pairs[0]))
    assert torch.equal(y[0], EventEngine(network()).step(pairs[0], mask=[True]))


def test_refused_masked_steps_keep_all_streams(runner: str) -> None:
    engine, untouched = (EventEngine(network(), streams=3, trace="mean") for _ in range(2))
    x = torch.randn(3, 20)
    assert torch.equal(engine.step(x), untouched.step(x))
    with pytest.raises(ValueError, match="x contains nan"):
        engine.step(torch.full((3, 20), torch.nan), mask=[True, False, True])
    assert torch.equal(engine.step(x), untouched.step(x))


def test_bad_masks_raise(runner: str) -> None:
    engine = EventEngine(network(), streams=2)
    cases: list[tuple[Any, type[Exception], str]] = [
        ([True], ValueError, r"mask has shape \(1,\), expected \(2,\), one bool per stream"),
        (torch.ones(2, 1, dtype=torch.bool), ValueError, r"mask has shape \(2, 1\), expected \(2,\)"),
        ([1, 0], TypeError, "mask must be a tensor, an array or a list of bool, got list of int64"),
        (torch.ones(2), TypeError, "mask must be a tensor, an array or a list of bool, got Tensor of float32"),
    ]
    for mask, error, message in cases:
        with pytest.raises(error, match=message):
            engine.step(torch.zeros(2, 20), mask=mask)
        with pytest.raises(error, match=message):
            engine.reset(mask)
    assert engine.activity.steps == 0


def test_long_sums_and_means_keep_small_terms() -> None:
    """A float32 sum of 0.7 would be off by 5 % after 50 million steps."""
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    layer = EGRU(1, 1, threshold=Threshold.constant(0.0), reset="none")
    for name, parameter in layer.named_parameters():
        nn.init.constant_(parameter, 1.0 if name == "bias_ih_l0" else 0.0)
    steps = 1 << 21
    mean, total = EventEngine(layer, trace="mean"), EventEngine(layer, trace=1.0)
    mean.state = {**mean.state, "trace": torch.tensor([5e8]), "trace_steps": torch.tensor(10**9)}
    total.state = {**total.state, "trace": torch.tensor([5e8])}
    y = EventEngine(layer).run(torch.zeros(steps, 1)).double().sum()
    added = mean.run(torch.zeros(steps, 1), last=True).double() * (10**9 + steps) - 5e8
    torch.testing.assert_close(added, y[None], rtol=1e-4, atol=0)
    total.run(torch.zeros(steps, 1), last=True)
    torch.testing.assert_close(total.state["trace"] - 5e8, y[None], rtol=1e-9, atol=0)


# ---- states and copies -----------------------------------------------------------------------------------------------


def copy_by_pickle(engine: EventEngine) -> EventEngine:
    return pickle.loads(pickle.dumps(engine))


@pytest.mark.parametrize("trace", SUMMARIES)
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_copies_continue_separately(runner: str, weights: WeightFormat, trace: Trace | None) -> None:
    x = torch.randn(20, 2, 20)
    for make_copy in (copy.copy, copy.deepcopy, copy_by_pickle):
        engine = EventEngine(network(), weights, streams=2, trace=trace)
        engine.run(x)
        other = make_copy(engine)
        assert_same_state(other, engine)
        before = engine.state
        expected = other.run(x)
        assert all(torch.equal(engine.state[name], before[name]) for name in before)
        assert torch.equal(engine.run(x), expected)
        assert other.activity.steps == 40
        assert (other.weights, other.threads, other.streams) == (weights, 1, 2)


def run_in_worker(engine: EventEngine, x: Any) -> Any:
    return engine.run(x)


def test_engine_runs_in_a_spawned_process() -> None:
    engine, x = EventEngine(network(), "int8", trace="mean"), torch.randn(30, 20).numpy()
    engine.run(x)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(run_in_worker, (engine, x))
    assert np.array_equal(result, engine.run(x))


@pytest.mark.parametrize("trace", SUMMARIES)
@pytest.mark.parametrize("streams", [1, 3])
def test_state_survives_files(runner: str, trace: Trace | None, streams: int, tmp_path: Path) -> None:
    x = torch.randn(10, 20) if streams == 1 else torch.randn(10, streams, 20)
    engine = EventEngine(network(), streams=streams, trace=trace)
    engine.run(x)
    torch.save(engine.state, tmp_path / "state.pt")
    safetensors.torch.save_file(engine.state, tmp_path / "state.safetensors")
    expected = engine.run(x)
    for state in (
        torch.load(tmp_path / "state.pt", weights_only=True),
        safetensors.torch.load_file(tmp_path / "state.safetensors"),
    ):
        other = EventEngine(network(), streams=streams, trace=trace)
        other.state = state
        assert torch.equal(other.run(x), expected)


def test_negating_views_are_resolved(runner: str) -> None:
    """Such a tensor stores the negated values; its address alone is not enough."""
    engine = EventEngine(network())
    plain = torch.randn(4, 20)
    expected = engine.run(plain)
    negated = torch.view_as_complex(torch.stack([plain, -plain], -1)).conj().imag
    assert negated.is_neg()
    assert torch.equal(negated, plain)
    for x in (negated, neg_view(-plain), neg_view(-plain.clone())):
        engine.reset()
        assert torch.equal(engine.run(x), expected)
        engine.reset()
        assert torch.equal(torch.stack([engine.step(row) for row in x]), expected)
        engine.reset()
        assert torch.equal(torch.stack([engine.step((torch.arange(20), row)) for row in x]), expected)
        engine.reset()
        assert torch.equal(torch.stack([engine.step(row, torch.empty(6)) for row in x]), expected)
    for use in (lambda out: engine.step(plain[0], out), lambda out: engine.run(plain, last=True, out=out)):
        with pytest.raises(ValueError, match="out must not be a view that negates its memory"):
            use(neg_view(torch.zeros(6)))
    engine.run(plain)
    state, after = engine.state, engine.run(plain)
    engine.state = {name: neg_view(-value) for name, value in state.items()}
    assert torch.equal(engine.run(plain), after)


def test_out_that_changes_its_memory_is_checked_again() -> None:
    engine, x = EventEngine(network()), torch.randn(20)
    out = torch.zeros(6)
    engine.step(x, out)
    out.data = torch.zeros(2)
    with pytest.raises(ValueError, match=r"out must be float32 of shape \(6,\), got float32 \(2,\)"):
        engine.step(x, out)


@pytest.mark.parametrize("inputs", ["tensor", "token"])
def test_step_with_out_calls_no_method_of_a_tensor(inputs: str) -> None:
    """Checks of a tensor in Python take longer than a step of a small network."""
    pytest.importorskip("egru._core", reason="the compiled core is not built")
    embedding = nn.Embedding(9, 20)
    engine, out = EventEngine(network(), embedding=embedding), torch.zeros(6)
    x = 3 if inputs == "token" else embedding.weight[3].detach()
    calls: list[str] = []
    engine.step(x, out)
    sys.setprofile(lambda frame, event, argument: calls.append(argument.__name__) if event == "c_call" else None)
    engine.step(x, out)
    sys.setprofile(None)
    assert calls == ["setprofile"]  # methods of torch would be listed, those of the core are not
