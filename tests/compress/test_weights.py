"""Magnitude pruning of weights: schedule, blocks, tied weights, and masks in training, checkpoints and compilers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import egru
from egru.compress import WeightPruning, prune_weights
from egru.compress.weights import fold_masks
from egru.models import LanguageModel, SequenceClassifier
from egru.training import Paused, Run, checkpoint
from tests.training.tiny import classifier_run, language_run

ALL: Any = "all"


def density(weight):
    return (weight != 0).double().mean().item()


def test_sparsity_follows_a_cubic_schedule_and_zeros_stay():
    model = SequenceClassifier(6, 32, 5)
    pruning = WeightPruning(model, 0.9, share=0.5)
    before = torch.zeros(0, dtype=torch.bool)
    for step in range(11):
        goal = pruning.update(step / 10)
        assert goal == pytest.approx(0.9 * (1 - max(0, 1 - step / 5) ** 3))
        assert pruning.sparsity == pytest.approx(goal, abs=1e-3)
        zero = torch.cat([matrix.mask.flatten() == 0 for matrix in pruning.matrices])
        assert not step or bool(zero[before].all())
        before = zero
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))


def test_the_smallest_weights_are_removed():
    layer: Any = egru.EGRU(4, 16)
    names = ("weight_ih_l0", "weight_hh_l0")
    with torch.no_grad():
        layer.weight_hh_l0.mul_(0.01)  # magnitudes are relative to their matrix

    def magnitudes():
        return torch.cat([(getattr(layer, n).detach().abs() / means[n]).flatten() for n in names])

    means = {n: getattr(layer, n).detach().abs().mean() for n in names}
    before = magnitudes()
    prune_weights(layer, 0.7)
    after = magnitudes()
    assert before[after == 0].max() < after[after != 0].min()
    assert density(after) == pytest.approx(0.3, abs=2e-3)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_blocks_are_consecutive_outputs_of_one_gate(scope):
    model = SequenceClassifier(6, 32, 5)
    prune_weights(model, 0.6, block=16, scope=scope)
    layer: Any = model.layers[0]
    for weight in (layer.weight_ih_l0, layer.weight_hh_l0):
        kept = (weight != 0).view(3, 2, 16, -1)
        assert torch.equal(kept.all(2), kept.any(2))
        assert scope == "global" or density(weight) == pytest.approx(0.4, abs=0.02)
    assert 0 < density(model.readout.weight) < 1, "with fewer outputs than a block, pruned weight by weight"


def test_tied_weights_share_one_mask_and_stay_tied():
    model: Any = LanguageModel(32, 16, 16, num_layers=2)
    pruning = WeightPruning(model, 0.5, block=8)
    pruning.update(1.0)
    assert torch.equal(model.embedding.weight, model.readout.weight)
    kept = (model.readout.weight != 0).view(4, 8, 16)
    assert torch.equal(kept.all(1), kept.any(1))
    parameters = list(model.parameters())
    masked = model.embedding.weight.detach().clone()
    pruning.remove()
    assert model.readout.weight is model.embedding.weight
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}, "an optimiser's parameters stay valid"
    assert torch.equal(model.embedding.weight, masked)


def test_masked_weights_have_no_gradient_and_dropconnect_sees_the_mask():
    model = SequenceClassifier(3, 16, 4, dropconnect=0.3, threshold=egru.Threshold(mean=-3.0))
    WeightPruning(model, 0.8).update(1.0)
    model(torch.randn(2, 10, 3))[0].sum().backward()
    layer: Any = model.layers[0]
    original = layer.parametrizations.weight_hh_l0.original
    zero = layer.weight_hh_l0 == 0
    assert not original.grad[zero].any()
    assert original.grad[~zero].any()
    assert original[zero].abs().min() > 0, "the mask, not the parameter, is zero"


def test_a_pruned_model_stays_pruned():
    model: Any = egru.EGRU(4, 32)
    prune_weights(model, 0.6)
    zero = model.weight_hh_l0 == 0
    pruning = WeightPruning(model, 0.1)
    pruning.update(1.0)
    assert pruning.sparsity == pytest.approx(0.6, abs=0.01)
    assert not model.weight_hh_l0[zero].any()


def test_compiled_models_follow_changes_of_the_masks():
    layer = egru.EGRU(4, 16, threshold=egru.Threshold(mean=-3.0))
    pruning = WeightPruning(layer, 0.9)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 2, 4)
    for progress in (0.1, 1.0):
        pruning.update(progress)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    assert pruning.sparsity > 0.89


def test_resume_of_a_pruned_run_is_bit_identical(tmp_path):
    options = {"epochs": 4, "weight_sparsity": 0.6, "block": 4}
    for _ in range(3):
        with pytest.raises(Paused):
            classifier_run(tmp_path / "paused", minutes=1e-9, **options)
    classifier_run(tmp_path / "paused", **options)
    result, model = classifier_run(tmp_path / "whole", **options)
    one, two = (Run.open(tmp_path / name).checkpoint_path(4) / "weights.safetensors" for name in ("paused", "whole"))
    assert one.read_bytes() == two.read_bytes()
    assert result.best_epoch == 4, "epochs before the final sparsity are not chosen"
    assert not any("parametrizations" in name for name in model.state_dict())
    weights = torch.cat([p.flatten() for name, p in model.named_parameters() if "weight" in name])
    assert density(weights) == pytest.approx(0.4, abs=0.02)


def test_a_short_run_prunes_within_its_epochs(tmp_path, monkeypatch):
    goals: list[float] = []
    update = WeightPruning.update
    monkeypatch.setattr(WeightPruning, "update", lambda self, progress: goals.append(update(self, progress)))
    classifier_run(tmp_path / "run", epochs=1, batch=2, weight_sparsity=0.6)
    assert goals == sorted(goals)
    assert len(set(goals)) > 5
    assert goals[0] == 0
    assert goals[-1] == 0.6


def test_weights_of_a_pruned_run_fit_a_model_without_masks(tmp_path):
    _, model = language_run(tmp_path / "run", weight_sparsity=0.5, optimiser="ntavsgd", learning_rate=0.5)
    run = Run.open(tmp_path / "run")
    weights = checkpoint.read_weights(run.checkpoint_path(run.best_epoch()))
    other: Any = LanguageModel(7, 12, 16, num_layers=2)
    checkpoint.set_weights(other, weights)
    assert torch.equal(other.readout.weight, model.readout.weight)
    assert density(other.layers[0].weight_hh_l0) < 0.7


def test_fold_masks_leaves_other_parametrisations_alone():
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    assert set(fold_masks(linear.state_dict())) == set(linear.state_dict())


def masked():
    layer = egru.EGRU(2, 8)
    WeightPruning(layer, 0.5)
    return layer


def uneven() -> nn.Module:
    """Return a model whose readout has equal weights, relative to the mean smaller than half of the others."""
    model = SequenceClassifier(4, 16, 2)
    with torch.no_grad():
        nn.init.ones_(model.readout.weight)
        for name in ("weight_ih_l0", "weight_hh_l0"):
            model.layers[0].get_parameter(name).fill_(1.0)[::2] = 1e-3
    return model


def changed(value: float) -> nn.Module:
    layer: Any = egru.EGRU(4, 16)
    with torch.no_grad():
        layer.weight_hh_l0[0].fill_(value) if value else layer.weight_hh_l0.zero_()
    return layer


def with_hook() -> nn.Module:
    model = nn.ModuleDict({"rnn": egru.EGRU(4, 8), "readout": nn.Linear(8, 2)})
    prune.l1_unstructured(model["readout"], "weight", 0.5)
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: WeightPruning(egru.EGRU(2, 8), 1.0), r"sparsity must be in \[0, 1\), got 1.0"),
        (lambda: WeightPruning(egru.EGRU(2, 8), -0.1), r"sparsity must be in \[0, 1\), got -0.1"),
        (lambda: WeightPruning(egru.EGRU(2, 8), float("nan")), "sparsity must be in"),
        (lambda: WeightPruning(egru.EGRU(2, 20), 0.5, block=8), "20 units of egru, got 8; change them to 16 or 24"),
        (lambda: WeightPruning(egru.EGRU(2, 8), 0.5, block=0), "block must be at least 1, got 0"),
        (lambda: WeightPruning(LanguageModel(20, 16, 16), 0.5, block=16), "divide the 20 outputs of readout, got 16"),
        (lambda: WeightPruning(masked(), 0.5), ": egru.weight_ih_l0 must not be parametrised; remove its"),
        (lambda: WeightPruning(uneven(), 0.6), "all matrices removes all weights of readout"),
        (lambda: WeightPruning(nn.Linear(2, 8), 0.5), "the model must have an event layer, got Linear"),
        (lambda: prune_weights(uneven(), 0.6), "all matrices removes all weights of readout"),
        (lambda: prune_weights(changed(float("nan")), 0.2), "weight_hh_l0 contains NaN or infinity"),
        (lambda: prune_weights(changed(0.0), 0.2), "weight_hh_l0 are zero and would stay zero"),
        (lambda: prune_weights(with_hook(), 0.5), r"readout\.weight is not a parameter but computed by a hook"),
        (lambda: prune_weights(nn.ModuleList([egru.EGRU(2, 8), nn.LazyLinear(3)]), 0.5), "1.weight is not initialised"),
        (lambda: WeightPruning(egru.EGRU(2, 8), 0.5).update(-0.1), "progress must be at least 0, got -0.1"),
        (lambda: WeightPruning(egru.EGRU(2, 8), 0.5).update(float("nan")), "progress must be at least 0, got nan"),
        (lambda: WeightPruning(egru.EGRU(2, 8), 0.5, scope=ALL), "scope must be 'global' or 'layer', got 'all'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("options", [{"sparsity": "0.5"}, {"block": 8.0}, {"block": None}, {"share": "x"}])
def test_types_of_arguments_are_checked(options: Any) -> None:
    layer = egru.EGRU(2, 8)
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be a number"):
        WeightPruning(layer, **{"sparsity": 0.5, **options})
    assert not hasattr(layer, "parametrizations")


@pytest.mark.parametrize("prune", [prune_weights, WeightPruning])
@pytest.mark.parametrize("make", [lambda: uneven(), lambda: changed(float("nan")), lambda: with_hook()])
def test_model_does_not_change_if_pruning_fails(make, prune) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="WeightPruning"):
        prune(model, 0.6)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].nan_to_num(7), before[name].nan_to_num(7)) for name in before)


def test_number_of_updates_does_not_change_what_is_pruned() -> None:
    masks = []
    for updates in (1, 10, 60):
        torch.manual_seed(0)
        model = SequenceClassifier(30, 64, 40)
        with torch.no_grad():
            model.readout.weight.pow_(3)  # another distribution than that of the layer
        pruning = WeightPruning(model, 0.9)
        for i in range(updates + 1):
            pruning.update(i / updates)
        masks.append([matrix.mask for matrix in pruning.matrices])
    for others in masks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(masks[0], others, strict=True))


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_blocks_of_a_network_pruned_weight_by_weight_count_their_zeros(scope) -> None:
    layer = egru.EGRU(64, 64)
    prune_weights(layer, 0.5)
    pruning = WeightPruning(layer, 0.8, block=16, scope=scope)
    pruning.update(0.1)
    assert pruning.sparsity == pytest.approx(0.5, abs=1e-3)
    assert 0.79 < pruning.update(1.0) <= 0.8
    assert 0.79 < pruning.sparsity <= 0.8


def test_sparsity_is_rounded_down_to_whole_blocks() -> None:
    layer = egru.EGRU(2, 16)
    prune_weights(layer, 0.9, block=16, scope="layer")
    assert density(layer.weight_ih_l0) == pytest.approx(1 / 6)
    half: Any = egru.EGRU(8, 16).half()
    with torch.no_grad():
        half.weight_ih_l0.mul_(10_000)  # their sum overflows in float16
    prune_weights(half, 0.5)
    assert density(half.weight_ih_l0) == pytest.approx(0.5, abs=0.1)


def test_copies_of_a_masked_model_survive_removal() -> None:
    model, x = SequenceClassifier(4, 16, 5), torch.randn(2, 4, 4)
    pruning = WeightPruning(model, 0.8)
    pruning.update(1.0)
    best, expected = copy.deepcopy(model), model(x)[0]
    pruning.remove()
    assert torch.equal(best(x)[0], expected)
    assert torch.equal(model(x)[0], expected)
    assert type(model.layers[0]) is egru.EGRU
    for call in (pruning.remove, lambda: pruning.update(1.0), lambda: pruning.sparsity):
        with pytest.raises(RuntimeError, match="the masks were removed"):
            call()


def test_masked_layers_convert_to_dense_ones_and_refuse_to_lose_units() -> None:
    model = SequenceClassifier(8, 32, 5)
    with egru.ActivityMonitor(model) as monitor:
        model(torch.randn(2, 6, 8))
    summary = monitor.summary()
    pruning = WeightPruning(model, 0.5)
    pruning.update(1.0)
    layer: Any = model.layers[0]
    for call in (lambda: layer.select(torch.arange(4)), lambda: egru.compress.prune(model, summary, 0.3)):
        with pytest.raises(ValueError, match=r"parametrised.*WeightPruning\.remove\(\) removes masks"):
            call()
    assert torch.equal(layer.to_gru().weight_hh_l0, layer.weight_hh_l0)
    pruning.remove()
    assert egru.compress.prune(model, summary, 0.25).layers[0].hidden_size == 24
