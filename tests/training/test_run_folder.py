"""The folder of a run: creation, locking, and the environment that is stored in it."""

import errno
import json
import os

import pytest
import torch

from egru import files as files_module
from egru.training import Run, RunError
from tests.training.tiny import classifier_run


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


class Stop(BaseException):
    """Simulates a crash at a chosen place."""


def test_only_temporary_files_of_the_run_are_removed(tmp_path):
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


def test_folders_that_are_not_empty_are_refused(tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    with pytest.raises(RunError, match="already contains a run: continue it with --resume"):
        Run.create(tmp_path / "run", {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="not an empty folder"):
        Run.create(tmp_path / "other", {})
    with pytest.raises(RunError, match="not a run"):
        Run.open(tmp_path / "other")


@pytest.mark.parametrize("place", ["environment.json", "config.json"])
@pytest.mark.parametrize("existed", [False, True])
def test_interrupted_creation_can_be_repeated(place, existed, tmp_path, monkeypatch):
    """A kill while a file of a new run is written leaves its temporary file."""
    folder, original = tmp_path / "run", files_module.write_synced
    if existed:
        folder.mkdir()

    def write(path, data):
        if path.name.startswith(f".{place}"):
            original(path.with_name(f".{place}.41"), data[:10])
            raise Stop
        original(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "write_synced", write)
        with pytest.raises(Stop):
            Run.create(folder, {})
    with pytest.raises(RunError, match=r"run is not a run: it has no config.json"):
        Run.open(folder)
    classifier_run(folder, epochs=1)
    assert [path.name for path in folder.glob(".*")] == []


@pytest.mark.parametrize("name", ["report/index.html", "checkpoints/notes.txt", "weights-1-of-1.safetensors"])
def test_creation_does_not_take_over_other_files(name, tmp_path):
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("")
    with pytest.raises(RunError, match="run exists and is not an empty folder"):
        Run.create(tmp_path / "run", {})


def test_errors_in_the_creation_of_a_run_name_its_folder(tmp_path, monkeypatch):
    def fsync(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(RunError, match=r"cannot create the run .*/run: No space left on device"):
            Run.create(tmp_path / "run", {})
        with pytest.raises(OSError, match=r"No space left on device: '.*file'"):
            files_module.write_synced(tmp_path / "file", b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot create the run .*/file/run: Not a directory"):
        Run.create(tmp_path / "file" / "run", {})
    Run.create(tmp_path / "run", {})


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_processes_that_create_a_run_only_one_succeeds(has_links, tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not has_links:  # as on some network file systems
        monkeypatch.setattr(os, "link", link)
    folder, original = tmp_path / "run", files_module.write_synced

    def write(path, data):
        original(path, data)
        if path.name.startswith(".config.json") and not (folder / "config.json").exists():
            (folder / "config.json").write_text("theirs")

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "write_synced", write)
        with pytest.raises(RunError, match=r"another process has created .*config\.json"):
            Run.create(folder, {})
    assert (folder / "config.json").read_text() == "theirs"
    assert Run.create(tmp_path / "other", {"a": 1}).config() == {"a": 1}


def test_lock_refuses_a_second_process(tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    run = Run.open(tmp_path / "run")
    with run.lock(), pytest.raises(RunError, match="another process is training"), run.lock():
        pass
    with run.lock():
        pass


def test_environment_is_stored(tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    stored = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert stored["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert stored["kernels"]


def test_resume_with_another_number_of_threads_is_logged(tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    path, messages = tmp_path / "run" / "environment.json", []
    stored = json.loads(path.read_text())
    assert stored["threads"] == 1  # set by classifier_run
    path.write_text(json.dumps(stored | {"threads": 7}))
    classifier_run(tmp_path / "run", epochs=2, log=messages.append)
    (message,) = messages
    assert message.startswith("the run was created with 7 threads and continues with 1: its results will not be bit-id")
    path.write_text(json.dumps(stored))
    classifier_run(tmp_path / "run", epochs=3, log=pytest.fail)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"format": 3}', '{"format": 3, "threads": "many"}'])
def test_damaged_environment_does_not_stop_training(text, tmp_path):
    classifier_run(tmp_path / "run", epochs=1)
    (tmp_path / "run" / "environment.json").write_text(text)
    messages = []
    classifier_run(tmp_path / "run", epochs=2, log=messages.append)
    (message,) = messages
    assert "environment.json" in message
    assert Run.open(tmp_path / "run").result() is not None
