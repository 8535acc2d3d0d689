"""Recovery of runs after SIGKILL, damaged files, a full disk and NaN."""

import contextlib
import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from egru import files as files_module
from egru.models import SequenceClassifier
from egru.training import DamagedCheckpointError, Run, RunError, checkpoint
from tests.training.tiny import classifier_run, endless, language_run


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def files(folder: Path, epoch: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint: weights, optimiser and random generators."""
    at = Run.open(folder).checkpoint_path(epoch)
    return load((at / "weights.safetensors").read_bytes()) | load((at / "trainer.safetensors").read_bytes())


def curve(folder: Path) -> list[tuple[float, float, float]]:
    return [(line.train.loss, line.train.gradient_norm, line.validation.loss) for line in Run.open(folder).metrics()]


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_resume_after_kills_at_random_times_is_bit_identical(tmp_path):
    """Each of at least 22 kills loses at most one epoch, and the result equals that of an uninterrupted run."""
    folder, moments = tmp_path / "killed", random.Random(7)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["egru.training", "torch._dynamo"])  # these imports are slow
    epochs, kills, longest = [0], 0, 1.0
    while kills < 22 or len(set(epochs)) <= 8:
        process = context.Process(target=endless, args=(str(folder),))
        process.start()
        # From the start of the process, which takes a while, to a few epochs later.
        time.sleep(moments.uniform(0.05, longest))
        assert process.is_alive()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        longest *= 1.2  # until an epoch is reached, which takes longer on a busy machine
        if not (folder / "config.json").exists():
            continue  # killed before the run was created; the next process creates it
        run = Run.open(folder, pytest.fail)  # no checkpoint may be damaged
        if run.saved_epochs():
            logged = max((line.epoch for line in run.metrics()), default=0)
            assert run.newest_epoch() >= max(logged - 1, epochs[-1])
            if run.newest_epoch() > epochs[-1]:
                longest = 1.0
            epochs.append(run.newest_epoch())
    reached = epochs[-1]
    classifier_run(folder, epochs=reached)
    classifier_run(tmp_path / "whole", epochs=reached)
    assert_same(files(folder, reached), files(tmp_path / "whole", reached))
    assert curve(folder) == curve(tmp_path / "whole")
    left = [path.name for path in folder.rglob(".*")]
    assert left == []


class Stop(BaseException):
    """Simulates a crash at a chosen place."""


@pytest.mark.parametrize("place", ["write_synced", "rename", "discard", "append_metrics"])
def test_resume_after_a_crash_in_a_save_is_bit_identical(place, tmp_path, monkeypatch):
    """Every third call of one function crashes, until the run is finished."""
    classifier_run(tmp_path / "whole", epochs=4)
    folder = tmp_path / "run"
    owner = {"write_synced": files_module, "rename": Path, "append_metrics": Run}.get(place, checkpoint)
    original, calls = getattr(owner, place), 0

    def stop_at_third(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise Stop
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, place, stop_at_third)
    stops = 0
    while not (folder / "result.json").exists():
        assert stops < 30
        try:
            classifier_run(folder, epochs=4)
        except Stop:
            stops += 1
        if place == "write_synced" and stops > 5:
            monkeypatch.setattr(owner, place, original)  # a save writes more than three files, so none would succeed
    assert stops
    assert_same(files(folder, 4), files(tmp_path / "whole", 4))
    assert curve(folder) == curve(tmp_path / "whole")


@pytest.mark.parametrize("start", [classifier_run, language_run])
@pytest.mark.parametrize("optimiser", ["adam", "ntavsgd"])
def test_resume_is_bit_identical(start, optimiser, tmp_path):
    changes = {"optimiser": optimiser, "patience": 1, "learning_rate": 2.0} if optimiser == "ntavsgd" else {}
    start(tmp_path / "whole", epochs=6, **changes)
    for epochs in (2, 3, 6):
        start(tmp_path / "parts", epochs=epochs, **changes)
    assert_same(files(tmp_path / "whole", 6), files(tmp_path / "parts", 6))
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    if optimiser == "ntavsgd" and start is language_run:
        assert any(name.startswith("raw.") for name in files(tmp_path / "whole", 6))


def test_resume_uses_the_settings_of_the_config(tmp_path):
    classifier_run(tmp_path / "run", epochs=2)
    classifier_run(tmp_path / "run", epochs=3, learning_rate=1e-2, betas=(0.5, 0.9), weight_decay=0.25)
    state = json.loads((Run.open(tmp_path / "run").checkpoint_path(3) / "state.json").read_text())
    first, thresholds = state["optimiser"]["groups"]
    assert (first["base_lr"], first["lr"], first["betas"], first["weight_decay"]) == (1e-2, 1e-2, [0.5, 0.9], 0.25)
    assert (thresholds["base_lr"], thresholds["weight_decay"]) == (1e-2, 0)


@pytest.mark.parametrize("changes", [{"optimiser": "ntavsgd"}, {"freeze_thresholds": True}])
def test_resume_with_another_optimiser_is_refused(changes, tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    with pytest.raises(
        RunError, match=r"epoch 1 does not fit .*config.json: the optimiser has another type or other parameter groups"
    ):
        classifier_run(tmp_path / "run", epochs=2, **changes)


@pytest.mark.parametrize(
    ("options", "words"), [({"centre": True}, 'Missing key.*"mean"'), ({"num_layers": 2}, "layer1")]
)
def test_resume_with_another_model_is_refused(options, words, tmp_path, monkeypatch):
    classifier_run(tmp_path / "run", epochs=1)
    monkeypatch.setattr("tests.training.tiny.make_classifier", lambda: SequenceClassifier(1, 12, 2, **options))
    with pytest.raises(RunError, match=rf"epoch 1 does not fit .*config.json: .*{words}"):
        classifier_run(tmp_path / "run", epochs=2)


FILES = ("weights.safetensors", "trainer.safetensors", "state.json", "SHA256SUMS")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damaged_checkpoint_is_logged_and_skipped(name, damage, tmp_path):
    classifier_run(tmp_path / "whole", epochs=5)
    classifier_run(tmp_path / "run", epochs=3)
    path = Run.open(tmp_path / "run").checkpoint_path(3) / name
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "gone":
        path.unlink()
    else:
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    messages = []
    classifier_run(tmp_path / "run", epochs=5, log=messages.append)
    assert len(messages) == 1
    assert "skipping a damaged checkpoint: epoch-00003" in messages[0]
    assert_same(files(tmp_path / "run", 5), files(tmp_path / "whole", 5))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_flipped_bits_are_detected(tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    at = Run.open(tmp_path / "run").checkpoint_path(1)
    bits = random.Random(3)
    for name in FILES:
        path = at / name
        good = path.read_bytes()
        for _ in range(60):
            bad = bytearray(good)
            bad[bits.randrange(len(bad))] ^= 1 << bits.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(DamagedCheckpointError):
                checkpoint.verify(at)
        path.write_bytes(good)
    checkpoint.verify(at)


def test_run_without_an_intact_checkpoint_is_refused(tmp_path):
    classifier_run(tmp_path / "run", epochs=2)
    for path in tmp_path.rglob("state.json"):
        path.write_text("{}")
    messages = []
    with pytest.raises(RunError, match="no intact checkpoint"):
        classifier_run(tmp_path / "run", epochs=3, log=messages.append)
    assert len(messages) >= 2


def test_damaged_best_epoch_is_logged_and_replaced_by_the_newest(tmp_path):
    result, _ = classifier_run(tmp_path / "run", epochs=12, learning_rate=0.3)
    assert result.best_epoch < 11  # not one of the last two
    messages = []
    run = Run.open(tmp_path / "run", messages.append)
    (run.checkpoint_path(result.best_epoch) / "weights.safetensors").write_bytes(b"")
    assert run.best_epoch() == 12
    assert "the checkpoint of the best epoch is damaged" in messages[0]


def test_only_the_last_two_and_the_best_checkpoint_are_kept(tmp_path):
    result, _ = classifier_run(tmp_path / "run", epochs=12, learning_rate=0.3)
    assert set(Run.open(tmp_path / "run").saved_epochs()) == {result.best_epoch, 11, 12}


def test_full_disk_keeps_the_last_checkpoint_intact(tmp_path):
    """Uses a tmpfs that is too small for a second checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here; the next test simulates a full disk")
    try:
        classifier_run(disk / "run", epochs=2)
        good = files(disk / "run", 2)
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with pytest.raises(RunError, match=r"No space left on device.*epoch 2 is intact"):
            classifier_run(disk / "run", epochs=4)
        assert Run.open(disk / "run", pytest.fail).newest_epoch() == 2
        assert_same(files(disk / "run", 2), good)
        ballast.unlink()
        classifier_run(disk / "run", epochs=4)
        classifier_run(tmp_path / "whole", epochs=4)
        assert_same(files(disk / "run", 4), files(tmp_path / "whole", 4))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("allowed", range(6))
def test_failed_write_keeps_the_last_checkpoint_intact(allowed, tmp_path, monkeypatch):
    """Writing fails with ENOSPC after ``allowed`` successful writes."""
    classifier_run(tmp_path / "run", epochs=2)
    good, left, original = files(tmp_path / "run", 2), allowed, os.fsync

    def fsync(handle):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(RunError, match=r"No space left on device.*epoch 2 is intact"):
            classifier_run(tmp_path / "run", epochs=4)
    assert Run.open(tmp_path / "run", pytest.fail).newest_epoch() == 2
    assert_same(files(tmp_path / "run", 2), good)
    classifier_run(tmp_path / "run", epochs=4)
    classifier_run(tmp_path / "whole", epochs=4)
    assert_same(files(tmp_path / "run", 4), files(tmp_path / "whole", 4))


@pytest.mark.parametrize(("what", "every", "kept"), [("loss", 1, 2), ("gradient", 1, 2), ("loss", 5, 0)])
def test_nan_stops_training_and_names_the_step(what, every, kept, tmp_path, monkeypatch):
    from egru.training.tasks import ClassifierTask

    steps, original = 0, ClassifierTask.loss

    def loss(self, model, batch, state):
        nonlocal steps
        steps += 1
        value, extra, state = original(self, model, batch, state)
        if steps == 8 and what == "loss":  # three steps per epoch
            value = value * float("nan")
        if steps == 8 and what == "gradient":
            value = value + 0 * (value - value.detach()).sqrt()  # infinite slope of sqrt at 0
        return value, extra, state

    monkeypatch.setattr(ClassifierTask, "loss", loss)
    name = "loss" if what == "loss" else "gradient norm"
    with pytest.raises(RunError, match=rf"{name} is nan in epoch 3, step 2: .*epoch {kept} is the last good state"):
        classifier_run(tmp_path / "run", epochs=5, save_every=every)
    assert Run.open(tmp_path / "run", pytest.fail).newest_epoch() == kept
    assert all(x.isfinite().all() for x in files(tmp_path / "run", kept).values() if x.is_floating_point())
    monkeypatch.undo()
    classifier_run(tmp_path / "run", epochs=5)
    classifier_run(tmp_path / "whole", epochs=5)
    assert_same(files(tmp_path / "run", 5), files(tmp_path / "whole", 5))


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    import pickle

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was loaded")

    classifier_run(tmp_path / "run", epochs=1)
    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    classifier_run(tmp_path / "run", epochs=2)
    assert {p.suffix for p in tmp_path.rglob("*") if p.is_file()} == {".safetensors", ".json", ".jsonl", ""}
