import pytest
import torch

import egru
from egru.compress.negate import negate_positive_units, negate_units
from egru.models import LanguageModel, SequenceClassifier
from egru.models.stack import RecurrentStack
from egru.training.graphs import state_tensors


def make(kind: str, cell) -> RecurrentStack:
    torch.manual_seed(0)
    if kind == "classifier":
        return SequenceClassifier(3, 8, 4, num_layers=2, cell=cell)
    if kind == "normalised classifier":
        model = SequenceClassifier(3, 8, 4, cell=cell, normalise=True)
        model.get_buffer("normalise.running_mean").normal_()
        model.get_parameter("normalise.weight").data.normal_()
        return model
    return LanguageModel(11, 5, 7, num_layers=2, cell=cell, tied=kind == "tied")


def inputs(kind: str) -> torch.Tensor:
    return torch.randint(11, (9, 3)) if kind in ("tied", "language") else torch.randn(3, 9, 3)


@pytest.mark.parametrize("kind", ["classifier", "normalised classifier", "language", "tied"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_negated_units_compute_the_same_function(kind, cell):
    for model in (make(kind, cell).eval(), egru.convert(make(kind, cell), "positive").eval()):
        x = inputs(kind)
        expected, states = model(x)
        masks = [torch.rand(layer.get_parameter("weight_hh_l0").shape[1]) < 0.5 for layer in model.layers]
        negate_units(model, masks)
        scores, negated = model(x)
        torch.testing.assert_close(scores, expected)
        assert not torch.allclose(join(negated), join(states))


def join(states) -> torch.Tensor:
    return torch.cat([tensor.as_subclass(torch.Tensor).flatten() for tensor in state_tensors(states)])


@pytest.mark.parametrize("kind", ["classifier", "tied"])
def test_units_with_mostly_positive_states_are_negated(kind):
    model, x = egru.convert(make(kind, "gru"), "positive"), inputs(kind)

    def shares():
        with egru.layers.record(model) as records:
            model.eval()(x)
        return torch.cat([(record.c > 0).double().mean((0, 1)) for record in records])

    model.train()
    before = shares()
    model.train()
    count = negate_positive_units(model, lambda: model(x))
    assert count == (before > 0.5).sum() > 0
    assert model.training
    torch.testing.assert_close(shares(), torch.minimum(before, 1 - before))
