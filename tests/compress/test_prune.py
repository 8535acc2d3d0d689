"""Pruning of the least active units."""

import pytest
import torch

import egru
from egru import ActivityMonitor
from egru.activity import count_parameters
from egru.compress import prune
from egru.models import LanguageModel, SequenceClassifier
from tests.helpers import lively


def mute_others(layer, units):
    """Set the recurrent weights from all units except ``units`` to zero, in place."""
    with torch.no_grad():
        weight = layer.get_parameter("weight_hh_l0")
        mask = torch.zeros(layer.hidden_size, dtype=weight.dtype).index_fill(0, units, 1.0)
        weight.mul_(mask)
    return layer


@pytest.mark.parametrize("per_unit", [True, False])
@pytest.mark.parametrize(
    ("layer_class", "options"),
    [
        (egru.EGRU, {"reset_gate": "before"}),
        (egru.EGRU, {"reset_gate": "after", "reset": "threshold"}),
        (egru.EGRU, {"bias": False}),
        (egru.ELSTM, {}),
        (egru.ERNN, {}),
    ],
)
def test_selected_units_compute_as_if_the_others_were_inactive(layer_class, options, per_unit):
    threshold = egru.Threshold(mean=-3.0, std=0.5 if per_unit else None, per_unit=per_unit)
    layer = lively(layer_class(5, 9, threshold=threshold, **options), 3.0)
    units, inputs = torch.tensor([0, 3, 4, 8]), torch.tensor([1, 2, 4])
    small = layer.select(units, inputs)
    x = torch.randn(12, 2, 5)
    y, state = small(x[..., inputs])
    x[..., [0, 3]] = 0
    whole, last = mute_others(layer, units)(x)
    assert y.count_nonzero() > 10
    torch.testing.assert_close(y, whole[..., units])
    torch.testing.assert_close(state.c, last.c[..., units])
    assert small.get_parameter("weight_hh_l0").requires_grad
    assert repr(small).startswith(f"{layer_class.__name__}(3, 4, ")


def run_monitored(model, x):
    model.eval()
    with torch.no_grad(), ActivityMonitor(model) as monitor:
        scores = model(x)[0]
    return scores, monitor.summary()


def classifier():
    model = SequenceClassifier(3, 12, 4, num_layers=2, normalise=True, threshold=egru.Threshold(mean=-2.0))
    for layer in model.layers:
        lively(layer, 3.0)  # pyright: ignore[reportArgumentType]
    for layer in model.layers:
        layer.get_parameter("threshold_l0").data[::3] = 20.0  # never reached
    model.get_buffer("normalise.running_mean").normal_()
    model.get_parameter("normalise.weight").data.uniform_(0.5, 2.0)
    return model


def test_removing_inactive_units_does_not_change_the_output():
    model, x = classifier(), torch.randn(5, 20, 3)
    scores, activity = run_monitored(model, x)
    small = prune(model, activity)
    remaining = [sum(rate > 0 for rate in layer.unit_activity) for layer in activity.layers]
    assert max(remaining) <= 8
    assert [layer.hidden_size for layer in small.layers] == remaining
    assert [layer.hidden_size for layer in model.layers] == [12, 12]
    scores_after, after = run_monitored(small, x)
    torch.testing.assert_close(scores_after, scores)
    assert after.layers[1].unit_activity == tuple(rate for rate in activity.layers[1].unit_activity if rate)
    assert after.forward_macs < activity.forward_macs
    assert after.parameters == count_parameters(small) < activity.parameters
    small.train()(x)[0].square().sum().backward()
    assert all(p.grad is not None for p in small.parameters())


def test_engine_runs_a_pruned_model():
    torch.set_default_dtype(torch.float32)
    model, x = classifier(), torch.randn(1, 20, 3)
    small = prune(model, run_monitored(model, x)[1], 0.5)
    expected = small(x)[0][0]
    scores = egru.EventEngine(**small.streaming()).run(x[0], last=True)
    torch.testing.assert_close(scores, expected.detach(), rtol=1e-4, atol=1e-4)


def test_language_model_with_a_share_per_layer():
    model = LanguageModel(11, 6, 10, num_layers=3, threshold=egru.Threshold(mean=-3.0))
    for layer in model.layers:
        lively(layer, 3.0)  # pyright: ignore[reportArgumentType]
    torch.nn.init.normal_(model.embedding.weight)
    tokens = torch.randint(11, (30, 4))
    activity = run_monitored(model, tokens)[1]
    small = prune(model, activity, (0.4, 0.0, 0.0))
    assert [(layer.input_size, layer.hidden_size) for layer in small.layers] == [(6, 6), (6, 10), (10, 6)]
    assert small.readout.weight is small.embedding.weight
    rates = activity.layers[0].unit_activity
    assert run_monitored(small, tokens)[1].layers[0].steps == 120
    kept = sorted(sorted(range(10), key=lambda unit: rates[unit])[4:])
    weight = "layer1.weight_ih_l0"
    torch.testing.assert_close(small.get_parameter(weight), model.get_parameter(weight)[:, kept])
    small = prune(model, activity, 1 / 3)
    assert [layer.hidden_size for layer in small.layers] == [7, 7, 6]
    assert small.readout.weight is small.embedding.weight
    small = prune(model, activity, [1 / 3] * 3)
    assert [layer.hidden_size for layer in small.layers] == [7, 7, 4]
    assert small.readout.weight.shape == (11, 4)
    assert small.embedding.weight.shape == (11, 6)
    x = model.embedding(tokens)
    for layer, measured in zip(model.layers, activity.layers, strict=True):
        units = len(measured.unit_activity)
        kept = torch.tensor(measured.unit_activity).argsort(stable=True)[round(units / 3) :]
        x = mute_others(layer, kept)(x)[0] * torch.zeros(units).index_fill(0, kept, 1.0)
    torch.testing.assert_close(small(tokens)[0], model.readout(x))


def test_at_least_one_unit_remains():
    model = classifier()
    for layer in model.layers:
        layer.get_parameter("threshold_l0").data.fill_(20.0)
    small = prune(model, run_monitored(model, torch.randn(2, 5, 3))[1])
    assert [layer.hidden_size for layer in small.layers] == [1, 1]


def test_invalid_arguments_raise():
    model, x = classifier(), torch.randn(2, 5, 3)
    activity = run_monitored(model, x)[1]
    with pytest.raises(ValueError, match=r"share must be one number in \[0, 1\) or 2 of them, got \[0.1\]"):
        prune(model, activity, [0.1])
    with pytest.raises(ValueError, match=r"share must be one number in \[0, 1\) or 2 of them, got 1.0"):
        prune(model, activity, 1.0)
    with pytest.raises(ValueError, match="activity does not fit this model"):
        prune(prune(model, activity), activity)
    with pytest.raises(TypeError, match="the model must have an event layer, got Sequ"):
        prune(SequenceClassifier(3, 12, 4, cell="gru"), activity)
    with pytest.raises(ValueError, match=r"EGRU.select: requires one layer in one direction, got num_layers=2"):
        egru.EGRU(2, 3, 2).select(torch.tensor([0]))
