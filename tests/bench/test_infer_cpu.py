"""The streaming benchmark with tiny networks: what it writes, and that wrong outputs get no ratio."""

import json
import sys

import pytest
import torch

from egru.bench import event_networks, infer_cpu

TINY = [
    "--sizes",
    "16x1",
    "--sparsities",
    "0.5",
    "0.8",
    "0.9",
    "--weights",
    "float32",
    "--length",
    "6",
    "--rounds",
    "1",
]


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


def test_results_are_written_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert infer_cpu.main(TINY) == 0
    (path,) = tmp_path.iterdir()
    assert path.match("infer_cpu-*.json")
    assert "no plot: it requires matplotlib" in capsys.readouterr().out


def test_results_go_to_the_working_directory(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plot requires matplotlib")
    existing = tmp_path / "infer_cpu.json"  # the name of the results in the repository
    existing.write_text("committed")
    assert infer_cpu.main(TINY) == 0
    assert existing.read_text() == "committed"
    results, plot = tmp_path.glob("infer_cpu-*.json"), tmp_path.glob("infer_cpu-*.png")
    assert len(list(plot)) == 1
    result = json.loads(next(results).read_text())["sizes"]["16 units, 1 input"]
    assert {"torch.nn.GRU", "ours float32 80%"} <= set(result["contestants"])
    assert [row["wrong"] for row in result["contestants"].values()] == [""] * len(result["contestants"])
    assert "µs per step" in capsys.readouterr().out


def test_out_keeps_sizes_that_were_measured_before(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "new" / "results.json"
    for size in ("16x1", "12x1"):
        assert infer_cpu.main([*TINY, "--sizes", size, "--out", str(path)]) == 0
    assert set(json.loads(path.read_text())["sizes"]) == {"16 units, 1 input", "12 units, 1 input"}


def test_a_wrong_output_gets_no_ratio(monkeypatch):
    monkeypatch.setattr(event_networks, "check_engine", lambda *_: "events differ at step 0")
    results = infer_cpu.bench(sizes=[(16, 1)], sparsities=[0.8], weights=["float32"], length=4, rounds=1)
    ratios = results["16 units, 1 input"]["ratios"]
    assert ratios
    assert all(row["wrong"] and "ratio" not in row for row in ratios)


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
def test_calibration_reaches_the_activity_sparsity(sparsity):
    layer = event_networks.event_layer(64, 1, seed=0)
    x = torch.randn(256, 1)
    event_networks.calibrate(layer, x, sparsity)
    with torch.no_grad():
        events = layer(x)[0]
    assert (events == 0).float().mean().item() == pytest.approx(sparsity, abs=0.1)
