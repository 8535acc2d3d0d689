"""Errors name the argument, what was received, and what is accepted."""

import re

import pytest
import torch

import egru
from egru.continuous import ContinuousEGRU, ContinuousStack, InputEvents, engines
from egru.continuous.limits import EventLimitError

GOOD = InputEvents(
    torch.tensor([0.5, 1.0, 0.2], dtype=torch.float64),
    torch.tensor([0, 1, 1]),
    torch.ones(3, dtype=torch.float64),
    torch.tensor([0, 2, 3]),
)
NAN = float("nan")


def layer(**options) -> ContinuousEGRU:
    return ContinuousEGRU(2, 3, **options)


def number(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"times": number(1.0, 0.5, 0.2)},
            r"must ascend within each sample, got 1 at index 0 \(sample 0\) and 0.5 after it",
        ),
        ({"times": number(-0.5, 1.0, 0.2)}, r"input.times must be at least 0, got -0.5 at index 0 \(sample 0\)"),
        ({"times": number(0.5, 9.0, 0.2)}, r"input.times must be at most the horizon 2, got 9 at index 1 \(sample 0\)"),
        ({"times": number(0.5, 1.0, NAN)}, r"input.times must be finite, got nan at index 2 \(sample 1\)"),
        ({"values": number(1.0, float("inf"), 0.2)}, r"input.values must be finite, got inf at index 1 \(sample 0\)"),
        ({"channels": torch.tensor([0, 2, 1])}, r"input.channels must be from 0 to 1, got 2 at index 1 \(sample 0\)"),
        ({"channels": torch.tensor([0, -1, 1])}, r"input.channels must be from 0 to 1, got -1 at index 1"),
        ({"offsets": torch.tensor([0, 2])}, r"ascend from 0 to the number of events, 3; got \[0, 2\]"),
        ({"offsets": torch.tensor([0, 3, 2, 3])}, "ascend from 0"),
        ({"values": number(1.0)}, r"must all have shape \(events,\), got \(3,\), \(3,\) and \(1,\)"),
    ],
)
def test_invalid_input_events(change, message):
    with pytest.raises(ValueError, match=f"ContinuousEGRU: .*{message}"):
        layer()(GOOD._replace(**change), 2.0)


def test_input_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"input must be InputEvents\(times, channels, values, offsets\), got Tensor"):
        layer()(torch.zeros(3), 2.0)
    with pytest.raises(TypeError, match=r"input.times is torch.float32, the parameters are torch.float64"):
        layer()(GOOD._replace(times=GOOD.times.float()), 2.0)
    with pytest.raises(TypeError, match=r"input.channels must be int64 on cpu, got torch.float64"):
        layer()(GOOD._replace(channels=GOOD.times), 2.0)


def test_times_need_not_ascend_across_samples():
    layer()(GOOD, 2.0)


@pytest.mark.parametrize("horizon", [0.0, -1.0, NAN, float("inf")])
def test_invalid_horizon(horizon):
    with pytest.raises(ValueError, match="horizon must be positive and finite, got"):
        layer()(GOOD, horizon)


@pytest.mark.parametrize("horizon", [1e39, 1e-50])
def test_horizon_outside_the_range_of_the_dtype(horizon):
    with pytest.raises(ValueError, match=r"horizon in torch.float32 must be positive and finite, got"):
        layer(dtype=torch.float32)(GOOD, horizon)


def test_horizon_of_the_wrong_type():
    with pytest.raises(TypeError, match="horizon must be a number, got str"):
        layer()(GOOD, "2")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([1.0, 2.5], r"readout_times must be at most the horizon 2, got 2.5 at index 1"),
        ([-1.0], r"readout_times must be at least 0, got -1 at index 0"),
        ([1.0, 0.5], r"readout_times must ascend, got 1 at index 0 and 0.5 after it"),
        ([NAN], r"readout_times must be finite, got nan at index 0"),
        ([[1.0]], r"readout_times must have shape \(readouts,\) or \(2, readouts\), got \(1, 1\)"),
    ],
)
def test_invalid_readout_times(times, message):
    with pytest.raises(ValueError, match=message):
        layer()(GOOD, 2.0, times)


def test_readout_times_that_require_gradients():
    with pytest.raises(ValueError, match="readout_times must not require gradients"):
        layer()(GOOD, 2.0, torch.ones(1, requires_grad=True))


def test_thresholds_must_be_positive():
    for value in (0.0, -0.2):
        model = layer(threshold=egru.Threshold.constant(value))
        with pytest.raises(ValueError, match=rf"thresholds must be positive, got {value:g} for unit 0"):
            model(GOOD, 2.0)


def test_invalid_state():
    model = layer(threshold=egru.Threshold.constant(0.3))
    start = model.initial_state(2)
    high = start.c.clone()
    high[1, 2] = 0.3
    with pytest.raises(
        ValueError,
        match=r"state.c must be below the thresholds, got 0.3 at index \[1, 2\], where the threshold is 0.3; "
        "above_threshold='fire'",
    ):
        model(GOOD, 2.0, state=start._replace(c=high))
    layer(threshold=egru.Threshold.constant(0.3), above_threshold="fire")(GOOD, 2.0, state=start._replace(c=high))
    with pytest.raises(ValueError, match=r"state.a must be a tensor of shape \(2, 3, 3\), got \(1, 3, 3\)"):
        model(GOOD, 2.0, state=model.initial_state(1))
    with pytest.raises(TypeError, match=r"state must be ContinuousState\(a, c, trace\), got Tensor"):
        model(GOOD, 2.0, state=start.c)
    for name in ("a", "c", "trace"):
        bad = getattr(start, name).clone()
        bad.view(-1)[0] = NAN
        with pytest.raises(ValueError, match="must be finite"):
            model(GOOD, 2.0, state=start._replace(**{name: bad}))


@pytest.mark.parametrize("name", ["V", "U", "b", "threshold"])
def test_parameters_must_be_finite(name):
    model = layer()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = NAN
    with pytest.raises(ValueError, match="must be finite"):
        model(GOOD, 2.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tau_s": 0.0}, ValueError, "tau_s must be positive and finite, got 0.0"),
        ({"tau_m": NAN}, ValueError, "tau_m must be positive"),
        ({"tau_o": "x"}, TypeError, "tau_o must be a number, got str"),
        ({"reset_side": "both"}, ValueError, "reset_side must be one of pre, post; got 'both'"),
        ({"amplitude": "c"}, ValueError, "amplitude must be one of theta, one"),
        ({"bias_sign": 1}, ValueError, r"bias_sign must be one of \+, -; got 1"),
        ({"engine": "fast"}, ValueError, "engine must be one of auto"),
        ({"max_events": 0}, ValueError, "max_events must be at least 1"),
        ({"grazing_floor": -1.0}, ValueError, "grazing_floor must be a number from 0 to below 1, got -1.0"),
        ({"above_threshold": "ignore"}, ValueError, "above_threshold must be one of raise, fire"),
        ({"start": "b"}, ValueError, "start must be one of zero, rest"),
        ({"panel": 0.0}, ValueError, "panel must be positive"),
        ({"nodes": 0}, ValueError, "nodes must be at least 1"),
        ({"mask": torch.ones(3, 3)}, ValueError, r"mask must be a bool tensor of shape \(3, 3\), got torch.float"),
        ({"input_mask": torch.ones(3, 3).bool()}, ValueError, r"input_mask must be a bool tensor of shape \(3, 2\)"),
        ({"threshold": 0.5}, TypeError, "threshold must be an egru.Threshold, got float"),
    ],
)
def test_invalid_options(options, error, message):
    with pytest.raises(error, match=f"ContinuousEGRU: {message}"):
        layer(**options)


@pytest.mark.parametrize("tau_m", [1e-300, 1e-9])
def test_tau_m_too_small_for_the_horizon_is_refused(tau_m):
    message = rf"ContinuousEGRU: tau_m={tau_m:g} is too small for tau_s=1 and the horizon 2: .* more than 1e\+09; raise"
    with pytest.raises(ValueError, match=message):
        layer(tau_m=tau_m)(GOOD, 2.0)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float64, "1e+50"), (torch.float32, "1e+15")])
def test_values_that_could_overflow_are_refused(dtype, largest):
    model = layer(dtype=dtype)
    good = GOOD._replace(times=GOOD.times.to(dtype), values=GOOD.values.to(dtype))
    limit = re.escape(f"must be at most {largest} in magnitude in {dtype}, got")
    with pytest.raises(ValueError, match=f"input_values {limit}"):
        model(good._replace(values=good.values * 1.1 * float(largest)), 2.0)
    with torch.no_grad():
        model.U[0, 0, 0] = -1.1 * float(largest)
    with pytest.raises(ValueError, match=f"U {limit}"):
        model(good, 2.0)


@pytest.mark.parametrize("engine", engines.names())
def test_events_that_times_cannot_distinguish_raise(engine):
    """A unit with a tiny threshold would emit events without the time advancing."""
    model = layer(engine=engine, threshold=egru.Threshold.constant(1e-17), start="rest")
    with torch.no_grad():
        model.b.fill_(1.0)
    state = model.initial_state(2)
    state = state._replace(c=state.c - 1.0)  # the first event is not at time 0, where the resolution is infinite
    with pytest.raises(EventLimitError, match=r"emitted two events at time 0\.\d+, because the time between them"):
        model(GOOD, 2.0, state=state)


def test_float16_is_not_supported():
    model = layer(dtype=torch.float16)
    half = GOOD._replace(times=GOOD.times.half(), values=GOOD.values.half())
    with pytest.raises(TypeError, match=r"the dtype must be float64 or float32, got torch.float16"):
        model(half, 2.0)


def test_running_loss_must_be_callable():
    with pytest.raises(TypeError, match="running_loss must be a function of"):
        layer()(GOOD, 2.0, running_loss=3.0)  # pyright: ignore[reportArgumentType]


def test_invalid_stack():
    with pytest.raises(ValueError, match="at least one layer"):
        ContinuousStack()
    with pytest.raises(ValueError, match="input_size of layer 1 must be the hidden_size of layer 0, 3; got 2"):
        ContinuousStack(layer(), layer())
    with pytest.raises(TypeError, match="layer 0 must be a ContinuousEGRU, got Linear"):
        ContinuousStack(torch.nn.Linear(2, 3))  # pyright: ignore[reportArgumentType]
    stack = ContinuousStack(layer(), ContinuousEGRU(3, 3))
    with pytest.raises(ValueError, match="states must have one entry per layer, 2; got 1"):
        stack(GOOD, 2.0, states=[layer().initial_state(2)])


def test_event_limit():
    model = layer(max_events=3, threshold=egru.Threshold.constant(0.1))
    with torch.no_grad():
        model.b.fill_(3.0)
    with pytest.raises(egru.continuous.EventLimitError, match=r"sample \d emitted more than 3 events \(max_events=3\)"):
        model(GOOD, 5.0)


def test_invalid_arguments_of_input_constructors():
    one = torch.zeros(1)
    which = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="one tensor per sample, got 2, 1 and 2"):
        InputEvents.from_lists([one, one], [which])
    with pytest.raises(ValueError, match="at least one sample"):
        InputEvents.from_lists([], [])
    with pytest.raises(ValueError, match=r"must all have shape \(events,\), got \(1,\), \(2,\) and \(1,\) in sample 0"):
        InputEvents.from_lists([one], [torch.zeros(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"must all have shape \(batch, events\), got"):
        InputEvents.from_padded(one, which)
    with pytest.raises(ValueError, match=r"lengths must have shape \(1,\) and values from 0 to 1, got \[2\]"):
        InputEvents.from_padded(one[None], which[None], lengths=torch.tensor([2]))
    with pytest.raises(ValueError, match=r"x must have shape \(batch, time, channels\), got \(1,\)"):
        InputEvents.from_series(one, 1.0)
    with pytest.raises(ValueError, match="step must be positive, got 0"):
        InputEvents.from_series(one[None, None], 0)
    with pytest.raises(ValueError, match=r"times \(batch, time\), got"):
        InputEvents.from_irregular(one, one[None, None])
    with pytest.raises(ValueError, match="observed must be a bool tensor of shape"):
        InputEvents.from_irregular(one[None], one[None, None], one[None])
