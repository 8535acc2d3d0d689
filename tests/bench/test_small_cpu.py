"""The benchmark of everyday sizes with tiny layers: what it measures and writes, and that wrong outputs are refused."""

import json

import pytest
import torch

import egru
from egru.bench import small_cpu

TINY = ["--steps", "1", "3", "--batches", "1", "2", "--units", "8", "--seconds", "0.001"]


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


def test_the_grid_has_59_shapes():
    grid = small_cpu.shapes(small_cpu.STEPS, small_cpu.BATCHES, small_cpu.UNITS)
    assert len(grid) == len(set(grid)) == 59
    assert (100, 128, 512) not in grid


def test_all_shapes_are_measured_and_written(capsys, tmp_path):
    assert small_cpu.main([*TINY, "--out", "small.json"]) == 0
    written = json.loads((tmp_path / "small.json").read_text())
    assert [(s["T"], s["B"], s["H"]) for s in written["shapes"]] == [(1, 1, 8), (1, 2, 8), (3, 1, 8), (3, 2, 8)]
    assert {name for name in written["shapes"][0] if "training" in name} == {"training", "cell training"}
    assert "cell training" not in written["shapes"][2], "a cell runs one step"
    for name, values in written["summary"].items():
        ratios = [shape[name]["ratio"] for shape in written["shapes"] if name in shape]
        assert values["lowest"] == min(ratios)
        assert values["shapes"] == len(ratios)
    assert "training: lowest" in capsys.readouterr().out


def test_a_wrong_layer_is_refused(monkeypatch):
    layer = egru.EGRU(4, 8)
    x = torch.randn(2, 3, 4)
    assert small_cpu.check(layer, x) < 1e-5
    run = egru.EGRU.run_direction

    def wrong(self, x, *arguments):
        y, c, state = run(self, x, *arguments)
        return (1.01 * y if x.dtype == torch.float32 else y), c, state

    monkeypatch.setattr(egru.EGRU, "run_direction", wrong)
    with pytest.raises(RuntimeError, match="differs from the reference"):
        small_cpu.check(layer, x)
