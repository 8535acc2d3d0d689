"""Recipes: loss curves of their smoke versions against stored ones, settings, and options that are refused.

``EGRU_WRITE_CURVES=1 pytest tests/experiments`` stores new curves for the recipes whose data sets are available.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from egru.events import Surrogate
from egru.experiments import RECIPES, ClassifierConfig, LanguageConfig, build, find, load_data, smoke
from egru.experiments.build import Shape, build_classifier
from egru.experiments.config import config_record, read_config
from egru.experiments.registry import add
from egru.runs import train
from egru.runs.load import find_run
from egru.training import Run, learning_rate_factor
from tests.helpers import PATIENCE
from tests.training.tiny import text

CURVES = Path(__file__).with_name("curves.json")
FAST = ("digits", "smnist", "psmnist", "dvs", "ptb", "wikitext2")


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)  # filling every new tensor takes longer than these models


def marked(name):
    config = RECIPES[name].make()
    marks = [] if config.data.endswith("digits") else [pytest.mark.data]
    return pytest.param(name, marks=[*marks, *([] if name in FAST else [pytest.mark.slow])])


@pytest.mark.parametrize("name", [marked(name) for name in RECIPES])
def test_smoke_version_follows_the_stored_loss_curve(name, tmp_path):
    start = time.process_time()
    train(name, smoke(RECIPES[name].make()), tmp_path / "run")
    assert time.process_time() - start < 60
    lines = Run.open(tmp_path / "run").metrics()
    losses = [line.train.loss for line in lines] + [lines[-1].validation.loss]
    curves = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    if os.environ.get("EGRU_WRITE_CURVES"):
        curves[name] = [round(loss, 6) for loss in losses]
        text = ",\n".join(f"  {json.dumps(key)}: {json.dumps(curves[key])}" for key in RECIPES if key in curves)
        CURVES.write_text(f"{{\n{text}\n}}\n")
    assert losses == pytest.approx(
        curves[name], rel=0.02
    )  # machines round differently, and events amplify the difference
    assert (tmp_path / "run" / "report" / "index.html").exists()


def test_every_recipe_has_a_stored_curve():
    assert set(json.loads(CURVES.read_text())) == set(RECIPES)


def test_evnn_recipe_has_the_settings_of_evnn():
    """Values of the command in EvNN's benchmarks/lm/README.md for Penn Treebank, and of its train.py."""
    config = find("ptb-evnn").make()
    assert isinstance(config, LanguageConfig)
    assert (config.hidden, config.embedding, config.layers) == (1350, 750, 3)
    assert (config.optimiser, config.learning_rate, config.betas) == ("adamw", 1.2e-3, (0.0, 0.999))
    assert (config.weight_decay, config.clip, config.batch, config.bptt) == (0.10, 0.1, 64, 70)
    assert (config.embedding_dropout, config.word_dropout, config.dropout) == (0.6, 0.1, 0.25)
    assert (config.output_dropout, config.dropconnect) == (0.5, 0.7)
    assert (config.evaluation_batch, config.test_batch) == (64, 1)
    assert (config.threshold.kind, config.threshold.mean, config.freeze_thresholds) == ("clamp", 0.01, True)
    assert config.surrogate == Surrogate(width=1 / 3.6, height=3.6)
    assert (config.reset, config.reset_gate) == ("threshold", "after")
    factors = [learning_rate_factor(config, epoch) for epoch in (0, 699, 850, 1000)]
    assert factors == pytest.approx([1, 1, 0.5, 0])


def test_recipes_have_the_numbers_of_the_paper_and_a_summary():
    assert find("smnist-paper").papers[0].accuracy == "98.3"
    assert (
        find("ptb-egru-2000").describe_paper().startswith("paper, Table 3: perplexity 57.0, activity sparsity 84.8 %")
    )
    assert find("smnist").describe_paper().startswith("our recipe")
    assert len(RECIPES) > 60
    assert all(recipe.summary for recipe in RECIPES.values())


def test_plain_names_of_sequential_mnist_are_the_settings_that_work():
    """docs/results/smnist-study.md: the paper's settings explode. The shipped network has those of the plain name."""
    for name in ("smnist", "psmnist"):
        config, paper = find(name).make(), find(f"{name}-paper").make()
        assert isinstance(config, ClassifierConfig)
        assert isinstance(paper, ClassifierConfig)
        assert (config.data, config.reset, config.rate_loss, config.normalise) == (name, "none", 0.3, True)
        assert (paper.data, paper.reset, paper.rate_loss, paper.clip) == (name, "output", 0.0, 0.25)
        shipped = Run.open(find_run(Path("smnist"), None)[0]).config()
        assert shipped["recipe"] == "smnist"
    trained = read_config(shipped)[1]
    assert replace(trained, device="cpu", precision="float32") == find("smnist").make()


def test_numbers_of_the_paper_are_not_shown_for_other_frames():
    recipe = find("dvs-egru-512")
    config = recipe.make()
    assert config.data == "dvs"
    assert recipe.describe_paper(config) == "the paper's numbers are for --data dvs-raw"
    assert recipe.describe_paper(replace(config, data="dvs-raw")).startswith(
        "paper, Table 1 with --data dvs-raw: accuracy 88.0"
    )
    assert all(paper.data == "dvs-raw" for r in RECIPES.values() if r.name.startswith("dvs-") for paper in r.papers)


def test_unknown_recipe_suggests_similar_names():
    with pytest.raises(ValueError, match="unknown recipe 'smnits'; did you mean smnist"):
        find("smnits")


def test_recipe_names_are_unique():
    with pytest.raises(ValueError, match="recipe 'smnist' exists already"):
        add("smnist", find("smnist").make, "twice")


@pytest.mark.parametrize("name", list(RECIPES))
def test_config_round_trips_through_json(name):
    config = RECIPES[name].make()
    assert read_config(json.loads(json.dumps(config_record(name, config, text())))) == (name, config)


def parameters(name: str, inputs: int, classes: int) -> int:
    """Count the parameters of a classifier recipe at full size."""
    config = RECIPES[name].make()
    assert isinstance(config, ClassifierConfig)
    frame = (2, 32, 32) if inputs == 2048 else (inputs,)
    model = build_classifier(config, Shape(frame, 2, classes))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "inputs", "classes", "millions"),
    [
        ("smnist-paper", 1, 10, 1.05),
        ("smnist-egru-512", 1, 10, 0.79),
        ("smnist-cornn-256", 1, 10, 0.134),
        ("dvs-egru-512", 2048, 11, 5.5),
        ("dvs-egru-1024", 2048, 11, 15.7),
        ("dvs-lstm-867", 2048, 11, 16.3),
        ("dvs-cnn-gru-136-da", 2048, 11, 2.0),
        ("dvs-cnn-egru-256-da", 2048, 11, 2.7),
        ("dvs-cnn-egru-795-da", 2048, 11, 4.8),
    ],
)
def test_number_of_parameters_is_that_of_the_paper(name, inputs, classes, millions):
    assert parameters(name, inputs, classes) / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("smnist-cornn-256", {"learning_rate": 0.0021, "oscillators": (0.042, 2.7, 4.7)}),
        ("psmnist-cornn-256", {"learning_rate": 0.0054, "oscillators": (0.076, 0.4, 8.0)}),
        ("ptb-awd-lstm", {"epochs": 500, "batch": 20, "embedding_dropout": 0.4, "dropout": 0.25}),
        ("wikitext2-awd-lstm", {"epochs": 750, "batch": 80, "embedding_dropout": 0.65, "dropout": 0.2}),
    ],
)
def test_baselines_have_their_authors_settings(name, settings):
    """docs/guides/training.md names the source of each value."""
    if "cornn" in name:
        settings |= {"hidden": 256, "epochs": 120, "batch": 120, "readout": "last", "optimiser": "adam", "clip": None}
        settings |= {"schedule": "step", "step_epochs": 100, "step_factor": 0.1}
    else:
        settings |= {"hidden": 1150, "embedding": 400, "layers": 3, "learning_rate": 30.0, "clip": 0.25, "bptt": 70}
        settings |= {"optimiser": "ntavsgd", "patience": 5, "weight_decay": 1.2e-6, "dropconnect": 0.5}
        settings |= {"output_dropout": 0.4, "word_dropout": 0.1, "activity_decay": 2.0, "temporal_decay": 1.0}
    config = RECIPES[name].make()
    assert {field: getattr(config, field) for field in settings} == settings


@pytest.mark.parametrize("frame", [(1,), (2, 4, 4)])
def test_input_dropout_applies_to_pixels_and_frames(frame):
    model = build_classifier(ClassifierConfig(input_dropout=0.3), Shape(frame, 2, 2))
    assert model.input_dropout == 0.3


def test_centre_subtracts_the_mean_training_frame():
    config = ClassifierConfig(data="digits", hidden=4, centre=True)
    data: Any = load_data(config)
    model, _ = build(config, data)
    assert torch.allclose(model.get_buffer("mean"), data.train.x.mean((0, 1)))
    with pytest.raises(ValueError, match="centre is not supported with convolutional"):
        ClassifierConfig(data="dvs", centre=True, convolutional=True)


@pytest.mark.parametrize("name", ["digits", "digits-gru"])
def test_uniform_gates_are_uniform(name):
    config = replace(RECIPES[name].make(), uniform_gates=True)
    model, _ = build(config, load_data(config))
    bias = model.get_parameter("layer0.bias_ih_l0")[128:256] + model.get_parameter("layer0.bias_hh_l0")[128:256]
    gates = torch.sigmoid(bias).sort().values
    assert (gates - torch.linspace(0, 1, 128)).abs().max() < 0.15


def test_longest_memory_spreads_time_constants_log_uniformly():
    config = ClassifierConfig(data="digits", hidden=256, longest_memory=64.0)
    model, _ = build(config, load_data(config))
    bias = model.get_parameter("layer0.bias_ih_l0")[256:512] + model.get_parameter("layer0.bias_hh_l0")[256:512]
    steps = 1 / torch.sigmoid(-bias).sort(descending=True).values
    assert (steps.log() / torch.tensor(64.0).log() - torch.linspace(0, 1, 256)).abs().max() < 0.12


def test_input_scale_multiplies_only_the_first_input_weights():
    config = ClassifierConfig(data="digits", hidden=8)
    plain, scaled = (build(replace(config, input_scale=s), load_data(config))[0].state_dict() for s in (1.0, 3.0))
    for name, value in scaled.items():
        assert torch.equal(value, 3 * plain[name] if name == "layer0.weight_ih_l0" else plain[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"side": 14}, "side must be None with data digits, got 14"),
        ({"data": "smnist", "side": 16}, "side must be 28 or 14 with data smnist, got 16"),
        ({"augment": True}, "augment, smooth, pool, shift, time_crop and roll require frames .*got data digits"),
        ({"pool": 2}, "augment, smooth, pool, shift, time_crop and roll require frames .*got data digits"),
        ({"shift": 1.0}, "augment, smooth, pool, shift, time_crop and roll require frames .*got data digits"),
        ({"roll": True}, "augment, smooth, pool, shift, time_crop and roll require frames .*got data digits"),
        ({"time_crop": 0.5}, "augment, smooth, pool, shift, time_crop and roll require frames .*got data digits"),
        ({"data": "dvs", "time_crop": 0.0}, "time_crop must be a fraction, 0 < time_crop <= 1; got 0.0"),
        ({"data": "dvs", "time_crop": 1.5}, "time_crop must be a fraction, 0 < time_crop <= 1; got 1.5"),
        ({"data": "dvs", "shift": -1.0}, "shift must be finite and not negative, got -1.0"),
        ({"data": "dvs", "pool": 3}, "pool must be one of 1, 2, 4, 8, 16, got 3"),
        ({"cell": "gru", "zoneout": 0.1}, "zoneout is not supported with cell gru, got 0.1"),
        ({"cell": "cornn", "dropconnect": 0.1}, "dropconnect is not supported with cell cornn, got 0.1"),
        ({"cell": "gru", "recurrent_clip": 0.1}, "recurrent_clip is not supported with cell gru, got 0.1"),
        ({"cell": "cornn", "uniform_gates": True}, "uniform_gates requires cell egru"),
        ({"cell": "cornn", "longest_memory": 9.0}, "longest_memory requires cell egru"),
        ({"cell": "cornn", "input_scale": 2.0}, "input_scale requires cell egru"),
        ({"longest_memory": 1.0}, "longest_memory must be greater than 1 step, or None; got 1.0"),
        ({"input_scale": 0.0}, "input_scale must be positive, got 0.0"),
        ({"longest_memory": 9.0, "uniform_gates": True}, "both set the update gates"),
        ({"cell": "gru", "rate_loss": 0.1}, "must have an event layer"),
        ({"trace": 0.0}, "trace must be positive and at most 1e15 steps, got 0.0"),
        ({"trace": 1e17, "normalise": True}, "trace must be positive and at most 1e15 steps, got 1e[+]17"),
        ({"limit": -1000}, "limit must be at least 1, or None; got -1000"),
        ({"hidden": 1, "uniform_gates": True}, "hidden must be at least 2 with uniform_gates or longest_memory, got 1"),
        ({"dropout": 0.5}, "dropout acts between layers and must be 0 with one layer, got 0.5"),
        pytest.param(
            {"device": "cuda"},
            "device must be cpu because torch finds no CUDA device, got 'cuda'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without a CUDA device"),
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train("digits", ClassifierConfig(**{"hidden": 4, "epochs": 1, "limit": 8, **changes}), tmp_path / "run")


def test_limit_of_words_is_checked():
    with pytest.raises(ValueError, match="limit must be at least 1, or None; got 0"):
        LanguageConfig(limit=0)


def test_train_resume_and_export_require_only_torch_and_safetensors(tmp_path):
    """Without the optional packages, only the figures are not written as files."""
    code = f"""
import sys, dataclasses
for name in ("tyro", "rich", "matplotlib", "tonic", "scipy"):
    sys.modules[name] = None
sys.path[:0] = {sys.path!r}
from pathlib import Path
from egru import experiments, runs
from egru.training import Paused
from tests.training.tiny import text
for name in ("train", "load"):
    sys.modules["egru.runs." + name].load_data = lambda config: text()
config = dataclasses.replace(experiments.smoke(experiments.find("ptb-evnn").make()), epochs=3, save_every=25)
folder = Path({str(tmp_path / "run")!r})
for minutes in (1e-9, None):
    try:
        if minutes:
            runs.train("ptb-evnn", config, folder, minutes=minutes)
        else:
            runs.resume(folder, minutes=24)
    except Paused as pause:
        print(pause)
print(len(runs.export(folder, folder.parent / "small", "int8", 1 << 20)))
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == [
        "epoch 1",
        "the time limit was reached; epoch 1 of 3 is saved",
    ]
    assert [line.split(":")[0] for line in lines[2:]] == ["epoch 2", "epoch 3", "6"]
    assert {p.name for p in (tmp_path / "run" / "report").iterdir()} == {"index.html", "report.json"}
