"""Batches of recordings: horizons and readout times per sample, constructors from files, padded output, readouts."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from egru import EGRU, Threshold
from egru.continuous import ContinuousEGRU, ContinuousReadout, ContinuousStack, InputEvents, engines

ENGINES = list(engines.names())
HORIZONS = torch.tensor([2.5, 4.0, 3.0], dtype=torch.float64)
READOUTS = torch.tensor([[1.0, 2.5], [0.5, 3.5], [2.0, 3.0]], dtype=torch.float64)


def samples(count: int = 6, seed: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    times = [torch.rand(count + s, generator=g) * HORIZONS[s] for s in range(3)]
    return times, [torch.randint(3, (len(t),), generator=g) for t in times]


def layer(engine: str = "auto") -> ContinuousEGRU:
    torch.manual_seed(2)
    model = ContinuousEGRU(3, 5, tau_o=1.7, engine=engine, nodes=12, panel=1.0)  # pyright: ignore
    with torch.no_grad():
        model.b.copy_(torch.randn(3, 5) * 0.3 + torch.tensor([[1.0], [0.0], [0.9]]))
    return model


def weighted(output) -> torch.Tensor:
    state = output.state
    parts = (output.times, output.c, output.trace, state.a, state.c, state.trace)
    return sum((torch.cos(torch.arange(x.numel()).view(x.shape) % 7) * x).sum() for x in parts)  # pyright: ignore


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_of_different_lengths_equal_single_runs(engine):
    times, channels = samples()
    together = layer(engine)
    output = together(InputEvents.from_lists(times, channels), HORIZONS, READOUTS)
    assert torch.equal(output.horizon, HORIZONS)
    assert (output.counts().sum(1) > 3).all()
    parts, alone = [], layer(engine)
    for s in range(3):
        single = alone(InputEvents.from_lists(times[s : s + 1], channels[s : s + 1]), HORIZONS[s].item(), READOUTS[s])
        mine = output.samples == s
        torch.testing.assert_close(output.times[mine], single.times, rtol=0, atol=1e-12)
        assert torch.equal(output.units[mine], single.units)
        for x, y in ((output.c[s], single.c[0]), (output.trace[s], single.trace[0])):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
        for x, y in zip(output.state, single.state, strict=True):
            torch.testing.assert_close(x[s], y[0], rtol=0, atol=1e-12)
        parts.append(single)
    total = sum(p.times.sum() + p.c.square().sum() + p.trace.sum() + p.state.a.sum() + p.state.c.sum() for p in parts)
    total.backward()  # pyright: ignore
    out = output
    (out.times.sum() + out.c.square().sum() + out.trace.sum() + out.state.a.sum() + out.state.c.sum()).backward()
    for (name, p), (_, q) in zip(together.named_parameters(), alone.named_parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert (p.grad - q.grad).abs().max() < 1e-10 * max(1.0, float(q.grad.abs().max())), name


def test_engines_agree_on_samples_of_different_lengths():
    results = {}
    for engine in ENGINES:
        model = layer(engine)
        weighted(model(InputEvents.from_lists(*samples()), HORIZONS, READOUTS)).backward()
        results[engine] = {name: p.grad for name, p in model.named_parameters()}
    for engine in ENGINES:
        for name, gradient in results["reference"].items():
            assert (results[engine][name] - gradient).abs().max() < 1e-10 * max(1.0, float(gradient.abs().max())), name


def test_stack_accepts_horizons_per_sample():
    stack = ContinuousStack(layer(), ContinuousEGRU(5, 4))
    outputs = stack(InputEvents.from_lists(*samples()), HORIZONS, READOUTS)
    assert outputs[1].c.shape == (3, 2, 4)


@pytest.mark.parametrize(
    ("horizon", "readouts", "message"),
    [
        (HORIZONS[:2], None, r"horizon must be a number or have shape \(3,\), .* got \(2,\)"),
        (HORIZONS.new_tensor([3.0, 0.0, 3.0]), None, "horizon must be positive and finite, got 0 for sample 1"),
        (
            HORIZONS.new_tensor([3.0, float("nan"), 3.0]),
            None,
            "horizon must be positive and finite, got nan for",
        ),
        (HORIZONS.clone().requires_grad_(), None, "horizon must not require gradients"),
        (HORIZONS, READOUTS[:2], r"readout_times must have shape \(readouts,\) or \(3, readouts\), got \(2, 2\)"),
        (HORIZONS, READOUTS + 0.5, r"at most the horizon 2.5, got 3 at index \[0, 1\]"),
        (HORIZONS, READOUTS.flip(1), r"readout_times must ascend, got 2.5 at index \[0, 0\] and 1 after it"),
        (
            HORIZONS.new_tensor([2.5, 1.0, 3.0]),
            None,
            r"input.times must be at most the horizon 1, .*Input.*until",
        ),
    ],
)
def test_invalid_horizons_and_readouts(horizon, readouts, message):
    with pytest.raises(ValueError, match=message):
        layer()(InputEvents.from_lists(*samples()), horizon, readouts)


def test_events_after_the_horizon_are_dropped_on_request():
    times, channels = samples()
    events = InputEvents.from_lists(times, channels)
    cut = events.until(torch.tensor([1.0, 9.0, 0.0]))
    assert cut.offsets.tolist() == [0, int((times[0] <= 1).sum()), *[int((times[0] <= 1).sum()) + len(times[1])] * 2]
    assert (cut.times[: cut.offsets[1]] <= 1).all()
    assert events.until(2.0).times.max() <= 2
    with pytest.raises(ValueError, match=r"horizon must be a number or have shape \(3,\), got \(2,\)"):
        events.until(torch.ones(2))


def test_checkpointed_chunks_of_time_equal_one_run():
    times, channels = samples()
    inputs = InputEvents.from_lists([t.clamp(max=2.5) for t in times], channels)
    inputs.times[0] = 0.0
    whole, parts = layer(), layer()
    whole(inputs, 2.5).state.c.square().sum().backward()
    state = None
    for start, stop in ((0.0, 1.0), (1.0, 2.5)):
        window = inputs.window(start, stop)
        state = checkpoint(parts, window, stop - start, None, state, use_reentrant=False).state  # pyright: ignore
    assert state is not None
    state.c.square().sum().backward()
    for (name, p), (_, q) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert (p.grad - q.grad).abs().max() < 1e-11 * max(1.0, float(p.grad.abs().max())), name
    with pytest.raises(ValueError, match=r"times must satisfy 0 <= start < stop, got 2\.0 and 1\.0"):
        inputs.window(2.0, 1.0)


def test_gradients_pass_through_a_discrete_layer_on_the_trace():
    times, channels = samples()
    first, second = layer(), EGRU(5, 4, batch_first=True, threshold=Threshold.constant(0.01))
    readouts = torch.linspace(0.2, 1.0, 6)[None] * HORIZONS[:, None]
    trace = first(InputEvents.from_lists(times, channels), HORIZONS, readouts).trace
    y, _ = second(trace)
    assert y.shape == (3, 6, 4)
    (by_trace,) = torch.autograd.grad(y.sum(), trace, retain_graph=True)
    (by_weights,) = torch.autograd.grad((trace * by_trace).sum(), first.V, retain_graph=True)
    y.sum().backward()
    assert first.V.grad is not None
    assert by_weights.abs().max() > 1e-6
    torch.testing.assert_close(first.V.grad, by_weights, rtol=1e-12, atol=1e-12)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in second.parameters())


@pytest.mark.parametrize("integer", [np.int64, np.uint32, np.uint64])
def test_integer_microseconds_are_scaled_in_float64(integer):
    microseconds = [np.array([16_777_217, 3], dtype=integer)]  # float32 cannot represent the first
    events = InputEvents.from_numpy(microseconds, [np.array([1, 0], dtype=np.uint8)], unit=1e-3, dtype=torch.float64)
    assert events.times.tolist() == [3 * 1e-3, 16_777_217 * 1e-3]
    assert events.channels.tolist() == [0, 1]
    assert events.values.dtype == torch.float64
    lists = InputEvents.from_lists([torch.tensor([16_777_217, 3])], [torch.tensor([1, 0])], unit=1e-3)
    assert lists.times.dtype == torch.get_default_dtype()
    assert torch.equal(lists.times.double(), events.times.to(lists.times.dtype).double())


def test_unit_keeps_gradients_and_must_be_positive():
    times = torch.tensor([1.0, 2.0], requires_grad=True)
    InputEvents.from_lists([times], [torch.tensor([0, 0])], unit=0.5).times.sum().backward()
    assert times.grad is not None
    assert times.grad.tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="unit must be a positive number, got 0"):
        InputEvents.from_lists([times], [torch.tensor([0, 0])], unit=0)


def recording(*events: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(list(events), dtype=[("t", "<i8"), ("x", "<i2"), ("y", "<i2"), ("p", "?")])


def test_tonic_recordings_become_channels_of_polarity_row_and_column():
    batch = [recording((5000, 3, 1, 1), (2000, 0, 0, 0)), recording((1000, 1, 1, 0))]
    events = InputEvents.from_tonic(batch, (4, 2, 2))
    torch.testing.assert_close(events.times, torch.tensor([2.0, 5.0, 1.0]))
    assert events.channels.tolist() == [0, (1 * 2 + 1) * 4 + 3, 5]
    assert events.offsets.tolist() == [0, 2, 3]
    audio = np.array([(700, 3), (100, 9)], dtype=[("t", "<i8"), ("x", "<i2")])  # no rows and one polarity
    assert InputEvents.from_tonic([audio], (10, 1, 1)).channels.tolist() == [9, 3]
    with pytest.raises(ValueError, match="x must be from 0 to 2, got 0 to 3 in sample 0"):
        InputEvents.from_tonic(batch, (3, 2, 2))
    with pytest.raises(ValueError, match="sample 0 has no y, p; got the fields t, x"):
        InputEvents.from_tonic([audio], (10, 2, 2))


def test_padded_output_holds_the_events_of_each_sample():
    output = layer()(InputEvents.from_lists(*samples()), HORIZONS)
    padded = output.padded(fill=-1.0)
    assert padded.times.shape == (3, int(output.counters.events.max()))
    for s in range(3):
        n = int(padded.lengths[s])
        assert torch.equal(padded.times[s, :n], output.times[output.samples == s])
        assert torch.equal(padded.units[s, :n], output.units[output.samples == s])
        assert (padded.times[s, n:] == -1).all()
        assert (padded.units[s, n:] == -1).all()
        assert (padded.amplitudes[s, n:] == 0).all()
    assert torch.isinf(output.padded().times).any()
    padded.times.sum().backward()


def test_readouts_take_the_last_value_or_the_maximum_over_time():
    model = layer()
    output = model(InputEvents.from_lists(*samples()), HORIZONS, READOUTS)
    for source in ("c", "trace"):
        values = torch.cat([getattr(output, source), getattr(output.state, source)[:, None]], 1)
        for time in ("last", "max", "mean"):
            readout = ContinuousReadout(5, 2, time=time, source=source)  # pyright: ignore
            scores = readout.linear(values)
            expected = {"last": scores[:, -1], "max": scores.amax(1), "mean": scores.mean(1)}[time]
            torch.testing.assert_close(readout(output), expected)
    with pytest.raises(ValueError, match="ContinuousReadout: time must be one of last, max, mean; got 'first'"):
        ContinuousReadout(5, 2, time="first")  # pyright: ignore
