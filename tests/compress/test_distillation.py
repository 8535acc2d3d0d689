"""Distillation: comparison of outputs and states with a teacher."""

import copy

import pytest
import torch
from torch import nn

import egru
from egru.compress import Distillation


class Classifier(nn.Module):
    def __init__(self, layer_class=nn.GRU):
        super().__init__()
        self.rnn = layer_class(2, 16, batch_first=True)
        self.readout = nn.Linear(16, 2)

    def forward(self, x):
        return self.readout(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("layer_class", [nn.GRU, nn.LSTM])
@pytest.mark.filterwarnings("ignore:.*Converted.* runs in plain torch")
def test_distillation_is_zero_for_the_dense_limit_and_has_the_expected_value(layer_class):
    teacher = Classifier(layer_class)
    model, x = egru.convert(teacher), torch.randn(3, 7, 2)
    with Distillation(model, teacher) as distillation:
        model(x)
    assert torch.as_tensor(distillation.value).detach().abs() < 1e-20
    egru.compress.raise_thresholds(model, 0.1)
    with egru.layers.record(model) as records, Distillation(model, teacher, outputs=0.5, states=2.0) as distillation:
        output = model(x)
    h, expected = teacher.rnn(x)[0], teacher(x)
    states = (records[0].c.transpose(0, 1) - h).square().mean() / h.var(correction=0)
    p = (expected / 2).softmax(-1)
    outputs = 4 * (p * ((expected / 2).log_softmax(-1) - (output / 2).log_softmax(-1))).sum() / 3
    torch.testing.assert_close(distillation.value, 0.5 * outputs + 2.0 * states)
    assert torch.as_tensor(distillation.value).requires_grad
    assert not any(parameter.grad is not None for parameter in teacher.parameters())
    assert teacher.training


def test_distillation_of_values_and_wrong_arguments():
    teacher = nn.GRU(2, 5, 2, bidirectional=True)
    model, x = egru.convert(teacher), torch.randn(7, 3, 2)
    egru.compress.raise_thresholds(model, 0.1)
    with Distillation(model, teacher, compare="values", states=0.0) as distillation:
        y, _ = model(x)
    expected = teacher(x)[0]
    torch.testing.assert_close(distillation.value, (y - expected).square().mean() / expected.var(correction=0))
    with Distillation(model, teacher, compare="values", outputs=0.0, states=1.0) as distillation:
        model(x)
    assert 0 < distillation.value < 1
    with pytest.raises(ValueError, match="must have a recurrent layer 'rnn'"):
        Distillation(egru.convert(Classifier()), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="compare must be one of"):
        Distillation(model, teacher, compare="cosine")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="the model must have an event layer"):
        Distillation(nn.Linear(2, 2), teacher)


class Tagger(nn.Module):
    """A layer and a readout per step, with the classes in the second dimension."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.rnn, self.readout = layer, nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(self.rnn(x)[0]).transpose(1, 2)


class PackedTagger(Tagger):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 3]), batch_first=True)
        return self.readout(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]).transpose(1, 2)


class CellTagger(Tagger):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, outputs = None, []
        for step in x.unbind(1):
            h = self.rnn(step, h)
            outputs.append(self.readout(h))
        return torch.stack(outputs, -1)


TAGGERS = {
    "padded": Tagger(nn.GRU(2, 5, batch_first=True)),
    "packed": PackedTagger(nn.GRU(2, 5, batch_first=True)),
    "cell": CellTagger(nn.GRUCell(2, 5)),
}


@pytest.mark.parametrize("name", TAGGERS)
def test_distillation_of_classes_in_another_dimension(name):
    teacher = copy.deepcopy(TAGGERS[name]).double()
    model, x = egru.convert(teacher), torch.randn(2, 7, 2)
    egru.compress.raise_thresholds(model, 0.2)
    with (
        Distillation(model, teacher) as distillation,
        pytest.raises(ValueError, match=r"\(2, 3, 7\), appears to be time"),
    ):
        model(x)
    with Distillation(model, teacher, dim=1) as distillation:
        output = model(x)
    p, q = (teacher(x) / 2).softmax(1), (output / 2).softmax(1)
    torch.testing.assert_close(distillation.value, 4 * (p * (p / q).log()).sum(1).mean())
    with Distillation(model, teacher, dim=-1) as distillation:  # on request
        model(x)
    assert distillation.value != 0
    with Distillation(model, teacher, dim=3), pytest.raises(ValueError, match="dim=3 is out of range"):
        model(x)
    with pytest.raises(ValueError, match="dim requires compare="):
        Distillation(model, teacher, compare="values", dim=1)


@pytest.mark.parametrize("batch_first", [False, True])
def test_classes_in_the_last_dimension_may_be_as_many_as_the_steps(batch_first):
    teacher = nn.GRU(2, 7, batch_first=batch_first)
    model = egru.convert(teacher)
    with Distillation(model, teacher) as distillation:
        model(torch.randn(7, 7, 2))
    assert torch.as_tensor(distillation.value).detach().abs() < 1e-15
