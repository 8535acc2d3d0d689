"""Run the examples in the docstrings, and check that every public object has an example and describes its arguments."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import egru
import egru.energy
import egru.experiments
import egru.runs
import egru.sweep
from egru.continuous import ContinuousEGRU, InputEvents
from tests.helpers import mnist_sample
from tests.test_api import MODULES

PRIVATE = ("egru.__main__", "egru.bench", "egru.cli", "egru.demo", "egru._core")
"""Modules that users do not import."""
ELSEWHERE = ("egru.compress.sparsify", "egru.runtime.onnx_export")
"""Examples that train for seconds or require onnx: tests/compress and tests/runtime/test_onnx.py cover them."""
NOT_CALLED = ("egru.runtime.Prediction",)
"""Classes that only the package constructs, with arguments that are not public."""


class Checker(doctest.OutputChecker):
    """Accepts any output of an example that shows none."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def modules() -> list[str]:
    """Return the names of the modules whose examples run."""
    names = ["egru", *(module.name for module in pkgutil.walk_packages(egru.__path__, "egru."))]
    return [name for name in names if not name.startswith(PRIVATE) and name not in ELSEWHERE]


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def continuous_names() -> dict[str, Any]:
    """Return the objects that the examples of :mod:`egru.continuous` share: a layer, its input and its output."""
    layer = ContinuousEGRU(3, 32)
    times, channels = [torch.tensor([0.3, 0.7]), torch.tensor([0.8])], [torch.tensor([0, 2]), torch.tensor([1])]
    events = InputEvents.from_lists(times, channels)
    return {
        "F": F,
        "channel": torch.tensor([0, 1]),
        "events": events,
        "labels": torch.tensor([0, 1]),
        "layer": layer,
        "output": layer(events, horizon=4.0),
        "readout": torch.nn.Linear(32, 10),
        "t_us": torch.tensor([100, 200]),
    }


def kernel_names() -> dict[str, Any]:
    """Return the problem that the examples of :mod:`egru.kernels` run."""
    zeros = torch.zeros(2, 8)
    tensors = (torch.randn(20, 2, 4), zeros, zeros, torch.randn(24, 4), torch.randn(24, 8), None, None)
    options = (torch.full((8,), 0.1), torch.tensor(1.0), None, None, "output", "before", egru.Surrogate(), "")
    return {"problem": egru.kernels.Problem(*tensors, *options)}


def report_names() -> dict[str, Any]:
    """Return a run for the figures of :mod:`egru.report`."""
    layer = egru.EGRU(4, 8)
    with egru.ActivityMonitor(layer) as monitor:
        layer(torch.randn(20, 2, 4))
    history = (egru.report.Epoch(1, 1.7, 0.61, 0.82, 2.1), egru.report.Epoch(2, 0.9, 0.78, 0.85, 2.0))
    return {"run": egru.report.RunReport("EGRU", history, 0.79, monitor.summary(), seconds=4.1, seed=0)}


def training_names() -> dict[str, Any]:
    """Return a small model, its task, its settings and a new run folder for the examples of :mod:`egru.training`."""
    images = mnist_sample()
    split = egru.data.Split(images.x[:40, ::28], images.y[:40])
    data = egru.data.Classification("some digits", 10, split, split, split)
    training = egru.training.ClassifierTraining(epochs=1, batch=20)
    return {
        "model": egru.models.SequenceClassifier(1, 8, 10),
        "task": egru.training.ClassifierTask(data, training),
        "training": training,
        "run": egru.training.Run.create("runs/example", {}),
    }


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "egru.continuous": continuous_names,
    "egru.kernels": kernel_names,
    "egru.report": report_names,
    "egru.training": training_names,
}


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the two runs that the examples of :mod:`egru.runs` read."""
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("runs")
    for name, recipe in (("digits", "digits"), ("gru", "digits-gru")):
        config = egru.experiments.smoke(egru.experiments.find(recipe).make())
        egru.runs.train(recipe, egru.experiments.with_fields(config, {"epochs": 1}), folder / name, page=False)
    return folder


@pytest.mark.parametrize("package", sorted({package_of(name) for name in modules()}))
def test_examples_of_docstrings_run(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    torch.set_default_dtype(torch.float32)  # restored by the fixture of all tests
    runner = doctest.DocTestRunner(Checker(), verbose=False)
    shared = {"egru": egru, "torch": torch, "Path": Path, "dataclasses": dataclasses}
    tests = (test for name in modules() if package_of(name) == package for test in find_examples(name))
    for number, test in enumerate(tests):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        if package == "egru.runs":
            shutil.copytree(request.getfixturevalue("runs_folder"), "runs")
        test.globs |= shared | NAMES.get(package, dict)()
        runner.run(test)
    assert not runner.failures


def find_examples(module: str) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(module)) if test.examples]


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes by name, each once."""
    seen: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if getattr(value, "__module__", None) == module_name
        ]
        for name in sorted(name for name in names if not name.startswith("_")):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module_name}.{name}", value


def is_result(value: Any) -> bool:
    """Return whether users receive or implement ``value`` rather than call it: the example is that of its source."""
    if not inspect.isclass(value):
        return False
    named_tuple = issubclass(value, tuple) and hasattr(value, "_fields")
    record = dataclasses.is_dataclass(value) and "Attributes:" in (value.__doc__ or "")
    return named_tuple or record or is_exception(value) or getattr(value, "_is_protocol", False)


def is_exception(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def described(value: Any) -> str:
    """Return the docstrings that describe the arguments of ``value``: its own, its bases', and those of its fields."""
    if not inspect.isclass(value):
        return inspect.getdoc(value) or ""
    texts = []
    for base in value.__mro__:
        if base.__module__.startswith("egru"):
            texts.append(inspect.getdoc(base) or "")
            fields = re.findall(r'^    (\w+): [^\n]+\n    """(.*)', inspect.getsource(base), re.MULTILINE)
            texts += [f"{name}: {text}" for name, text in fields]
    return "\n".join(texts)


def test_every_public_object_has_an_example() -> None:
    missing = [
        name for name, value in public_objects() if not is_result(value) and ">>>" not in (inspect.getdoc(value) or "")
    ]
    assert not missing


def test_every_argument_is_described_and_has_a_type() -> None:
    missing = []
    for name, value in public_objects():
        text = described(value)
        if is_exception(value) or name in NOT_CALLED or re.search(r"for\s+the arguments", text):
            continue
        for parameter in inspect.signature(value).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            line = re.search(rf"^ *(?:[\w, ]+, )?{parameter.name}(?:,[\w,\s]+)?(?: \([^)]+\))?: ", text, re.MULTILINE)
            if line is None:
                missing.append(f"{name}: {parameter.name}")
            elif parameter.annotation is parameter.empty:
                missing.append(f"{name}: {parameter.name} has no type")
    assert not missing
