"""The models that ship with the package: how many of 500 test digits they get right, and at what activity.

Nothing is chosen by these digits. The counts below hold on every dispatch level of the compiled core and in float64.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import egru
from egru.data import Split, sequential_mnist
from egru.runs.load import PRETRAINED, find_run, pretrained
from egru.training import Run, RunError
from tests.helpers import mnist_sample

pytest.importorskip("safetensors", reason="weights in files need safetensors")
CORRECT = 491
LOSS = 0.0400
SILENT = 0.98862
MACS = 15_427


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)  # filling every fresh tensor costs more than the model


@pytest.fixture(scope="module")
def sample() -> Split:
    return mnist_sample()


@pytest.fixture(scope="module")
def scored(sample):
    """The model's scores of the sample, and its activity."""
    model = pretrained("smnist")
    with torch.no_grad(), egru.ActivityMonitor(model) as activity:
        scores = torch.cat([model(x)[0] for x in sample.x.split(5)])
    return scores, activity.summary()


def test_the_accuracy_and_activity_we_claim(sample, scored):
    scores, activity = scored
    assert (scores.argmax(1) == sample.y).sum() == CORRECT
    assert cross_entropy(scores, sample.y).item() == pytest.approx(LOSS, abs=1e-3)  # counts alone forgive a wrong gain
    assert activity.activity_sparsity == pytest.approx(SILENT, abs=1e-5)
    assert activity.forward_macs == pytest.approx(MACS, abs=1)


def in_engine(images, **options):
    engine = egru.EventEngine(**pretrained("smnist").streaming(), **options)
    scores = []
    for image in images:
        engine.reset()
        scores.append(engine.run(image, last=True))
    return torch.stack(scores), engine


def test_the_engine_chooses_as_the_model_does(sample, scored):
    scores, engine = in_engine(sample.x)
    assert torch.equal(scores.argmax(1), scored[0].argmax(1))
    apart = ((scores - scored[0]).abs().amax(1) > 1e-3).sum()
    assert apart <= 2  # of image 234 a state comes within 4e-8 of its threshold, and either side of it is right
    assert 1 - engine.activity.rates[0] == pytest.approx(SILENT, abs=1e-5)


def test_pixel_by_pixel_is_the_whole(sample):
    engine = egru.EventEngine(**pretrained("smnist").streaming())
    *_, last = (engine.step(pixel) for pixel in sample.x[0])
    assert torch.equal(last, in_engine(sample.x[:1])[0][0])
    assert last.argmax() == sample.y[0]


def test_int8_is_within_two_images(sample):
    scores, engine = in_engine(sample.x, weights="int8")
    assert abs((scores.argmax(1) == sample.y).sum() - CORRECT) <= 2  # 490
    assert 1 - engine.activity.rates[0] == pytest.approx(SILENT, abs=1e-4)


@pytest.mark.data
def test_the_sample_is_of_the_test_split(sample):
    test = sequential_mnist().test
    assert torch.equal(sample.x, test.x[::20])
    assert torch.equal(sample.y, test.y[::20])


@pytest.mark.parametrize("name", PRETRAINED)
def test_what_ships_is_a_finished_run(name):
    model = egru.pretrained(name)
    assert not model.training
    assert next(model.parameters()).device.type == "cpu"
    run = Run.open(find_run(Path(name), None)[0])
    assert run.result() is not None
    assert run.config()["config"]["root"] is None


def test_names(monkeypatch):
    with pytest.raises(ValueError, match="name must be one of smnist; got 'mnist'"):
        egru.pretrained("mnist")
    with pytest.raises(RunError, match=r"mnist is neither the folder of a run nor a pretrained model \(smnist\)"):
        find_run(Path("mnist"), None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"egru\[train\]"):
        egru.pretrained("smnist")
