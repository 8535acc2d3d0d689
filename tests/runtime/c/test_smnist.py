"""The shipped sMNIST model as C: the bits of the engine on MNIST images, and the accuracy of the integer form."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import egru
from egru import EventEngine
from egru.data import sequential_mnist
from tests.runtime.c.networks import COMPILER, CNetwork, address, compile_library, fixed_point

core = pytest.importorskip("egru._core", reason="the compiled core is not built")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.data,
    pytest.mark.skipif(COMPILER is None, reason="requires gcc"),
]


@pytest.fixture(autouse=True)
def plain_float32() -> Iterator[None]:
    core.force_level("plain")
    torch.set_default_dtype(torch.float32)
    yield
    core.force_level("auto")


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_scores_of_1000_images_have_the_bits_of_the_engine(weights, tmp_path: Path) -> None:
    engine = EventEngine(**egru.pretrained("smnist").streaming(), weights=weights)
    library = compile_library(tmp_path, {"net": engine}, "-O3")
    network = CNetwork(library, "net", 10)
    images, labels = sequential_mnist().test
    correct = 0
    for image, label in zip(images[:1000].numpy(), labels[:1000].tolist(), strict=True):
        engine.reset()
        network.call("reset", network.state)
        expected = engine.run(image, last=True)
        out = np.empty(10, np.float32)
        assert network.call("run", network.state, address(image), len(image), address(out)) == 0
        np.testing.assert_array_equal(out, expected)
        correct += int(out.argmax()) == label
    assert correct >= 980


def test_accuracy_of_the_integer_form_is_that_of_the_model(tmp_path: Path) -> None:
    model = egru.pretrained("smnist")
    engine = EventEngine(**model.streaming())
    library = compile_library(tmp_path, {"net": engine}, "-O3", weights="integer")
    network = CNetwork(library, "net", 10, True)
    images, labels = sequential_mnist().test
    correct = {"model": 0, "integer": 0}
    out = np.empty(10, np.int32)
    with torch.no_grad():
        for x, y in zip(images.split(500), labels.split(500), strict=True):
            correct["model"] += int((model(x)[0].argmax(-1) == y).sum())
            for image, label in zip(x, y.tolist(), strict=True):
                network.call("reset", network.state)
                assert network.call("run", network.state, address(fixed_point(image)), 784, address(out)) == 0
                correct["integer"] += int(out.argmax()) == label
    assert abs(correct["model"] - correct["integer"]) <= 0.003 * len(labels), correct
