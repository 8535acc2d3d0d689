"""What a run survives: kill -9, damaged files, a full disk, NaN."""

import contextlib
import errno
import json
import multiprocessing
import os
import random
import shutil
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
from egru.training.run import METRICS
from tests.training.tiny import classifier_run, endless, language_run


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def files(folder: Path, epoch: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights, optimiser, random generators."""
    at = Run.open(folder).checkpoint_path(epoch)
    return load((at / "weights.safetensors").read_bytes()) | load((at / "trainer.safetensors").read_bytes())


def curve(folder: Path) -> list[tuple[float, float, float]]:
    return [(line.train.loss, line.train.gradient_norm, line.validation.loss) for line in Run.open(folder).metrics()]


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_kill_at_random_moments(tmp_path):
    """Twenty-two kills or more; every time at most one epoch is lost, and in the end nothing shows."""
    folder, moments = tmp_path / "killed", random.Random(7)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["egru.training", "torch._dynamo"])  # the slow part of a start, done once
    epochs, kills = [0], 0
    while kills < 22 or len(set(epochs)) <= 8:  # a slow machine may need more
        assert kills < 80
        process = context.Process(target=endless, args=(str(folder),))
        process.start()
        # From the first moments, through some epochs: the child takes a while to get going.
        time.sleep(moments.uniform(0.05, 1.0))
        assert process.is_alive()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # killed before there was a run
            continue
        run = Run.open(folder, pytest.fail)  # no checkpoint may be damaged
        if run.saved_epochs():
            logged = max((line.epoch for line in run.metrics()), default=0)
            assert run.newest_epoch() >= max(logged - 1, epochs[-1])
            epochs.append(run.newest_epoch())
    reached = epochs[-1]
    classifier_run(folder, epochs=reached)
    classifier_run(tmp_path / "whole", epochs=reached)
    assert_same(files(folder, reached), files(tmp_path / "whole", reached))
    assert curve(folder) == curve(tmp_path / "whole")
    left = [path.name for path in folder.rglob(".*")]
    assert left == []


def test_only_our_own_leftovers_are_swept(tmp_path):
    run = Run.create(tmp_path / "run", {})
    theirs = [".git/config", ".gitignore", ".notes.2026", "checkpoints/.keep", "checkpoints/.epoch-notes.1"]
    ours = [".config.json.41", ".metrics.jsonl.41", "checkpoints/.epoch-00012.41/a"]
    ours += ["checkpoints/.epoch-00012.old.41/a"]
    for name in (*theirs, *ours):
        path = run.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    run.remove_temporary_files()
    assert [name for name in (*theirs, *ours) if (run.folder / name).exists()] == theirs
    assert not (run.folder / "checkpoints" / ".epoch-00012.41").exists()


class Stop(BaseException):
    """The machine going down, at a place of our choosing."""


@pytest.mark.parametrize("place", ["write_synced", "rename", "discard", "append_metrics"])
def test_a_stop_at_every_place_of_a_save(place, tmp_path, monkeypatch):
    """The whole of a save: stopped at its first, second, … write, each time the run goes on and ends the same."""
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
            if folder.exists() and not (folder / "config.json").exists():
                shutil.rmtree(folder)
            classifier_run(folder, epochs=4)
        except Stop:
            stops += 1
        if place == "write_synced" and stops > 5:
            monkeypatch.setattr(owner, place, original)  # a save makes more than three writes
    assert stops
    assert_same(files(folder, 4), files(tmp_path / "whole", 4))
    assert curve(folder) == curve(tmp_path / "whole")


@pytest.mark.parametrize("start", [classifier_run, language_run])
@pytest.mark.parametrize("optimiser", ["adam", "ntavsgd"])
def test_a_resumed_run_is_bit_identical(start, optimiser, tmp_path):
    changes = {"optimiser": optimiser, "patience": 1, "learning_rate": 2.0} if optimiser == "ntavsgd" else {}
    start(tmp_path / "whole", epochs=6, **changes)
    for epochs in (2, 3, 6):
        start(tmp_path / "parts", epochs=epochs, **changes)
    assert_same(files(tmp_path / "whole", 6), files(tmp_path / "parts", 6))
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    if optimiser == "ntavsgd" and start is language_run:
        assert any(name.startswith("raw.") for name in files(tmp_path / "whole", 6))


def test_settings_of_the_config_win_over_those_of_a_checkpoint(tmp_path):
    classifier_run(tmp_path / "run", epochs=2)
    classifier_run(tmp_path / "run", epochs=3, learning_rate=1e-2, betas=(0.5, 0.9), weight_decay=0.25)
    state = json.loads((Run.open(tmp_path / "run").checkpoint_path(3) / "state.json").read_text())
    first, thresholds = state["optimiser"]["groups"]
    assert (first["base_lr"], first["lr"], first["betas"], first["weight_decay"]) == (1e-2, 1e-2, [0.5, 0.9], 0.25)
    assert (thresholds["base_lr"], thresholds["weight_decay"]) == (1e-2, 0)


@pytest.mark.parametrize("changes", [{"optimiser": "ntavsgd"}, {"freeze_thresholds": True}])
def test_another_optimiser_than_the_checkpoints_is_refused(changes, tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    with pytest.raises(
        RunError, match=r"epoch 1 does not fit .*config.json: the optimiser has another type or other parameter groups"
    ):
        classifier_run(tmp_path / "run", epochs=2, **changes)


@pytest.mark.parametrize(
    ("options", "words"), [({"centre": True}, 'Missing key.*"mean"'), ({"num_layers": 2}, "layer1")]
)
def test_another_model_than_the_checkpoints_is_refused(options, words, tmp_path, monkeypatch):
    classifier_run(tmp_path / "run", epochs=1)
    monkeypatch.setattr("tests.training.tiny.reader", lambda: SequenceClassifier(1, 12, 2, **options))
    with pytest.raises(RunError, match=rf"epoch 1 does not fit .*config.json: .*{words}"):
        classifier_run(tmp_path / "run", epochs=2)


FILES = ("weights.safetensors", "trainer.safetensors", "state.json", "SHA256SUMS")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_reported_and_passed_over(name, damage, tmp_path):
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
    said = []
    classifier_run(tmp_path / "run", epochs=5, log=said.append)
    assert len(said) == 1
    assert "skipping a damaged checkpoint: epoch-00003" in said[0]
    assert_same(files(tmp_path / "run", 5), files(tmp_path / "whole", 5))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_every_single_flipped_bit_is_noticed(tmp_path):
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


def test_no_intact_checkpoint_is_said(tmp_path):
    classifier_run(tmp_path / "run", epochs=2)
    for path in tmp_path.rglob("state.json"):
        path.write_text("{}")
    said = []
    with pytest.raises(RunError, match="no intact checkpoint"):
        classifier_run(tmp_path / "run", epochs=3, log=said.append)
    assert len(said) >= 2


def test_a_damaged_best_epoch_is_reported(tmp_path):
    result, _ = classifier_run(tmp_path / "run", epochs=12, learning_rate=0.3)
    assert result.best_epoch < 11  # neither of the last two
    said = []
    run = Run.open(tmp_path / "run", said.append)
    (run.checkpoint_path(result.best_epoch) / "weights.safetensors").write_bytes(b"")
    assert run.best_epoch() == 12
    assert "the checkpoint of the best epoch is damaged" in said[0]


def test_old_checkpoints_go_and_the_best_stays(tmp_path):
    result, _ = classifier_run(tmp_path / "run", epochs=12, learning_rate=0.3)
    assert set(Run.open(tmp_path / "run").saved_epochs()) == {result.best_epoch, 11, 12}


def test_a_cut_line_of_metrics_does_not_matter(tmp_path):
    classifier_run(tmp_path / "whole", epochs=4)
    classifier_run(tmp_path / "run", epochs=3)
    with (tmp_path / "run" / METRICS).open("a") as file:
        file.write('{"epoch": 4, "tra')
    classifier_run(tmp_path / "run", epochs=4)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b"7", b'{"epoch": 2}'])
def test_a_damaged_line_of_metrics_costs_that_line_alone(damage, tmp_path):
    classifier_run(tmp_path / "whole", epochs=5)
    classifier_run(tmp_path / "run", epochs=4)
    path = tmp_path / "run" / METRICS
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, *lines[2:], b""]))
    said = []
    classifier_run(tmp_path / "run", epochs=5, log=said.append)
    assert [line for line in said if "1 of 4 lines cannot be read" in line] == said[:1]
    assert [line.epoch for line in Run.open(tmp_path / "run", pytest.fail).metrics()] == [1, 3, 4, 5]
    assert_same(files(tmp_path / "run", 5), files(tmp_path / "whole", 5))


def test_bytes_that_are_no_text_after_the_metrics_do_not_matter(tmp_path):
    classifier_run(tmp_path / "run", epochs=2)
    with (tmp_path / "run" / METRICS).open("ab") as file:
        file.write(b"\xff\xfe\x00")
    classifier_run(tmp_path / "run", epochs=3)
    assert [line.epoch for line in Run.open(tmp_path / "run", pytest.fail).metrics()] == [1, 2, 3]


def test_lost_metrics_do_not_end_a_run(tmp_path):
    classifier_run(tmp_path / "run", epochs=3)
    (tmp_path / "run" / METRICS).unlink()
    said = []
    result, _ = classifier_run(tmp_path / "run", epochs=4, log=said.append)
    assert result.best_epoch == 4
    assert ["are lost" in line for line in said] == [True]


def test_metrics_without_a_checkpoint_are_refused(tmp_path):
    classifier_run(tmp_path / "whole", epochs=3)
    classifier_run(tmp_path / "run", epochs=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / METRICS).read_bytes()
    with pytest.raises(RunError, match=r"no checkpoint; remove .*metrics.jsonl to start again"):
        classifier_run(tmp_path / "run", epochs=3)
    assert (tmp_path / "run" / METRICS).read_bytes() == before
    (tmp_path / "run" / METRICS).unlink()
    classifier_run(tmp_path / "run", epochs=3)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_full_disk_in_earnest(tmp_path):
    """A tmpfs too small for a second checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here; the next test plays a full disk instead")
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
def test_a_full_disk_at_every_write(allowed, tmp_path, monkeypatch):
    """The write itself fails with ENOSPC, after so many good ones."""
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
def test_nan_stops_and_says_where(what, every, kept, tmp_path, monkeypatch):
    from egru.training.tasks import ClassifierTask

    steps, original = 0, ClassifierTask.loss

    def loss(self, model, batch, state):
        nonlocal steps
        steps += 1
        value, extra, state = original(self, model, batch, state)
        if steps == 8 and what == "loss":  # three steps an epoch
            value = value * float("nan")
        if steps == 8 and what == "gradient":
            value = value + 0 * (value - value.detach()).sqrt()  # slope of sqrt at 0
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


def test_a_folder_that_is_taken(tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    with pytest.raises(RunError, match="already contains a run: continue it with --resume"):
        Run.create(tmp_path / "run", {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="not an empty folder"):
        Run.create(tmp_path / "other", {})
    with pytest.raises(RunError, match="not a run"):
        Run.open(tmp_path / "other")


def test_one_process_at_a_time(tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    run = Run.open(tmp_path / "run")
    with run.lock(), pytest.raises(RunError, match="another process is training"), run.lock():
        pass
    with run.lock():
        pass


def test_the_environment_is_noted(tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    noted = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert noted["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert noted["kernels"]
