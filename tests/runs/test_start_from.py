"""Runs that start from the weights of another run."""

import shutil
from dataclasses import replace

import pytest
import torch

from egru import cli
from egru.experiments import find
from egru.runs import export, load, resume, train
from egru.training import Paused, Run, RunError

SMALL = replace(find("digits").make(), epochs=1, limit=60, hidden=8, batch=30, evaluation_batch=60)
STILL = replace(SMALL, learning_rate=1e-12, seed=1, start_from="first")


@pytest.fixture(autouse=True)
def first(defaults, monkeypatch, tmp_path):
    """A finished run in the folder ``first`` of the working directory."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    train("digits", SMALL, tmp_path / "first", page=False)
    return tmp_path / "first"


def have_equal_weights(one, other) -> bool:
    pairs = zip(load(one).model.parameters(), load(other).model.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("source", ["first", "export"])
def test_run_starts_from_the_weights_of_another(source, first, tmp_path):
    export(first, tmp_path / "export", weights="float32")
    train("digits", replace(STILL, start_from=source), tmp_path / "second", page=False)
    assert have_equal_weights(first, tmp_path / "second")
    train("digits", replace(STILL, start_from=None), tmp_path / "other", page=False)
    assert not have_equal_weights(first, tmp_path / "other")


def test_resume_does_not_need_the_other_run(first, tmp_path, monkeypatch):
    with pytest.raises(Paused):
        train("digits", replace(STILL, epochs=2), tmp_path / "second", minutes=1e-9, page=False)
    shutil.copytree(first, tmp_path / "copy")
    shutil.rmtree(first)
    monkeypatch.chdir("/")
    resume(tmp_path / "second")
    assert have_equal_weights(tmp_path / "copy", tmp_path / "second")


def test_weights_that_do_not_fit_are_refused(first, tmp_path):
    with pytest.raises(ValueError, match=r"start_from: .*first do not fit .*weight_ih_l0 has shape \(24, 1\)"):
        train("digits", replace(STILL, hidden=9), tmp_path / "second")
    with pytest.raises(RunError, match=r"nowhere is neither the folder of a run nor a pretrained model \(smnist\)"):
        train("digits", replace(STILL, start_from="nowhere"), tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_start_from_is_an_option(first, tmp_path):
    words = "digits --start-from first --limit 60 --hidden 8 --batch 30 --epochs 1 --learning-rate 1e-12 --seed 1"
    assert cli.main(["train", *words.split(), "--out", "second"]) == 0
    assert Run.open(tmp_path / "second").config()["config"]["start_from"] == str(first)
    assert have_equal_weights(first, tmp_path / "second")


@pytest.mark.parametrize("floor", [(0.6,), (0.6, 0.7)])
def test_threshold_floor_raises_the_initial_thresholds(floor, tmp_path):
    layers = {"layers": len(floor), "start_from": None, "freeze_thresholds": True}
    train("digits", replace(STILL, threshold_floor=floor, **layers), tmp_path / "second", page=False)
    lowest = [p.sigmoid().min().item() for n, p in load(tmp_path / "second").model.named_parameters() if "thresh" in n]
    assert lowest == pytest.approx(list(floor), abs=1e-6)


def test_zeros_of_the_source_stay_zero_only_with_a_weight_sparsity(tmp_path):
    messages: list[str] = []
    pruned = replace(SMALL, weight_sparsity=0.5, pruning_share=0.0)
    train("digits", pruned, tmp_path / "pruned", page=False)
    again = replace(SMALL, seed=1, start_from="pruned")
    for sparsity, stays in ((0.0, False), (0.5, True)):
        messages.clear()
        out = tmp_path / f"again{sparsity}"
        train("digits", replace(again, weight_sparsity=sparsity), out, log=messages.append, page=False)
        warned = any("50% of the weights of" in text and "--weight-sparsity 0.50 keeps" in text for text in messages)
        assert warned != stays
        weights = load(out).model.get_parameter("layer0.weight_hh_l0")
        assert (float((weights == 0).float().mean()) > 0.3) == stays


@pytest.mark.parametrize("options", [{"block": 4}, {"pruning_scope": "layer"}, {"pruning_share": 0.5}])
def test_options_of_pruning_require_a_weight_sparsity(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be .* unless weight_sparsity is positive, got "):
        replace(SMALL, **options)
    replace(SMALL, weight_sparsity=0.5, **options)
