"""Run the examples in the docstrings of the public modules."""

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import egru
from egru.continuous import ContinuousEGRU, InputEvents

PACKAGES = ("activity", "compress", "continuous", "kernels", "layers", "models", "runtime")
MODULES = ("egru.cells", "egru.events", "egru.functional", "egru.trace")
ELSEWHERE = ("egru.compress.sparsify", "egru.runtime.onnx_export")
"""Examples that train for seconds or require onnx: tests/compress and tests/runtime/test_onnx.py cover them."""


def modules() -> Iterator[str]:
    """Yield the names of the modules with examples that need neither data files nor a long training."""
    for package in PACKAGES:
        path = importlib.import_module(f"egru.{package}").__path__
        yield from (
            module.name for module in pkgutil.walk_packages(path, f"egru.{package}.") if module.name not in ELSEWHERE
        )
    yield from MODULES


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


def test_examples_of_docstrings_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)  # restored by the fixture of all tests
    attempted, failed = 0, []
    for name in modules():
        names = continuous_names() if name.startswith("egru.continuous") else {}
        results = doctest.testmod(importlib.import_module(name), extraglobs={"egru": egru, "torch": torch, **names})
        attempted += results.attempted
        failed += [name] if results.failed else []
    assert not failed
    assert attempted > 100
