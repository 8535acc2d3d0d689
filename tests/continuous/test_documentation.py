"""The page docs/continuous.md."""

import re
from pathlib import Path

import torch


def test_example_runs():
    torch.set_default_dtype(torch.float32)  # restored by the fixture of all tests
    page = (Path(__file__).parents[2] / "docs" / "continuous.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(example, "docs/continuous.md", "exec"), names)
    assert names["layer"].U.grad.abs().max() > 0
    assert names["out"].trace.shape == (2, 2, 32)
