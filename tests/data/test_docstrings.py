import doctest
import importlib

import pytest
import torch

import egru


@pytest.mark.parametrize("name", ["batches", "text"])
def test_docstring_examples_run(name):
    module = importlib.import_module(f"egru.data.{name}")
    results = doctest.testmod(module, extraglobs={"egru": egru, "torch": torch})
    assert results.attempted > 0
    assert results.failed == 0
