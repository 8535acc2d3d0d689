"""``EventEngine.from_model`` finds the parts of a model by tracing, or refuses the model with a reason."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import egru
from egru import EGRU, EventEngine, Threshold, exponential_trace
from egru.types import EVENTS


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


class Model(nn.Module):
    """An event layer and modules around it, with ``compute`` as its forward method."""

    def __init__(self, compute: Callable[..., Any], batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        options = {"threshold": Threshold.constant(0.1), "batch_first": batch_first, **options}
        self.embedding = nn.Embedding(7, 3)
        self.projection = nn.Linear(5, 3)
        self.input_norm = nn.BatchNorm1d(3)
        self.rnn = EGRU(3, 40, **options)
        self.middle = nn.Linear(40, 6, bias=False)
        self.second = EGRU(6, 20, **options)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(20)
        self.layer_norm = nn.LayerNorm(20)
        self.readout = nn.Sequential(nn.Linear(20, 8), nn.Identity(), nn.Linear(8, 4))
        self.gate = nn.Parameter(torch.ones(20))
        self.compute = compute
        for norm in (self.input_norm, self.norm):
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.get_buffer("running_mean"))
            nn.init.uniform_(norm.get_buffer("running_var"), 0.5, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        if state is not None:
            raise NotImplementedError
        return self.compute(self, x)

    def stack(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.dropout(self.rnn(x)[0])))[0]


def embedded_words(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(m.embedding(x)))


def projected_input(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(m.projection(x))[:, -1])


def normalised_input(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(m.input_norm(x.transpose(1, 2)).transpose(1, 2))[:, -1, :])


def last_state(m: Any, x: Tensor) -> Tensor:
    y, _ = m.rnn(x)
    _, state = m.second(m.middle(y))
    return m.readout(m.norm(state.y[-1]))


def mean(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.norm(F.dropout(torch.mean(m.stack(x), 1), 0.3, m.training)))


def total(m: Any, x: Tensor) -> tuple[Tensor, None]:
    return m.readout(m.stack(x).sum(dim=1)), None


def trace(m: Any, x: Tensor) -> Tensor:
    return m.readout(exponential_trace(m.stack(x), 0.8, last=True, batch_first=True))


def zero_state(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(1, x.size(0), 40)
    y, _ = m.rnn(x, h)
    return m.second(m.middle(y))[0]


def time_first(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(x.permute(1, 0, 2))[-1])


EXPRESSED = [embedded_words, projected_input, normalised_input, last_state, mean, total, trace, zero_state, time_first]


@pytest.mark.parametrize("compute", EXPRESSED)
def test_engine_returns_the_output_of_the_model_after_every_step(compute):
    torch.manual_seed(0)
    model = Model(compute, batch_first=compute is not time_first)
    engine = EventEngine.from_model(model)
    assert model.training
    features = 5 if compute is projected_input else 3
    x = torch.randint(7, (2, 9)) if compute is embedded_words else torch.randn(2, 9, features)
    model.eval()
    for sequence in x:
        engine.reset()
        for t in range(1, len(sequence) + 1):
            expected = model(sequence[None, :t])
            expected = expected[0] if isinstance(expected, tuple) else expected
            expected = expected[:, -1] if expected.dim() == 3 else expected
            step = sequence[t - 1]
            step = int(step) if compute is embedded_words else step
            torch.testing.assert_close(engine.step(step), expected[0], rtol=1e-4, atol=1e-5)
    assert engine.activity.events[1] > 0


def nothing_in_front(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(torch.tanh(x)))


def activation_behind(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(x)).log_softmax(-1)


def residual(m: Any, x: Tensor) -> Tensor:
    y, _ = m.rnn(x)
    return y + m.rnn(x)[0]


def layer_norm(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.layer_norm(m.stack(x)))


def control_flow(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(x)) if x.sum() > 0 else m.readout(m.stack(-x))


def first_step(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(x)[:, 0])


def lower_state(m: Any, x: Tensor) -> Tensor:
    return m.rnn(x)[1].y[0] if m.rnn.num_layers > 1 else m.rnn(x)[1].y[1]


def initial_state(m: Any, x: Tensor) -> Tensor:
    return m.rnn(x, m.rnn(x)[1])[0]


def parameter(m: Any, x: Tensor) -> Tensor:
    return m.stack(x) * m.gate


def biased_sum(m: Any, x: Tensor) -> Tensor:
    return m.readout(m.stack(x)).sum(1)


def mean_of_features(m: Any, x: Tensor) -> Tensor:
    return m.stack(x).mean(-1)


def nothing(m: Any, x: Tensor) -> Tensor:
    return m.projection(x)


def several(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.stack(x)
    return y, m.readout(y)


def state_and_scores(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y, state = m.second(m.middle(m.rnn(x)[0]))
    return state, m.readout(y)


def transposed_state(m: Any, x: Tensor) -> Tensor:
    return m.rnn(x)[1].transpose(0, 1)


def joined(m: Any, x: Tensor) -> Tensor:
    y = m.rnn(x)[0]
    return torch.cat([y, y], -1)


REFUSED = [
    (several, "forward returns several outputs; return one, or one and the states"),
    (state_and_scores, "forward returns several outputs"),
    (transposed_state, "transpose of the state of a layer is not supported"),
    (joined, "cat of several tensors is not supported"),
    (nothing_in_front, "tanh in front of the layers is not supported"),
    (activation_behind, "log_softmax behind the layers is not supported; apply it outside the engine"),
    (residual, r"rnn \(EGRU\) reads the input of the model, and so does the layer before it"),
    (layer_norm, r"layer_norm \(LayerNorm\) normalises each step by its own statistics"),
    (control_flow, "cannot be traced by torch.fx"),
    (first_step, "is not supported; the engine returns every step"),
    (lower_state, "the engine returns the output of the last one"),
    (initial_state, "starts from the state of a layer; the engine starts from zeros"),
    (parameter, "mul behind the layers is not supported"),
    (biased_sum, "grows with the number of steps"),
    (mean_of_features, "over time"),
    (nothing, "forward returns the input, expected the output of the layers or a readout"),
]


@pytest.mark.parametrize(("compute", "message"), REFUSED)
def test_what_the_engine_cannot_express_is_refused_with_a_reason(compute, message):
    with pytest.raises(TypeError, match=message):
        EventEngine.from_model(Model(compute))


def test_bidirectional_layers_and_dense_models_are_refused():
    with pytest.raises(ValueError, match="bidirectional layers are not supported"):
        EventEngine.from_model(Model(lambda m, x: m.rnn(x)[0], bidirectional=True))
    with pytest.raises(TypeError, match=r"GRU has no event layer; egru.convert\(model\) replaces dense layers"):
        EventEngine.from_model(nn.GRU(2, 3))


@pytest.mark.parametrize("name", ["rnn", "readout.0", "readout", "embedding", ""])
def test_hooks_are_refused_but_not_those_of_a_monitor(name):
    model = Model(embedded_words)
    with egru.ActivityMonitor(model):
        EventEngine.from_model(model)
    hook = model.get_submodule(name).register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(TypeError, match=rf"{re.escape(name or 'Model')}.* has a forward hook, which could change"):
        EventEngine.from_model(model)
    hook.remove()
    EventEngine.from_model(model)


class Clipped(nn.Linear):
    """Differs from ``nn.Linear`` for large outputs only."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(-50, 50)


class Hashed(nn.Embedding):
    """Differs from ``nn.Embedding`` for one token only."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input % 6)


def test_overridden_forward_methods_are_not_taken_for_those_of_torch():
    model = Model(embedded_words)
    model.readout[0] = Clipped(20, 8)
    with pytest.raises(TypeError, match="linear behind the layers is not supported"):
        EventEngine.from_model(model)
    model = Model(embedded_words)
    model.embedding = Hashed(7, 3)
    with pytest.raises(TypeError, match="in front of the layers is not supported"):
        EventEngine.from_model(model)
    model = Model(embedded_words)
    patched: Any = model.readout[0]
    patched.forward = lambda x: nn.Linear.forward(patched, x).clamp(-50, 50)
    with pytest.raises(TypeError, match="linear behind the layers is not supported"):
        EventEngine.from_model(model)


def test_models_of_the_package_and_layers_are_accepted():
    model = egru.models.SequenceClassifier(3, 16, 5, normalise=True, centre=True, threshold=Threshold.constant(0.05))
    engine = EventEngine.from_model(model, "int8", streams=2)
    assert (engine.weights, engine.streams, engine.output_size) == ("int8", 2, 5)
    assert EventEngine.from_model(EGRU(2, 3)).output_size == 3
    words = egru.models.LanguageModel(20, 8, 16, num_layers=2)
    engine, tokens = EventEngine.from_model(words), torch.randint(20, (6,))
    torch.testing.assert_close(engine.run(tokens), words.eval()(tokens[:, None])[0][:, 0], rtol=1e-4, atol=1e-5)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.rnn = nn.GRU(3, 24, 2, batch_first=True, bias=False)
        self.fc = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        _, h = self.rnn(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return self.fc(h[-1])


def test_converted_model_runs_in_the_engine():
    model = Dense()
    nn.init.normal_(model.norm.get_buffer("running_mean"))
    x = torch.randn(4, 12, 3)
    engine = EventEngine.from_model(egru.convert(model, "positive"))
    expected = model.eval()(x)
    for sequence, target in zip(x, expected, strict=True):
        engine.reset()
        torch.testing.assert_close(engine.run(sequence, last=True), target, rtol=1e-4, atol=1e-5)
    assert math.isclose(sum(engine.activity.events), 2 * 24 * 48)


class LastOutput(nn.Module):
    """Two recurrent layers and a readout of the last output."""

    def __init__(self, layer_class: Any) -> None:
        super().__init__()
        self.rnn, self.readout = layer_class(3, 24, 2, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("layer_class", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("events", EVENTS)
def test_sparse_converted_model_runs_in_the_engine(layer_class, events):
    model = egru.convert(LastOutput(layer_class).eval(), events)
    egru.compress.raise_thresholds(model, 0.03)
    engine, x = EventEngine.from_model(model), torch.randn(2, 15, 3)
    for sequence in x:
        engine.reset()
        for t in range(1, 16):
            scores = engine.step(sequence[t - 1])
            torch.testing.assert_close(scores, model(sequence[None, :t])[0].detach(), rtol=1e-4, atol=1e-5)
    with egru.ActivityMonitor(model) as monitor:
        model(x)
    assert engine.activity.events == tuple(sum(layer.active) for layer in monitor.summary().layers)
    assert 0.1 < sum(engine.activity.events) / (2 * 15 * 48) < 0.95


class Tagger(nn.Module):
    """A model of packed sequences, with names of torch used in two ways."""

    def __init__(self, cell: type[nn.Module], batch_first: bool, last: bool) -> None:
        super().__init__()
        self.embedding, self.readout = nn.Embedding(9, 4), nn.Linear(24, 5)
        self.rnn = cell(4, 24, num_layers=2, batch_first=batch_first)
        self.batch_first, self.last = batch_first, last

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embedding(x)
        if self.last:
            packed = pack_padded_sequence(embedded, lengths.cpu(), self.batch_first, enforce_sorted=False)
            state = self.rnn(packed)[1]
            return self.readout((state[0] if isinstance(self.rnn, egru.ELSTM) else state)[-1])
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths, self.batch_first)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=self.batch_first)
        return self.readout(padded)


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_models_of_packed_sequences_are_supported(cell, batch_first, last):
    torch.manual_seed(0)
    model = egru.convert(Tagger(cell, batch_first, last)).eval()
    engine = EventEngine.from_model(model)
    tokens = torch.randint(9, (12,))
    with torch.no_grad():
        expected = model(tokens[None] if batch_first else tokens[:, None], torch.tensor([12])).squeeze()
    outputs = torch.stack([engine.step(int(token)) for token in tokens])
    torch.testing.assert_close(outputs[-1] if last else outputs, expected, rtol=1e-4, atol=1e-5)


def test_packing_of_the_wrong_dimension_is_refused():
    class Mean(Tagger):
        def forward(self, x, lengths):
            packed = pack_padded_sequence(self.embedding(x), lengths, batch_first=True)
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=False)
            return self.readout(padded.mean(1))  # the mean of the batch

    with pytest.raises(TypeError, match="only outputs of the layers can be reduced, over time"):
        EventEngine.from_model(egru.convert(Mean(nn.GRU, True, True)))


def test_a_second_argument_that_is_not_a_length_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = EGRU(3, 16, threshold=Threshold.constant(0.1))

        def forward(self, x, scale):
            return self.rnn(x)[0] * scale

    with pytest.raises(TypeError, match="mul behind the layers is not supported"):
        EventEngine.from_model(Scaled())
