"""benchmarks/supplement.py: near-zero outputs, and thresholds before and after training."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import egru
from benchmarks import supplement
from egru import experiments, runs


def test_near_zero_outputs_are_counted_per_tolerance():
    torch.manual_seed(0)
    model, x = nn.GRU(3, 5), torch.randn(7, 2, 3)
    with torch.no_grad():
        h, _ = model(x)
    (fractions,) = supplement.count_near_zero(model, lambda: [model(x[:3]), model(x[3:], h[2:3])]).values()
    for tolerance, fraction in zip(supplement.TOLERANCES, fractions, strict=True):
        assert fraction == pytest.approx(float((h.abs() <= tolerance).double().mean()))
    assert fractions[0] == 0 < fractions[-1]


def test_a_model_without_recurrent_layers_is_refused():
    with pytest.raises(ValueError, match="no GRU"):
        supplement.count_near_zero(nn.Linear(2, 2), lambda: None)


def test_records_and_figures_of_a_run(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    pytest.importorskip("matplotlib", reason="figures require matplotlib")
    torch.set_default_dtype(torch.float32)
    config = replace(experiments.find("digits").make(), epochs=1, limit=60, hidden=20, batch=30, seed=3)
    runs.train("digits", config, tmp_path / "run", page=False)
    for action in ("tolerance", "thresholds"):
        supplement.main([action, str(tmp_path / "run"), "--out", str(tmp_path), "--images", str(tmp_path / "images")])
        assert (tmp_path / "images" / f"supplement-{action}.png").exists()
    (tolerance,) = json.loads((tmp_path / "supplement_tolerance.json").read_text())["runs"]
    (thresholds,) = json.loads((tmp_path / "supplement_thresholds.json").read_text())["runs"]
    assert tolerance["cell"] == "egru"
    assert thresholds["seed"] == 3
    trained = runs.load(tmp_path / "run")
    (layer,) = [layer for _, layer in egru.layers.event_layers(trained.model)]
    (values,) = thresholds["layers"].values()
    assert values["after"] == pytest.approx(layer.thresholds()["l0"].tolist())
    assert values["before"] != values["after"]
