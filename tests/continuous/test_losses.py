"""Losses on first event times and states, penalties on silence and rates, and the calibrated initialisation."""

import pytest
import torch

import egru
from egru.continuous import (
    ContinuousEGRU,
    ContinuousOutput,
    InputEvents,
    calibrate_activity,
    engines,
    first_time_loss,
    membrane_loss,
    rate_penalty,
    silence_penalty,
)

ENGINES = list(engines.names())
LABELS = torch.tensor([0, 3, 2])


def events(batch: int = 3, count: int = 7, seed: int = 1) -> InputEvents:
    g = torch.Generator().manual_seed(seed)
    times = [torch.rand(count, generator=g) * 3 for _ in range(batch)]
    channels = [torch.randint(3, (count,), generator=g) for _ in range(batch)]
    return InputEvents.from_lists(times, channels, [torch.full((count,), 1.5)] * batch)


def layer(engine: str = "auto", **options) -> ContinuousEGRU:
    """Return a layer of which some units emit events in some samples."""
    torch.manual_seed(3)
    model = ContinuousEGRU(3, 4, engine=engine, nodes=12, panel=1.0, grazing_floor=0.0, **options)  # pyright: ignore
    with torch.no_grad():
        model.b.copy_(torch.randn(3, 4) * 0.5 + torch.tensor([[0.5], [0.0], [0.1]]))
    return model


def some_output() -> ContinuousOutput:
    output = layer()(events(), 4.0, [2.0, 4.0])
    counts = output.counts()
    assert (counts == 0).any()
    assert (counts > 1).any()
    return output


LOSSES = {
    "first_time": lambda model, out: first_time_loss(out, LABELS, scale=0.5),
    "membrane": lambda model, out: membrane_loss(out, LABELS, scale=0.5),
    "silence": lambda model, out: silence_penalty(out, model.thresholds(), margin=0.4),
    "rate": lambda model, out: rate_penalty(out, low=0.3, high=0.4),
}


def gradients(engine: str, name: str) -> dict[str, torch.Tensor]:
    model = layer(engine)
    LOSSES[name](model, model(events(), 4.0, [1.0, 2.5])).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_each_loss_matches_finite_differences(name):
    model, h = layer(), 1e-5
    exact = gradients("auto", name)
    units = model(events(), 4.0).units
    for key in ("V", "U", "b", "threshold"):
        parameter = dict(model.named_parameters())[key]
        for index in torch.randperm(parameter.numel(), generator=torch.Generator().manual_seed(5))[:4].tolist():
            values = []
            for k in (-2, -1, 1, 2):
                with torch.no_grad():
                    parameter.view(-1)[index] += k * h
                    out = model(events(), 4.0, [1.0, 2.5])
                    values.append(float(LOSSES[name](model, out)))
                    parameter.view(-1)[index] -= k * h
                assert torch.equal(out.units, units)
            difference = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
            scale = max(1.0, float(exact[key].abs().max()))
            assert abs(difference - float(exact[key].view(-1)[index])) < 1e-7 * scale, (key, index)


@pytest.mark.parametrize("name", LOSSES)
def test_engines_agree_on_the_gradient_of_each_loss(name):
    expected = gradients("reference", name)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
    for engine in ENGINES:
        for key, gradient in gradients(engine, name).items():
            assert (gradient - expected[key]).abs().max() < 1e-11 * max(1.0, float(expected[key].abs().max())), key


def test_first_times_and_counts_match_a_loop_over_events():
    output = some_output()
    first, counts = torch.full((3, 4), 9.0), torch.zeros(3, 4, dtype=torch.int64)
    for sample, unit, time in zip(output.samples, output.units, output.times, strict=True):
        first[sample, unit] = torch.minimum(first[sample, unit], time.detach())
        counts[sample, unit] += 1
    torch.testing.assert_close(output.first_times(default=9.0), first, rtol=0, atol=0)
    torch.testing.assert_close(output.first_times(), first.clamp(max=4.0), rtol=0, atol=0)
    per_unit = torch.arange(4.0) + 10
    assert torch.equal(output.first_times(per_unit)[counts == 0], per_unit.expand(3, 4)[counts == 0])
    assert torch.equal(output.counts(), counts)


def test_first_times_without_any_event():
    output = ContinuousEGRU(1, 3)(InputEvents.from_lists([torch.zeros(0)], [torch.zeros(0).long()]), 2.0)
    assert output.first_times().tolist() == [[2.0, 2.0, 2.0]]
    assert output.rates().tolist() == [[0.0, 0.0, 0.0]]


def test_rates_are_continuous_where_events_move_past_the_horizon():
    model = ContinuousEGRU(1, 1, threshold=egru.Threshold.constant(0.5), start="rest")
    with torch.no_grad():
        model.b[2] = 1.0
    silence = InputEvents.from_lists([torch.zeros(0)], [torch.zeros(0).long()])
    period = model(silence, 10.0).times[0].item()
    before, after = (model(silence, 5 * period + d).rates().item() for d in (-1e-9, 1e-9))
    assert abs(before - after) < 1e-8
    assert abs(model(silence, 200.5 * period).rates().item() * period - 1) < 1e-2


def silent_layer() -> ContinuousEGRU:
    """Return a layer of three units, one per class, none of which reaches its threshold."""
    torch.manual_seed(0)
    model = ContinuousEGRU(3, 3, threshold=egru.Threshold.constant(0.6))
    with torch.no_grad():
        model.U.mul_(0.2)
    return model


def test_silent_units_learn_only_with_the_silence_penalty():
    inputs = InputEvents.from_lists([torch.tensor([0.2])] * 3, [torch.tensor([k]) for k in range(3)])
    labels = torch.arange(3)
    correct = {}
    for weight in (0.0, 5.0):
        model = silent_layer()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for _ in range(150):
            output = model(inputs, 4.0, [0.5, 1.0, 2.0])
            loss = first_time_loss(output, labels) + weight * silence_penalty(output, model.thresholds())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        first = model(inputs, 4.0).first_times()
        correct[weight] = int(((first.argmin(1) == labels) & (first.amin(1) < 4.0)).sum())
    assert correct == {0.0: 0, 5.0: 3}


def test_silence_penalty_is_zero_for_active_units_and_respects_the_selection():
    output, model = some_output(), layer()
    silent = output.counts() == 0
    assert silence_penalty(output, model.thresholds(), where=~silent) == 0
    whole = silence_penalty(output, model.thresholds())
    assert 0 < silence_penalty(output, model.thresholds(), where=torch.tensor([True, False, False, True])) <= whole
    torch.testing.assert_close(silence_penalty(output, model.thresholds(), where=silent), whole)


@pytest.mark.parametrize("bias_sign", ["+", "-"])
def test_calibration_reaches_the_wanted_activity(bias_sign):
    torch.manual_seed(0)
    model, inputs = ContinuousEGRU(3, 24, bias_sign=bias_sign), events(batch=40, seed=2)
    before = model(inputs, 4.0).counts().double().mean(0)
    assert before.min() < 0.5
    reached = calibrate_activity(model, inputs, 4.0, events=1.5)
    torch.testing.assert_close(reached, model(inputs, 4.0).counts().double().mean(0))
    assert (reached - 1.5).abs().max() < 0.3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: first_time_loss(o, LABELS, scale=0.0), "first_time_loss: scale must be positive and finite, got 0"),
        (lambda o: first_time_loss(o, LABELS[:2]), r"labels must be an int64 tensor of shape \(3,\), got .* \(2,\)"),
        (lambda o: membrane_loss(o, LABELS + 1), "membrane_loss: labels must be from 0 to 3, .* got 1 to 4"),
        (lambda o: silence_penalty(o, torch.ones(3)), r"thresholds must have shape \(4,\), .* got \(3,\)"),
        (lambda o: silence_penalty(o, torch.ones(4), margin=-1.0), "margin must be positive"),
        (lambda o: silence_penalty(o, torch.ones(4), where=torch.ones(4)), "where must be a bool tensor"),
        (lambda o: rate_penalty(o, low=2.0, high=1.0), "must satisfy 0 <= low <= high, got 2.0 and 1.0"),
        (lambda o: calibrate_activity(layer(), events(), 4.0, events=0), "events must be positive and finite, got 0"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(some_output())
