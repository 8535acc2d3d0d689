"""Loss scaling for float16, tested in float32 with a gradient scaler on the CPU."""

import pytest
import torch

from egru.training import ClassifierTraining, Run, RunError
from egru.training import loop as loop_module
from egru.training.loop import EpochStatistics
from egru.training.tasks import ClassifierTask, autocast
from tests.training.tiny import classifier_run


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def set_scale(monkeypatch):
    """Return a function that makes the following runs scale their loss, starting from a given scale."""

    def scale(start: float) -> None:
        monkeypatch.setattr(loop_module, "make_scaler", lambda training: torch.amp.GradScaler("cpu", init_scale=start))

    return scale


@pytest.fixture
def large_losses(monkeypatch):
    """Make the loss so large that gradients overflow at the largest scale."""
    original = ClassifierTask.loss

    def loss(self, model, batch, state):
        value, extra, state = original(self, model, batch, state)
        return 2**10 * value, extra, state

    monkeypatch.setattr(ClassifierTask, "loss", loss)


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def skipped(folder) -> list[int]:
    return [line.train.skipped or 0 for line in Run.open(folder).metrics()]


def test_float16_requires_cuda():
    with pytest.raises(
        ValueError, match=r"precision must be float32 or bfloat16 on device cpu \(float16 requires cuda\)"
    ):
        ClassifierTraining(precision="float16")
    assert ClassifierTraining(precision="float16", device="cuda:1").precision == "float16"


@pytest.mark.parametrize("optimiser", ["adam", "ntavsgd"])
def test_scaling_by_a_power_of_two_is_exact(optimiser, tmp_path, set_scale):
    _, plain = classifier_run(tmp_path / "plain", optimiser=optimiser)
    set_scale(2.0**10)
    _, model = classifier_run(tmp_path / "scaled", optimiser=optimiser)
    assert equal(plain, model)
    assert [line.train.skipped for line in Run.open(tmp_path / "scaled").metrics()] == [0] * 4
    assert Run.open(tmp_path / "plain").metrics()[0].train.skipped is None


def test_overflowing_steps_are_skipped_and_counted(tmp_path, set_scale, large_losses):
    set_scale(2.0**127)
    result, model = classifier_run(tmp_path / "run", epochs=30)
    counts = skipped(tmp_path / "run")
    assert counts[0] > 0
    assert min(counts) == 0  # the scale fell far enough; a later, larger gradient may overflow again
    assert all(p.isfinite().all() for p in model.parameters())
    assert result.test.accuracy >= 0.85
    for line in Run.open(tmp_path / "run").metrics():
        assert line.train.skipped is not None
        some = line.train.skipped < line.train.steps
        assert (0 < line.train.gradient_norm_max < 1e6) == some


def test_resume_restores_the_scale(tmp_path, set_scale, large_losses):
    set_scale(2.0**127)
    classifier_run(tmp_path / "run", epochs=1)
    (tmp_path / "run" / "result.json").unlink()
    set_scale(2.0**4)  # replaced by the scale of the checkpoint
    _, resumed = classifier_run(tmp_path / "run", epochs=4)
    set_scale(2.0**127)
    _, whole = classifier_run(tmp_path / "whole", epochs=4)
    assert equal(resumed, whole)
    assert skipped(tmp_path / "run") == skipped(tmp_path / "whole")


def test_repeated_overflow_stops_training(tmp_path, set_scale, monkeypatch):
    original = ClassifierTask.loss

    def loss(self, model, batch, state):
        value, extra, state = original(self, model, batch, state)
        return value + 0 * (value - value.detach()).sqrt(), extra, state  # infinite slope of sqrt at 0

    monkeypatch.setattr(ClassifierTask, "loss", loss)
    set_scale(2.0**16)
    with pytest.raises(
        RunError, match=rf"for {EpochStatistics.patience} steps\) is nan in epoch 1, step {EpochStatistics.patience}:"
    ):
        classifier_run(tmp_path / "run", epochs=40, batch=1)
    monkeypatch.setattr(ClassifierTask, "loss", lambda *a: (original(*a)[0] * float("nan"), 0.0, None))
    with pytest.raises(RunError, match="loss is nan in epoch 1, step 1:"):
        classifier_run(tmp_path / "other")


@pytest.mark.cuda
def test_float16_enables_autocast_and_scaling_on_a_gpu():
    training = ClassifierTraining(precision="float16", device="cuda")
    with autocast(training):
        assert torch.get_autocast_dtype("cuda") == torch.float16
    assert loop_module.make_scaler(training).is_enabled()
