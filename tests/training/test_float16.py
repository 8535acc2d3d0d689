"""What the loop does around float16: a scaler on the CPU stands for the GPU's, the precision stays float32."""

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
def scaled(monkeypatch):
    """Makes every run from here on scale its loss, from this scale on."""

    def scale(start: float) -> None:
        monkeypatch.setattr(loop_module, "make_scaler", lambda training: torch.amp.GradScaler("cpu", init_scale=start))

    return scale


@pytest.fixture
def loud(monkeypatch):
    """Losses so large that the largest scale makes their gradients overflow."""
    original = ClassifierTask.loss

    def loss(self, model, batch, state):
        value, extra, state = original(self, model, batch, state)
        return 2**10 * value, extra, state

    monkeypatch.setattr(ClassifierTask, "loss", loss)


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def skipped(folder) -> list[int]:
    return [line.train.skipped or 0 for line in Run.open(folder).metrics()]


def test_only_on_a_gpu():
    with pytest.raises(
        ValueError, match=r"precision must be float32 or bfloat16 on device cpu \(float16 requires cuda\)"
    ):
        ClassifierTraining(precision="float16")
    assert ClassifierTraining(precision="float16", device="cuda:1").precision == "float16"


@pytest.mark.parametrize("optimiser", ["adam", "ntavsgd"])
def test_a_scale_changes_nothing(optimiser, tmp_path, scaled):
    _, plain = classifier_run(tmp_path / "plain", optimiser=optimiser)
    scaled(2.0**10)  # a power of two: exact
    _, model = classifier_run(tmp_path / "scaled", optimiser=optimiser)
    assert equal(plain, model)
    assert [line.train.skipped for line in Run.open(tmp_path / "scaled").metrics()] == [0] * 4
    assert Run.open(tmp_path / "plain").metrics()[0].train.skipped is None


def test_steps_that_overflow_are_left_out_and_counted(tmp_path, scaled, loud):
    scaled(2.0**127)
    result, model = classifier_run(tmp_path / "run", epochs=30)
    counts = skipped(tmp_path / "run")
    assert counts[0] > 0
    assert counts[-1] == 0
    assert all(p.isfinite().all() for p in model.parameters())
    assert result.test.accuracy >= 0.85
    for line in Run.open(tmp_path / "run").metrics():
        assert line.train.skipped is not None
        some = line.train.skipped < line.train.steps
        assert (0 < line.train.gradient_norm_max < 1e6) == some


def test_the_scale_survives(tmp_path, scaled, loud):
    scaled(2.0**127)
    classifier_run(tmp_path / "run", epochs=1)
    (tmp_path / "run" / "result.json").unlink()
    scaled(2.0**4)  # what the checkpoint holds counts
    _, resumed = classifier_run(tmp_path / "run", epochs=4)
    scaled(2.0**127)
    _, whole = classifier_run(tmp_path / "whole", epochs=4)
    assert equal(resumed, whole)
    assert skipped(tmp_path / "run") == skipped(tmp_path / "whole")


def test_gradients_that_are_never_finite_stop_it(tmp_path, scaled, monkeypatch):
    original = ClassifierTask.loss

    def loss(self, model, batch, state):
        value, extra, state = original(self, model, batch, state)
        return value + 0 * (value - value.detach()).sqrt(), extra, state  # slope of sqrt at 0

    monkeypatch.setattr(ClassifierTask, "loss", loss)
    scaled(2.0**16)
    with pytest.raises(
        RunError, match=rf"for {EpochStatistics.patience} steps\) is nan in epoch 1, step {EpochStatistics.patience}:"
    ):
        classifier_run(tmp_path / "run", epochs=40, batch=1)
    monkeypatch.setattr(ClassifierTask, "loss", lambda *a: (original(*a)[0] * float("nan"), 0.0, None))
    with pytest.raises(RunError, match="loss is nan in epoch 1, step 1:"):
        classifier_run(tmp_path / "other")


@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    training = ClassifierTraining(precision="float16", device="cuda")
    with autocast(training):
        assert torch.get_autocast_dtype("cuda") == torch.float16
    assert loop_module.make_scaler(training).is_enabled()
