import json
import math
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import egru
from egru.activity.counts import EventCounts
from egru.models import SequenceClassifier
from egru.training import (
    ClassifierTask,
    ClassifierTraining,
    LanguageTask,
    LanguageTraining,
    NoProgress,
    Paused,
    Run,
    from_plain,
    to_plain,
    train,
)
from egru.training import loop as loop_module
from egru.training import statistics as statistics_module
from tests.training.tiny import classifier_run, language_run, make_classifier, make_language_model, sequences, text


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def test_classifier_learns(tmp_path):
    result, _ = classifier_run(tmp_path / "run", epochs=25)
    assert result.test.accuracy >= 0.85
    lines = Run.open(tmp_path / "run").metrics()
    assert [line.epoch for line in lines] == list(range(1, 26))
    assert lines[-1].train.loss < 0.6 * lines[0].train.loss
    for line in lines:
        assert line.train.gradient_norm_max >= line.train.gradient_norm > 0
        assert 0 < line.activity.activity_sparsity < 1
        assert line.activity.backward_sparsity is not None
        assert 0 < line.activity.backward_sparsity < 1
        assert line.activity.forward_macs > 0
    best = max(lines, key=lambda line: (line.validation.accuracy, -line.validation.loss))
    assert result.best_epoch == best.epoch


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "ntavsgd"])
def test_language_model_learns(optimiser, tmp_path):
    rate = {"learning_rate": 10.0, "patience": 1} if optimiser == "ntavsgd" else {}
    result, _ = language_run(tmp_path / "run", epochs=10, optimiser=optimiser, clip=0.5, **rate)
    assert result.test.perplexity is not None
    assert result.test.perplexity < 4  # the lowest possible is 2, with 7 words
    assert result.test.perplexity == pytest.approx(math.exp(result.test.loss))


def test_test_split_is_evaluated_once_and_last(tmp_path, monkeypatch):
    splits = []
    score = loop_module.score
    monkeypatch.setattr(loop_module, "score", lambda m, t, split: (splits.append(split), score(m, t, split))[1])
    classifier_run(tmp_path / "run", epochs=3)
    assert splits == ["validation"] * 3 + ["test"]


def test_result_is_that_of_the_best_epoch(tmp_path):
    result, model = classifier_run(tmp_path / "run", epochs=6, learning_rate=0.3)
    training = ClassifierTraining()
    line = Run.open(tmp_path / "run").metrics()[result.best_epoch - 1]
    scores = ClassifierTask(sequences(), training).evaluate(model, "validation")
    assert scores.loss == pytest.approx(line.validation.loss)
    assert scores.accuracy == line.validation.accuracy


def test_metrics_have_the_sparsity_of_each_layer(tmp_path):
    result, _ = language_run(tmp_path / "run", epochs=2)
    run = Run.open(tmp_path / "run")
    for line in run.metrics():
        assert list(line.layers) == ["layer0", "layer1"]
        for name in ("activity_sparsity", "backward_sparsity", "backward_skippable"):
            values = [getattr(layer, name) for layer in line.layers.values()]
            units = [16, 12]
            mean = sum(v * n for v, n in zip(values, units, strict=True)) / sum(units)
            assert getattr(line.activity, name) == pytest.approx(mean)
            assert name != "activity_sparsity" or values[0] != values[1]
        assert line.training_layers is not None
        assert line.training_activity is not None
        assert list(line.training_layers) == ["layer0", "layer1"]
        assert 0 < line.training_activity.activity_sparsity < 1
        assert line.training_activity.activity_sparsity != line.activity.activity_sparsity
        assert line.elapsed is not None
        assert line.elapsed >= line.seconds
    assert run.result() == result
    assert result.activity.forward_macs > 0
    assert result.activity.linears[0].name == "readout"


def test_activity_is_measured_in_one_step_per_epoch(tmp_path, monkeypatch):
    seen, count = [], EventCounts.__call__
    monkeypatch.setattr(
        EventCounts,
        "__call__",
        lambda self, record: seen.append(record.c.requires_grad) or count(self, record),
    )
    monkeypatch.setattr(loop_module, "score", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        language_run(tmp_path / "run")
    assert len(seen) == 2  # two layers, one step


def test_activity_is_not_measured_in_an_epoch_with_one_step(tmp_path):
    classifier_run(tmp_path / "run", epochs=1, batch=48)
    (line,) = Run.open(tmp_path / "run").metrics()
    assert line.train.steps == 1
    assert line.training_activity is line.training_layers is None


def test_resume_after_a_time_limit_is_bit_identical(tmp_path):
    folder = tmp_path / "paused"
    for epoch in (1, 2):  # saved at the end of the epoch in spite of save_every
        with pytest.raises(
            Paused, match=f"time limit was reached; epoch {epoch} of 3 is saved: continue with --resume .*paused"
        ):
            classifier_run(folder, epochs=3, save_every=3, minutes=1e-9)
        assert Run.open(folder).newest_epoch() == epoch
        assert Run.open(folder).result() is None
    classifier_run(folder, epochs=3, save_every=3, minutes=1e-9)  # the limit does not apply to the last epoch
    classifier_run(tmp_path / "whole", epochs=3, save_every=3)
    one, two = (Run.open(tmp_path / name) for name in ("paused", "whole"))
    weights = [(run.checkpoint_path(3) / "weights.safetensors").read_bytes() for run in (one, two)]
    assert weights[0] == weights[1]
    assert one.result() is not None
    with pytest.raises(ValueError, match="minutes must be positive"):
        classifier_run(tmp_path / "never", minutes=0)


def test_save_every_sets_the_epochs_with_a_checkpoint(tmp_path, monkeypatch):
    saved = []
    save = Run.save
    monkeypatch.setattr(Run, "save", lambda run, epoch, *rest: (saved.append(epoch), save(run, epoch, *rest))[1])
    result, _ = classifier_run(tmp_path / "run", epochs=8, save_every=3)
    assert saved == [0, 3, 6, 8]
    merit = {line.epoch: -line.validation.loss for line in Run.open(tmp_path / "run").metrics()}
    assert len(merit) == 8
    assert result.best_epoch in saved[1:]


def test_regularisers_increase_activity_sparsity(tmp_path):
    plain, _ = classifier_run(tmp_path / "plain", epochs=10)
    pressed, _ = classifier_run(tmp_path / "pressed", epochs=10, rate_loss=3.0, state_loss=3.0)
    assert pressed.activity.activity_sparsity > plain.activity.activity_sparsity + 0.1


def test_frozen_thresholds_do_not_change(tmp_path):
    torch.manual_seed(0)
    start = make_classifier().layers[0].get_parameter("threshold_l0").detach().clone()
    _, frozen = classifier_run(tmp_path / "frozen", epochs=2, freeze_thresholds=True)
    _, free = classifier_run(tmp_path / "free", epochs=2)
    assert torch.equal(frozen.layers[0].get_parameter("threshold_l0"), start)
    assert not torch.equal(free.layers[0].get_parameter("threshold_l0"), start)


def test_bfloat16_keeps_float32_parameters(tmp_path):
    result, model = classifier_run(tmp_path / "run", epochs=2, precision="bfloat16")
    exact, _ = classifier_run(tmp_path / "exact", epochs=2)
    assert result.test.loss == pytest.approx(exact.test.loss, rel=0.1)
    assert result.test.loss != exact.test.loss
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_evaluation_in_segments_carries_the_state(monkeypatch):
    """The loss of a text read in segments equals the loss of the text read at once."""
    monkeypatch.setattr("egru.training.tasks._EVALUATION_WORDS", {"cpu": 0})
    training = LanguageTraining(evaluation_batch=4, bptt=7)
    task, model = LanguageTask(text(), training), make_language_model()
    columns = task.data["validation"]
    with torch.no_grad():
        logits, state = model.eval()(columns[:-1])
    assert all(bool((layer.c != 0).any()) for layer in state)
    whole = F.cross_entropy(logits.flatten(0, 1), columns[1:].flatten()).item()
    assert task.evaluate(model, "validation").loss == pytest.approx(whole, rel=1e-6)


def test_test_split_has_one_column():
    task = LanguageTask(text(), LanguageTraining(evaluation_batch=4))
    assert [task.data[split].shape[1] for split in ("validation", "test")] == [4, 1]


def test_training_carries_a_detached_state():
    training = LanguageTraining(batch=8, evaluation_batch=4, bptt=20)
    task, model = LanguageTask(text(), training), make_language_model()
    batches = task.batches()
    _, _, state = task.loss(model, next(batches), None)
    for layer in state:
        assert isinstance(layer, egru.EventState)
        assert not layer.c.requires_grad
        assert bool((layer.c != 0).any())
        assert bool((layer.y != 0).any())
    batch = next(batches)
    carried, fresh = (task.loss(model, batch, s)[0].item() for s in (state, None))
    assert carried != fresh


def test_learning_rate_is_scaled_with_the_segment_length():
    task = LanguageTask(text(), LanguageTraining(batch=2, evaluation_batch=4, bptt=30))
    batches = list(task.batches())
    lengths = [len(b.x) for b in batches[:-1]]
    assert len(set(lengths)) > 2
    assert [b.rate_factor for b in batches[:-1]] == pytest.approx([n / 30 for n in lengths])
    assert all(torch.equal(b.x[1:], b.y[:-1]) for b in batches)
    assert torch.cat([b.y for b in batches]).equal(task.data["train"][1:])
    fixed = list(LanguageTask(text(), LanguageTraining(batch=2, bptt=30, vary_bptt=False)).batches())
    assert {len(b.x) for b in fixed[:-1]} == {30}
    assert {b.rate_factor for b in fixed} == {1.0}


def test_activity_and_temporal_decay_of_dense_baselines():
    plain, decayed = (
        LanguageTask(text(), LanguageTraining(batch=8, activity_decay=a, temporal_decay=t, vary_bptt=False))
        for a, t in ((0.0, 0.0), (2.0, 3.0))
    )
    model = make_language_model("gru").eval()
    batch = next(plain.batches())
    assert plain.loss(model, batch, None)[1].item() == 0
    output, _, _ = model.features(batch.x)
    expected = 2 * (output**2).mean() + 3 * ((output[1:] - output[:-1]) ** 2).mean()
    assert decayed.loss(model, batch, None)[1].item() == pytest.approx(expected.item())


def test_scores_per_step_are_trained_separately_and_evaluated_by_their_mean_probability():
    class EveryStep(nn.Module):
        def forward(self, x):
            return torch.cat([4 * x, x * x + 1], -1), None

    task = ClassifierTask(sequences(), ClassifierTraining(batch=16, label_smoothing=0.1))
    x, y = (part.double() for part in sequences().test)
    p = EveryStep()(x)[0].softmax(-1)
    mean = p.mean(1)
    assert (mean.argmax(-1) != p.log().mean(1).argmax(-1)).any(), "not the mean of the scores"
    scores = task.evaluate(EveryStep(), "test")
    assert scores.accuracy == pytest.approx((mean.argmax(-1) == y).double().mean().item())
    assert scores.loss == pytest.approx(-mean.log().gather(1, y.long()[:, None]).mean().item(), rel=1e-6)
    batch = next(task.batches())
    log_p = EveryStep()(batch.x)[0].double().log_softmax(-1)
    target = 0.9 * F.one_hot(batch.y, 2) + 0.05
    expected = -(log_p * target[:, None]).sum(-1).mean().item()
    assert task.loss(EveryStep(), batch, None)[0].item() == pytest.approx(expected, rel=1e-6)


def test_classifier_with_scores_per_step_learns(tmp_path):
    training = ClassifierTraining(epochs=25, batch=16, learning_rate=4e-2, clip=1.0)
    torch.manual_seed(0)
    events = {"threshold": egru.Threshold(mean=-3.0), "surrogate": egru.Surrogate(width=0.3)}
    model = SequenceClassifier(1, 12, 2, readout="every", **events)
    run = Run.create(tmp_path / "run", {})
    result = train(model, ClassifierTask(sequences(), training), training, run, NoProgress())
    assert result.test.accuracy >= 0.85


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", ["classifier", "language"])
@pytest.mark.parametrize(
    ("optimiser", "precision"), [("adam", "bfloat16"), ("adam", "float16"), ("ntavsgd", "float32")]
)
def test_training_steps_do_not_synchronise_with_the_gpu(kind, optimiser, precision):
    """After the first step, torch raises an error for every call that makes the host wait for the device."""
    common: Any = {"batch": 8, "device": "cuda", "precision": precision, "clip": 1.0, "optimiser": optimiser}
    if kind == "classifier":
        training, model = ClassifierTraining(**common, rate_loss=0.1), make_classifier().cuda()
        task: Any = ClassifierTask(sequences(), training)
    else:
        training, model = LanguageTraining(**common, evaluation_batch=4, bptt=10), make_language_model().cuda()
        task = LanguageTask(text(), training)
    taken, batches = [], task.batches
    run: Any = types.SimpleNamespace(
        remove_temporary_files=int, require_no_metrics=int, saved_epochs=list, metrics=list, save=lambda *_: None
    )  # a run that stores nothing

    class Done(Exception):
        pass

    def watched():
        for i, batch in enumerate(batches()):
            torch.cuda.set_sync_debug_mode("error" if i else "default")
            if i == 4:
                raise Done
            taken.append(i)
            yield batch

    task.batches = watched
    try:
        with pytest.raises(Done):
            train(model, task, training, run, NoProgress())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken == [0, 1, 2, 3]


def test_settings_round_trip_through_json():
    training = LanguageTraining(betas=(0.0, 0.9), clip=0.25, optimiser="adamw")
    assert from_plain(LanguageTraining, json.loads(json.dumps(to_plain(training)))) == training
    with pytest.raises(ValueError, match="unknown field 'speed'"):
        from_plain(LanguageTraining, {"speed": 1})


def test_metrics_have_the_growth_of_gradients_unless_diagnose_is_off(tmp_path):
    _, model = classifier_run(tmp_path / "run", epochs=3)
    _, other = classifier_run(tmp_path / "other", epochs=3, diagnose=False)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for line in Run.open(tmp_path / "run").metrics():
        (layer,) = line.stability
        assert layer.layer == "layer0"
        assert 0 <= layer.diagonal_above_one <= 1
        assert layer.adjoint_growth is not None
        assert -5 < layer.adjoint_growth < 1
        assert line.train.gradient_norm_p99 is not None
        assert line.train.gradient_norm <= line.train.gradient_norm_p99 <= line.train.gradient_norm_max
    assert all(line.stability == () for line in Run.open(tmp_path / "other").metrics())
    language_run(tmp_path / "text", epochs=1)
    assert [layer.layer for layer in Run.open(tmp_path / "text").metrics()[0].stability] == ["layer0", "layer1"]


def test_exploding_gradients_are_reported_once_with_advice(tmp_path, monkeypatch):
    Stability = egru.activity.Stability
    bad = [Stability("layer0", 784, 0.25, -0.05, 70.6), Stability("layer1", 784, 0.0, math.inf, math.inf)]
    messages = []
    monkeypatch.setattr(loop_module, "measure_stability", lambda *_: bad[:1])
    classifier_run(tmp_path / "run", epochs=3, log=messages.append)
    (warning,) = messages
    assert "gradients explode in epoch 1" in warning
    assert "In layer0 a gradient grows e^70.6-fold on its way back through time; 25.0 %" in warning
    assert "surrogate.height 0.3" in warning
    monkeypatch.setattr(loop_module, "measure_stability", lambda *_: bad)
    classifier_run(tmp_path / "infinite", epochs=1, log=messages.append)
    assert "In layer1 a gradient grows beyond float32" in messages[1]
    assert Run.open(tmp_path / "infinite").metrics()[0].stability[1].adjoint_growth is None


def test_large_gradient_norms_are_reported_as_an_explosion(tmp_path, monkeypatch):
    messages = []
    classifier_run(tmp_path / "run", epochs=2, log=messages.append)
    assert not messages
    monkeypatch.setattr(statistics_module, "EXPLODED", 1e-3)
    classifier_run(tmp_path / "other", epochs=2, log=messages.append)
    assert len(messages) == 1
    classifier_run(tmp_path / "unseen", epochs=2, log=messages.append, diagnose=False)
    assert messages[1].endswith("Try a smaller clip or a lower learning rate")
    assert len(messages) == 2
