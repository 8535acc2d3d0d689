"""The types that the engine returns, and the examples in its documentation."""

import doctest
import importlib
import re
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import egru
from egru import EGRU, EventEngine


@pytest.fixture(autouse=True)
def float32(defaults):
    torch.set_default_dtype(torch.float32)


def test_result_type_follows_the_input_type() -> None:
    """Pyright checks ``assert_type``; the assertions below it check the same at run time."""
    engine = EventEngine(EGRU(5, 8), embedding=nn.Embedding(10, 5))
    array, values = np.zeros(5, np.float32), np.ones(2, np.float32)
    from_tensor = assert_type(engine.step(torch.zeros(5)), Tensor)
    from_array = assert_type(engine.step(array), NDArray[Any])
    from_token = assert_type(engine.step(3), Tensor)
    from_lists = assert_type(engine.step(([0, 3], [1.0, 1.0])), Tensor)
    from_values = assert_type(engine.step(([0, 3], values)), NDArray[Any])
    into_tensor = assert_type(engine.step(array, out=torch.zeros(8)), Tensor)
    into_array = assert_type(engine.step(torch.zeros(5), np.zeros(8, np.float32)), NDArray[Any])
    run_tensor = assert_type(engine.run(torch.zeros(4, 5)), Tensor)
    run_array = assert_type(engine.run(np.zeros((4, 5), np.float32), last=True), NDArray[Any])
    run_tokens = assert_type(engine.run([1, 2]), Tensor)
    run_into = assert_type(engine.run([1, 2], out=np.zeros((2, 8), np.float32)), NDArray[Any])
    for y in (from_tensor, from_token, from_lists, into_tensor, run_tensor, run_tokens):
        assert type(y) is Tensor
    for y in (from_array, from_values, into_array, run_array, run_into):
        assert type(y) is np.ndarray


@pytest.mark.parametrize("name", ["engine", "engine_gaps", "agreement"])
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example writes a file
    module = importlib.import_module(f"egru.runtime.{name}")
    results = doctest.testmod(module, extraglobs={"egru": egru, "torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


def test_examples_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "engine.md"
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {})
