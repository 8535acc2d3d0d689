"""The pretrained models: accuracy and activity on 500 test digits.

No setting was chosen with these digits. The values hold on every instruction set of the compiled core and in float64.
"""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import egru
from egru.data import Split, sequential_mnist
from egru.runs.load import PRETRAINED, find_run, pretrained
from egru.training import Run, RunError
from tests.helpers import mnist_sample

CORRECT = 493
LOSS = 0.0344
SPARSITY = 0.97290
MACS = 31_843


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)  # filling every new tensor takes longer than the model


@pytest.fixture(scope="module")
def sample() -> Split:
    return mnist_sample()


@pytest.fixture(scope="module")
def scored(sample):
    """The scores of the model on the sample, and its activity."""
    model = pretrained("smnist")
    with torch.no_grad(), egru.ActivityMonitor(model) as activity:
        scores = torch.cat([model(x)[0] for x in sample.x.split(5)])
    return scores, activity.summary()


def test_pretrained_model_has_the_documented_accuracy_and_activity(sample, scored):
    scores, activity = scored
    assert (scores.argmax(1) == sample.y).sum() == CORRECT
    assert cross_entropy(scores, sample.y).item() == pytest.approx(
        LOSS, abs=1e-3
    )  # the count does not depend on the readout's gain, the loss does
    assert activity.activity_sparsity == pytest.approx(SPARSITY, abs=1e-5)
    assert activity.forward_macs == pytest.approx(MACS, abs=1)


def run_engine(images, **options):
    engine = egru.EventEngine(**pretrained("smnist").streaming(), **options)
    scores = []
    for image in images:
        engine.reset()
        scores.append(engine.run(image, last=True))
    return torch.stack(scores), engine


def test_engine_predicts_the_same_classes_as_the_model(sample, scored):
    scores, engine = run_engine(sample.x)
    assert torch.equal(scores.argmax(1), scored[0].argmax(1))
    different = ((scores - scored[0]).abs().amax(1) > 1e-3).sum()
    assert different == 0
    assert 1 - engine.activity.rates[0] == pytest.approx(SPARSITY, abs=1e-5)


def test_engine_steps_equal_a_whole_image(sample):
    engine = egru.EventEngine(**pretrained("smnist").streaming())
    *_, last = (engine.step(pixel) for pixel in sample.x[0])
    assert torch.equal(last, run_engine(sample.x[:1])[0][0])
    assert last.argmax() == sample.y[0]


def test_int8_accuracy_differs_by_at_most_two_images(sample):
    scores, engine = run_engine(sample.x, weights="int8")
    assert abs((scores.argmax(1) == sample.y).sum() - CORRECT) <= 2  # 492
    assert 1 - engine.activity.rates[0] == pytest.approx(SPARSITY, abs=1e-4)


@pytest.mark.data
def test_sample_is_part_of_the_test_split(sample):
    test = sequential_mnist().test
    assert torch.equal(sample.x, test.x[::20])
    assert torch.equal(sample.y, test.y[::20])


@pytest.mark.parametrize("name", PRETRAINED)
def test_pretrained_model_is_a_finished_run_on_the_cpu(name):
    model = egru.pretrained(name)
    assert not model.training
    assert next(model.parameters()).device.type == "cpu"
    run = Run.open(find_run(Path(name), None)[0])
    assert run.result() is not None
    assert run.config()["config"]["root"] is None


def test_unknown_models_are_reported():
    with pytest.raises(ValueError, match="name must be one of smnist; got 'mnist'"):
        egru.pretrained("mnist")
    with pytest.raises(RunError, match=r"mnist is neither the folder of a run nor a pretrained model \(smnist\)"):
        find_run(Path("mnist"), None)
