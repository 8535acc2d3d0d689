"""What a step of the engine counts, allocates and returns."""

import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

from egru import EventEngine
from tests.runtime.test_engine import build, divided

pytestmark = pytest.mark.usefixtures("float32")


@pytest.mark.parametrize("threads", [1, 2])
def test_activity_counts_events_and_macs(threads: int) -> None:
    engine = divided(build(10, 80, num_layers=2), threads=threads, readout=nn.Linear(80, 7))
    events = EventEngine(build(10, 80, num_layers=2))
    x = torch.randn(66, 10)
    engine.run(x)
    y = events.run(x)
    activity = engine.activity
    assert (activity.steps, activity.hidden) == (66, (80, 80))
    assert activity.events[1] == int((y != 0).sum())
    assert activity.rates[1] == pytest.approx(float((y != 0).float().mean()))
    below = EventEngine(build(10, 80)).run(x)  # the first layer alone: same seed, same weights
    first, second = int((below != 0).sum()), activity.events[1]
    assert activity.events[0] == first
    recurrent = first + second - int((below[-1] != 0).sum()) - int((y[-1] != 0).sum())
    assert activity.macs == 240 * (66 * 10 + first + recurrent + 2 * 66) + 7 * second
    engine.reset_activity()
    assert engine.activity.steps == engine.activity.macs == 0


def test_step_with_out_does_not_allocate() -> None:
    engine = EventEngine(build(30, 100, num_layers=2), readout=nn.Linear(100, 10))
    for x, out in ((torch.randn(30), torch.zeros(10)), (np.ones(30, np.float32), np.zeros(10, np.float32))):
        assert engine.step(x, out=out) is out
        assert out.any()
        sizes, peaks = [], []
        for _ in range(5):  # other threads of the test process may allocate in one of them
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(200):
                engine.step(x, out=out)
            size, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            sizes.append(size - before)
            peaks.append(peak - before)
        assert min(sizes) < 500  # loop variables
        assert min(peaks) < 1000


def test_every_step_returns_a_new_result() -> None:
    layer = build(30, 100)
    engine, tokens = EventEngine(layer), EventEngine(layer, embedding=nn.Embedding(5, 30))
    x = torch.randn(4, 30)
    whole = engine.run(x)
    for inputs in (list(x), list(x.numpy()), [(torch.arange(30), row) for row in x]):
        engine.reset()
        results = [engine.step(row) for row in inputs]
        assert torch.equal(torch.stack([torch.as_tensor(y) for y in results]), whole)
    ids = [3, 1, 4, 1]
    from_tokens = [tokens.step(i) for i in ids]
    tokens.reset()
    assert torch.equal(torch.stack(from_tokens), tokens.run(ids))
