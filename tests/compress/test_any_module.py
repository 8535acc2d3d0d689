"""Pruning, the search for thresholds and the report page of models that are not from :mod:`egru.models`."""

import copy

import pytest
import torch
from torch import nn

import egru
from egru import ActivityMonitor
from egru.compress import WeightPruning, prune, quieten
from egru.types import EVENTS


class Network(nn.Module):
    """Two GRUs, a normalisation and a readout of the mean, and a second readout of the first layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.GRU(3, 10, batch_first=True), nn.LSTM(10, 12, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(12), nn.Sequential(nn.Dropout(0.1), nn.Linear(12, 4, bias=False))
        self.auxiliary = nn.Linear(10, 2)

    def forward(self, x):
        y, _ = self.first(x)
        z = self.second(y)[0].mean(1)
        return torch.cat([self.head(self.norm(z)), self.auxiliary(torch.tanh(y[:, -1, :]))], -1)


@pytest.fixture
def network():
    model = egru.convert(Network(), "signed")
    for layer in (model.first, model.second):
        layer.get_parameter("threshold_l0").data[::3] = 2.0  # never reached
    model.get_buffer("norm.running_mean").normal_()
    return model.eval()


def monitored(model, x):
    with torch.no_grad(), ActivityMonitor(model) as monitor:
        return model(x), monitor.summary()


def test_removing_inactive_units_of_any_module_does_not_change_the_output(network):
    x = torch.randn(5, 20, 3)
    scores, activity = monitored(network, x)
    small = prune(network, activity)
    assert [small.first.hidden_size, small.second.input_size, small.second.hidden_size] == [6, 6, 8]
    assert [small.norm.num_features, small.head[1].in_features, small.auxiliary.in_features] == [8, 8, 6]
    torch.testing.assert_close(monitored(small, x)[0], scores)
    assert network.first.hidden_size == 10
    half = prune(network, activity, (0.0, 0.5))
    assert [half.first.hidden_size, half.second.hidden_size, half.auxiliary.in_features] == [10, 6, 10]


class Returns(nn.Module):
    def __init__(self, read, **options):
        super().__init__()
        self.rnn, self.readout, self.read = egru.EGRU(3, 6, **options), nn.Linear(6, 3), read

    def forward(self, x):
        return self.read(self, x)


@pytest.mark.parametrize(
    ("read", "options", "message"),
    [
        (lambda m, x: m.rnn(x)[0], {}, "the model returns its outputs"),
        (lambda m, x: m.readout(m.rnn(x)[1].c), {}, "getattr reads its outputs or state"),
        (lambda m, x: m.readout(m.rnn(x)[0]) * m.rnn(x)[0].sum(), {}, "it is called more than once"),
        (lambda m, x: m.readout(m.rnn(x)[0].cumsum(-1)), {}, "cumsum reads its outputs"),
        (lambda m, x: m.rnn(x)[0][..., -1], {}, "getitem reads its outputs"),
        (lambda m, x: m.readout(m.rnn(x)[0]), {"num_layers": 2}, "it has several layers or directions"),
        (lambda m, x: m.readout(m.rnn(x, torch.zeros(1, 1, 6))[0]), {}, "its initial state is given"),
    ],
)
def test_units_that_cannot_be_removed_are_refused(read, options, message):
    model = Returns(read, **options)
    _, activity = monitored(model, torch.randn(4, 1, 3))
    with pytest.raises(ValueError, match=rf"units of rnn cannot be removed: {message}.*; a share of 0 keeps the layer"):
        prune(model, activity, 0.5)
    assert prune(model, activity, 0.0).rnn.hidden_size == 6


def test_models_without_a_graph_or_an_event_layer_are_refused():
    layer = egru.EGRU(3, 6)
    _, activity = monitored(layer, torch.randn(4, 1, 3))
    with pytest.raises(ValueError, match="the model is a layer and returns its outputs"):
        prune(layer, activity)
    with pytest.raises(TypeError, match="the model must have an event layer, got Linear"):
        prune(nn.Linear(2, 2), activity)
    branching = Returns(lambda m, x: m.readout(m.rnn(x)[0]) if x.sum() > 0 else x)
    with pytest.raises(TypeError, match=r"prune: Returns.forward cannot be traced by torch.fx"):
        prune(branching, activity)


def test_quieten_raises_the_thresholds_of_any_module(network):
    x, lines = torch.randn(5, 20, 3), []
    expected = network(x).detach()

    def loss(model, x):
        return (model(x) - expected).square().mean()

    result = quieten(network, [x], loss, 1e-3, log=lines.append)
    assert result.before.loss == 0
    assert 0 < loss(network, x) == result.after.loss <= 1e-3
    assert result.after.forward_macs == monitored(network, x)[1].forward_macs < 0.9 * result.before.forward_macs
    assert len(lines) == len(result.trials) == len({trial.floor for trial in result.trials})
    thresholds = [layer.get_parameter("threshold_l0").min().item() for layer in (network.first, network.second)]
    assert thresholds == pytest.approx(result.after.floor)
    with pytest.raises(ValueError, match="the model must have an event layer"):
        quieten(nn.Linear(2, 2), [x], loss)
    with pytest.raises(ValueError, match="within must be non-negative, got -1"):
        quieten(network, [x], loss, -1)


def test_prune_refuses_hooks(network):
    _, activity = monitored(network, torch.randn(5, 20, 3))
    network.auxiliary.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with pytest.raises(
        TypeError, match=r"prune: auxiliary \(Linear\) has a forward hook, which could change its outputs"
    ):
        prune(network, activity)


def test_prune_refuses_masked_weights(network):
    _, activity = monitored(network, torch.randn(5, 20, 3))
    masked = copy.deepcopy(network)
    WeightPruning(masked, 0.5)
    with pytest.raises(ValueError, match=r"the weights of first are parametrised \(WeightPruning\.remove\(\)"):
        prune(masked, activity)
    nn.utils.parametrizations.weight_norm(network.auxiliary)
    with pytest.raises(ValueError, match="the weights of auxiliary are parametrised"):
        prune(network, activity, [0.5, 0.0])
    assert prune(network, activity, [0.0, 0.5]).second.hidden_size == 6


class Unbatched(nn.Module):
    """Reads one sequence without a batch dimension."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.readout, self.has_steps = cell, nn.Linear(8, 2), isinstance(cell, nn.GRU)

    def forward(self, x):
        if self.has_steps:
            return self.readout(self.cell(x)[0][-1])
        h = torch.zeros(8)
        for row in x:
            h = self.cell(row, h)
        return self.readout(h)


@pytest.mark.parametrize("cell", [nn.GRU, nn.GRUCell])
@pytest.mark.parametrize("events", EVENTS)
def test_models_without_a_batch_dimension_are_measured_and_fine_tuned(cell, events):
    model, x = egru.convert(Unbatched(cell(4, 8)), events), torch.randn(20, 4)
    with egru.ActivityMonitor(model) as monitor:
        model(x)
    (linear,) = monitor.summary().linears
    assert (linear.calls, linear.in_features, linear.out_features) == (1, 8, 2)
    assert monitor.summary().steps == 20
    if events != "positive":
        assert egru.calibrate(model, [x], within=0.5).after.events < 1
    batches = [(x, torch.zeros(2)), (torch.randn(20, 4), torch.ones(2))]
    result = egru.sparsify(
        model, batches, lambda m, b: (m(b[0]) - b[1]).square().mean(), 0.5, epochs=2, log=lambda line: None
    )
    assert result.after.events <= 0.5
