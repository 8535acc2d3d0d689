"""The page docs/concepts/continuous.md."""

import re
from pathlib import Path

import torch


def test_examples_run():
    torch.set_default_dtype(torch.float32)  # restored by the fixture of all tests
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "continuous.md").read_text()
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)  # each continues the one before
    for block in blocks:
        exec(compile(block, "docs/concepts/continuous.md", "exec"), names)
    assert names["layer"].U.grad.abs().max() > 0
    assert names["first"].trace.shape == (2, 1, 32)
    assert names["scores"].shape == (2, 10)
    assert names["y"].shape == (2, 8, 16)
    intervals = names["intervals"].detach()[[0, 1, 2, 3, -1]]
    torch.testing.assert_close(intervals, torch.tensor([0.69, 1.05, 1.84, 3.05, 3.65]), rtol=0.0, atol=0.005)
    assert names["trained"].adaptation.grad.abs().max() > 0
    parameters = list(names["output_layer"].parameters())[:3]
    gradients = {
        name: torch.autograd.grad(names[name], parameters, retain_graph=True) for name in ("failing", "mended")
    }
    assert all((g == 0).all() for g in gradients["failing"])
    assert all((g != 0).any() for g in gradients["mended"][1:])
