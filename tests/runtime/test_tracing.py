"""Tracing leaves the model as it is, and refusals name what cannot be traced."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egru
from egru import EventEngine
from egru.compress import prune


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


class Model(nn.Module):
    """A layer and a readout, with ``compute`` as its forward method."""

    calls: Tensor

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], layer: Callable[..., nn.Module] = nn.GRU) -> None:
        super().__init__()
        self.rnn, self.readout, self.norm = layer(4, 8, batch_first=True), nn.Linear(8, 2), nn.BatchNorm1d(8)
        self.compute, self.h, self.last, self.outputs, self.count = compute, None, None, [], 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def record(m: Any, x: Tensor) -> Tensor:
    m.last, _ = m.rnn(x)
    m.outputs.append(m.last)
    m.count += 1
    m.calls += 1
    return m.readout(m.last)


def carry(m: Any, x: Tensor) -> Tensor:
    m.last, h = m.rnn(x, m.h)
    m.h = (h[0].detach(), h[1].detach()) if m.rnn.gates == 4 else h.detach()
    return m.readout(m.last)


def carry_if_given(m: Any, x: Tensor) -> Tensor:
    h = None if m.h is None else m.h
    m.last, m.h = m.rnn(x, h)
    return m.readout(m.last)


def carry_in_list(m: Any, x: Tensor) -> Tensor:
    y, h = m.rnn(x, m.outputs[-1] if m.outputs else None)
    m.outputs = [*m.outputs, h]
    return m.readout(y)


def summary_of(model: nn.Module, x: Tensor) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad(), egru.ActivityMonitor(other) as monitor:
        other(x)
    return monitor.summary()


ACTIONS = {
    "from_model": lambda model, summary: EventEngine.from_model(model),
    "prune": lambda model, summary: prune(model, summary, 0.0),
}
both_actions = pytest.mark.parametrize("action", ACTIONS)


@both_actions
def test_tracing_does_not_change_the_model(action):
    model, x = egru.convert(Model(record)), torch.randn(2, 5, 4)
    model.norm.eval()
    with torch.no_grad():
        expected = model(x)
    before, last = dict(vars(model)), model.last
    ACTIONS[action](model, summary_of(model, x))
    assert vars(model) == before
    assert model.last is last
    assert (model.count, model.calls, len(model.outputs)) == (1, 1, 1)
    assert model.training
    assert not model.norm.training
    torch.save(model.state_dict(), io.BytesIO())
    assert torch.equal(model(x), expected)


@both_actions
@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("compute", "name"), [(carry, "h"), (carry_if_given, "h"), (carry_in_list, "outputs")])
@pytest.mark.parametrize("called", ["never", "without gradients", "with gradients"])
def test_states_in_attributes_are_refused_by_name(action, layer, compute, name, called):
    model, x = egru.convert(Model(compute, layer)).eval(), torch.randn(2, 5, 4)
    summary = summary_of(model, x)
    if called != "never":
        with torch.set_grad_enabled(called == "with gradients"):
            model(x)
    before = dict(vars(model))
    message = f"Model.forward reads {name}, which it stored in an earlier call; pass the state as an argument"
    with pytest.raises(TypeError, match=message):
        ACTIONS[action](model, summary)
    assert vars(model) == before
    with torch.no_grad():
        model(x)


def test_states_in_buffers_are_refused_by_name():
    def compute(m: Any, x: Tensor) -> Tensor:
        y, h = m.rnn(x, m.state)
        m.state.copy_(h)
        return m.readout(y)

    model = egru.convert(Model(compute)).eval()
    model.register_buffer("state", torch.zeros(1, 2, 8))
    with pytest.raises(TypeError, match=r"rnn \(ConvertedGRU\) starts from state; the engine starts from zeros"):
        EventEngine.from_model(model)
    assert not model.get_buffer("state").any()


def test_stored_outputs_with_gradients_do_not_matter_to_the_engine():
    model, x = egru.convert(Model(record, nn.LSTM)), torch.randn(2, 5, 4)
    model(x)
    last: Any = model.last
    assert EventEngine.from_model(model).output_size == 2
    assert model.last is last
    assert last.requires_grad
    monitored = egru.convert(Model(record, nn.LSTM))
    with pytest.raises(TypeError, match=r"prune: Model cannot be copied because of last .*detach it or set it to None"):
        prune(model, summary_of(monitored, x), 0.0)


SCALED = [
    lambda m, x: 0.5 * m.readout(m.rnn(x)[0]),
    lambda m, x: 1 - m.readout(m.rnn(x)[0]),
    lambda m, x: torch.ones(2) * m.readout(m.rnn(x)[0]),
]


@pytest.mark.parametrize("compute", SCALED)
def test_operands_in_front_of_the_output_are_not_taken_for_it(compute):
    with pytest.raises(TypeError, match=r"(mul|sub) behind the layers is not supported; apply it outside the engine"):
        EventEngine.from_model(egru.convert(Model(compute)))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (lambda m, x: torch.zeros(1, x.size(0), 8) + 1, "add"),
        (lambda m, x: torch.zeros(1, x.size(0), 8).fill_(0.5), "fill_"),
        (lambda m, x: torch.zeros(1, x.size(0), 8).normal_(), "normal_"),
        (lambda m, x: torch.ones(1, x.size(0), 8), "ones"),
        (lambda m, x: m.h0.expand(1, x.size(0), 8), "h0"),
        (lambda m, x: m.h0, "h0"),
    ],
)
def test_initial_states_other_than_zeros_are_named(state, reason):
    model = egru.convert(Model(lambda m, x: m.readout(m.rnn(x, state(m, x))[0])))
    model.h0 = nn.Parameter(torch.zeros(1, 1, 8))
    message = rf"rnn \(ConvertedGRU\) starts from (the result of )?{reason}.*; the engine starts from zeros"
    with pytest.raises(TypeError, match=message):
        EventEngine.from_model(model)


@pytest.mark.parametrize(
    "state",
    [
        lambda x: x.new_zeros(1, 1, 8).expand(1, x.size(0), 8).contiguous(),
        lambda x: x.new_zeros(1, x.size(0), 8).to(x.device) * 0.5,
        lambda x: x.new_zeros(8).unsqueeze(0).repeat(1, x.size(0), 1),
    ],
)
def test_initial_states_of_zeros_are_accepted(state):
    model = egru.convert(Model(lambda m, x: m.readout(m.rnn(x, state(x))[0]))).eval()
    assert EventEngine.from_model(model).output_size == 2


def test_initial_states_of_an_lstm_are_checked_in_pairs():
    def zeros(m: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(1, x.size(0), 8)
        return m.readout(m.rnn(x, (h, h.clone()))[0])

    def ones(m: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(1, x.size(0), 8)
        return m.readout(m.rnn(x, (h, h + 1))[0])

    assert EventEngine.from_model(egru.convert(Model(zeros, nn.LSTM))).output_size == 2
    with pytest.raises(TypeError, match=r"rnn \(ConvertedLSTM\) starts from the result of add"):
        EventEngine.from_model(egru.convert(Model(ones, nn.LSTM)))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.DataParallel, "the model is wrapped in DataParallel; pass model.module"),
        (Wrapper, r"Wrapper.forward takes \*args, which torch.fx cannot trace; pass the module that it calls"),
        (lambda model: torch.compile(model, backend="eager"), "the model is compiled; pass the original module"),
    ],
)
def test_wrappers_are_refused_with_the_module_to_pass(wrap, message):
    model = egru.convert(Model(lambda m, x: m.readout(m.rnn(x)[0])))
    with pytest.raises(TypeError, match=f"EventEngine: {message}"):
        EventEngine.from_model(wrap(model))
    with pytest.raises(TypeError, match=f"prune: {message}"):
        prune(wrap(model), summary_of(model, torch.randn(2, 5, 4)))
    assert EventEngine.from_model(model).output_size == 2
