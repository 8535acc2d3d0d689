"""The best outputs of a step and the log-probability of one of them, against torch in float64."""

from typing import Any

import pytest
import torch
from torch import nn

from egru import EGRU, EventEngine, Threshold
from tests.runtime.test_engine import level  # noqa: F401

pytestmark = pytest.mark.usefixtures("float32")
OUTPUTS = 1003


def engine(streams: int = 1) -> EventEngine:
    torch.manual_seed(1)
    layer, readout = EGRU(7, 40, threshold=Threshold.constant(0.01)), nn.Linear(40, OUTPUTS)
    with torch.no_grad():
        readout.weight.mul_(300)  # probabilities from almost 1 to less than 1e-30
    return EventEngine(layer, readout=readout, streams=streams)


@pytest.mark.parametrize("k", [1, 5, 64, 65, OUTPUTS])
@pytest.mark.parametrize("streams", [1, 3])
def test_matches_float64(runner: str, streams: int, k: int) -> None:
    x = torch.randn(streams, 7) if streams > 1 else torch.randn(7)
    scored = engine(streams)
    prediction = scored.predict(x)
    scored.reset()
    assert torch.equal(prediction.scores, scored.step(x))
    expected = prediction.scores.double().log_softmax(-1)
    values, indices = expected.topk(k)
    top = prediction.top(k)
    assert torch.equal(top.indices, indices)
    torch.testing.assert_close(top.log_probabilities.double(), values, rtol=1e-6, atol=1e-6)
    target = indices[..., -1]
    result: Any = prediction.log_probability(target if streams > 1 else int(target))
    assert isinstance(result, float) or streams > 1
    torch.testing.assert_close(torch.as_tensor(result).double(), values[..., -1], rtol=1e-6, atol=1e-6)


def test_every_level_matches_float64(level: str) -> None:  # noqa: F811
    prediction = engine().predict(torch.randn(7))
    expected = prediction.scores.double().log_softmax(-1)
    values, indices = expected.topk(9)
    assert torch.equal(prediction.top(9).indices, indices)
    torch.testing.assert_close(prediction.top(9).log_probabilities.double(), values, rtol=1e-6, atol=1e-6)
    assert prediction.log_probability(1002) == pytest.approx(expected[1002].item(), rel=1e-6, abs=1e-6)
    assert prediction.log_probability(int(expected.argmin())) < -60


def test_equal_scores_are_ordered_by_index(runner: str) -> None:
    prediction = engine().predict(torch.zeros(7).numpy())
    prediction.scores.fill_(0.5)
    prediction.scores[100:120] = 1.5
    assert prediction.top(25).indices.tolist() == [*range(100, 120), *range(5)]
    assert prediction.top(100).indices.tolist() == [*range(100, 120), *range(80)]


def test_bad_arguments_raise(runner: str) -> None:
    single, several = engine().predict(torch.zeros(7)), engine(3).predict(torch.zeros(3, 7))
    for k in (0, -1, OUTPUTS + 1, 2.0, True):
        with pytest.raises(ValueError, match=rf"Prediction.top: k must be an integer from 1 to {OUTPUTS}, got {k}"):
            single.top(k)  # pyright: ignore[reportArgumentType]
    for output in (-1, OUTPUTS):
        with pytest.raises(ValueError, match=rf"output must be from 0 to {OUTPUTS - 1}, got {output}"):
            single.log_probability(output)
    for output in (1.5, True, [1]):
        with pytest.raises(ValueError, match="output must be an integer, got"):
            single.log_probability(output)  # pyright: ignore[reportArgumentType]
    for output in (1, [1, 2]):
        with pytest.raises(ValueError, match="output must be 3 integers, got"):
            several.log_probability(output)
    with pytest.raises(ValueError, match=f"output must be from 0 to {OUTPUTS - 1}"):
        several.log_probability([0, 1, OUTPUTS])
