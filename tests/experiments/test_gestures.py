"""Recipes of the gesture tables: frames, thresholds, clipping and checkpoints."""

import dataclasses

import pytest
import torch

from egru import data
from egru.data import Classification, Split
from egru.data.gestures import pool_frames, smooth_frames
from egru.experiments import RECIPES, ClassifierConfig, build, find, load_data
from egru.experiments.build import Shape, build_classifier
from egru.experiments.tables import TABLES
from egru.layers import event_layers
from egru.runs.reproduce import RUNS
from egru.training import ClassifierTask, Run

PAPER_RECIPES = [*TABLES["gestures"].recipes(), *TABLES["ablation"].recipes()]


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_raw_frames_have_the_size_that_the_network_reads(name, monkeypatch):
    """The paper's CNN reads 128 by 128 pixels, the other networks 32 by 32."""
    sides = []

    def raw(root, *, side):
        sides.append(side)
        split = Split(torch.zeros(2, 3, 2, side, side, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
        return Classification("raw", 11, split, split, split)

    monkeypatch.setattr(data, "dvs_gesture_raw", raw)
    config = dataclasses.replace(RECIPES[name].make(), data="dvs-raw")
    assert isinstance(config, ClassifierConfig)
    frames = load_data(config)
    assert isinstance(frames, Classification)
    expected = 128 if "cnn" in name else 32
    assert sides == [expected]
    assert frames.train.x.shape[-2:] == (expected, expected)
    load_data(dataclasses.replace(config, side=160 - expected))  # the option overrides it
    assert sides[1:] == [160 - expected]


@pytest.mark.parametrize("seed", range(8))
def test_scalar_threshold_starts_where_states_reach_it(seed):
    """With 128 units and 0.95, the median of |N(0, sqrt(2))|, there was no event in four epochs; with 0.5 it learns."""
    torch.manual_seed(seed)
    config = find("dvs-ablation-scalar").make()
    assert isinstance(config, ClassifierConfig)
    model = build_classifier(dataclasses.replace(config, hidden=8), Shape((2, 4, 4), 2, 11))
    thresholds = [theta for _, layer in event_layers(model) for theta in layer.thresholds().values()]
    assert len(thresholds) == 2
    for theta in thresholds:
        assert theta.unique().numel() == 1
        assert theta[0].item() == 0.5


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_checkpoints_are_rare_and_gradients_clipped(name):
    config = RECIPES[name].make()
    assert config.save_every == 20
    assert config.clip == 50


def test_clip_is_above_every_gradient_of_runs_that_did_not_explode():
    limit = find("dvs-egru-512").make().clip
    assert limit is not None
    calm = [
        folder for kind in ("gru-", "lstm-", "ablation-hard", "ablation-none") for folder in RUNS.glob(f"dvs-{kind}*")
    ]
    assert len(calm) >= 16
    for folder in calm:
        assert max(line.train.gradient_norm_max for line in Run.open(folder).metrics()) < limit, folder
    for folder in RUNS.glob("dvs-egru-*"):
        norms = [line.train.gradient_norm for line in Run.open(folder).metrics()]
        assert sum(norm < limit for norm in norms) >= 0.95 * len(norms), folder


@pytest.mark.parametrize("smooth", [False, True])
def test_frames_are_smoothed_before_they_are_pooled(smooth, monkeypatch):
    x = torch.rand(2, 3, 2, 32, 32)
    split = Split(x, torch.zeros(2, dtype=torch.int64))
    frames = Classification("frames", 11, split, split, split, decode=lambda x: 2 * x)
    monkeypatch.setattr(data, "dvs_gesture", lambda root: frames)
    config = ClassifierConfig(data="dvs", hidden=4, smooth=smooth, pool=2)
    loaded = load_data(config)
    assert isinstance(loaded, Classification)
    assert loaded.decode is not None
    first = smooth_frames(2 * x) if smooth else 2 * x
    assert torch.equal(loaded.decode(x), pool_frames(first, 2))
    model, _ = build(config, loaded)
    assert model.get_parameter("layer0.weight_ih_l0").shape == (12, 2 * 16 * 16)


def test_shift_moves_only_training_frames(monkeypatch):
    """Translations are drawn per sequence and applied before pooling: a single pixel stays in one square of four."""
    x = torch.zeros(64, 3, 2, 32, 32)
    x[..., 16, 16] = 1.0
    split = Split(x, torch.zeros(64, dtype=torch.int64))
    frames = Classification("frames", 11, split, split, split, decode=lambda x: x)
    monkeypatch.setattr(data, "dvs_gesture", lambda root: frames)
    config = ClassifierConfig(data="dvs", hidden=4, shift=2.0, pool=2, batch=64)
    loaded = load_data(config)
    assert isinstance(loaded, Classification)
    _, task = build(config, loaded)
    assert isinstance(task, ClassifierTask)
    (batch,) = task.batches()
    assert ((batch.x == 0.25).sum((-1, -2)) == 1).all()
    assert ((batch.x != 0).sum((-1, -2)) == 1).all()
    assert (batch.x == batch.x[:, :1, :1]).all()
    places = batch.x[:, 0, 0].flatten(1).argmax(1)
    assert set((places // 16).tolist()) == set((places % 16).tolist()) == {7, 8, 9}
    evaluated, _ = next(iter(task.data["validation"]))
    assert (evaluated[..., 8, 8] == 0.25).all()


def batches_of_steps(monkeypatch, **options):
    """Return the steps of a training and a validation batch of 256 sequences of 8 frames, as numbers ``(B, T)``."""
    x = torch.arange(8.0).view(8, 1, 1, 1).expand(256, 8, 2, 32, 32)
    split = Split(x, torch.zeros(256, dtype=torch.int64))
    frames = Classification("frames", 11, split, split, split, decode=lambda x: x)
    monkeypatch.setattr(data, "dvs_gesture", lambda root: frames)
    config = ClassifierConfig(data="dvs", hidden=4, batch=256, evaluation_batch=256, **options)
    loaded = load_data(config)
    assert isinstance(loaded, Classification)
    _, task = build(config, loaded)
    assert isinstance(task, ClassifierTask)
    (batch,) = task.batches()
    evaluated, _ = next(iter(task.data["validation"]))
    for frames in (batch.x, evaluated):
        assert (frames == frames[..., :1, :1, :1]).all(), "frames stay whole"
    return batch.x[..., 0, 0, 0], evaluated[..., 0, 0, 0]


def test_roll_starts_training_sequences_at_any_frame(monkeypatch):
    steps, evaluated = batches_of_steps(monkeypatch, roll=True)
    assert torch.equal(steps, (steps[:, :1] + torch.arange(8)) % 8)
    assert set(steps[:, 0].tolist()) == set(range(8))
    assert torch.equal(evaluated, torch.arange(8.0).expand(256, 8))


def test_time_crop_stretches_parts_of_training_sequences(monkeypatch):
    """Parts have at least half of the frames, lie anywhere in the sequence, and may be all of it."""
    steps, evaluated = batches_of_steps(monkeypatch, time_crop=0.5)
    assert set(steps.diff(dim=1).unique().tolist()) == {0.0, 1.0}
    lengths = steps[:, -1] - steps[:, 0] + 1
    assert set(lengths.tolist()) <= {4.0, 5.0, 6.0, 7.0, 8.0}
    assert {0.0, 1.0, 2.0, 3.0} <= set(steps[:, 0].tolist())
    assert {4.0, 5.0, 6.0, 7.0} <= set(steps[:, -1].tolist())
    assert torch.equal(evaluated, torch.arange(8.0).expand(256, 8))


def test_part_of_a_rolled_sequence_crosses_its_end(monkeypatch):
    steps, _ = batches_of_steps(monkeypatch, time_crop=0.5, roll=True)
    assert set((steps.diff(dim=1) % 8).unique().tolist()) == {0.0, 1.0}
    assert set(steps[:, 0].tolist()) == set(steps[:, -1].tolist()) == set(range(8))
    assert (steps.diff(dim=1) < 0).any()
