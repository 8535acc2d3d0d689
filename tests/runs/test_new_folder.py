"""Commands that write a new folder and are killed: the folder is complete or absent, and the same command works."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from egru import files
from egru.experiments import find
from egru.runs import evaluate, export, quieten, train

SMALL = replace(find("digits").make(), epochs=1, limit=60, hidden=12, batch=30, evaluation_batch=60)


class Kill(BaseException):
    """Simulates SIGKILL at a chosen place."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pytest.importorskip("sklearn", reason="the digits require scikit-learn")
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("trained") / "run"
    train("digits", SMALL, folder, page=False, log=lambda message: None)
    return folder


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def write_export(run: Path, out: Path) -> None:
    export(run, out)


def write_quiet(run: Path, out: Path) -> None:
    quieten(run, out, floor=(0.2,), log=lambda message: None)


def is_killed(command, run: Path, out: Path, operation: int) -> bool:
    """Run a command that is killed at a file operation, counted from 0. Return whether it had so many."""
    count = 0

    def kill_at(function):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count > operation:
                raise Kill
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in ((Path, ("mkdir", "write_bytes", "replace")), (shutil, ("copyfile",)), (os, ("link",))):
            for name in names:
                patch.setattr(owner, name, kill_at(getattr(owner, name)))
        patch.setattr(files, "write_synced", kill_at(files.write_synced))
        # A killed process does not remove anything.
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        patch.setattr(Path, "unlink", lambda *arguments, **options: None)
        try:
            command(run, out)
        except Kill:
            return True
    return False


@pytest.mark.parametrize("command", [write_export, write_quiet])
@pytest.mark.parametrize("existed", [False, True])
def test_killed_command_leaves_no_partial_folder(command, existed, trained, tmp_path):
    whole = tmp_path / "whole"
    command(trained, whole)
    operation = 0
    while True:
        out = tmp_path / f"out{operation}"
        if existed:
            out.mkdir()
        if not is_killed(command, trained, out, operation):
            break
        assert not out.exists() or not any(out.iterdir())
        command(trained, out)
        assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
        assert evaluate(out)[0] == evaluate(whole)[0]
        operation += 1
    assert operation >= 5
    assert list(tmp_path.glob(".*")) == []


def test_mount_point_is_filled(trained, tmp_path, monkeypatch):
    """A mount point can be neither renamed nor replaced. The config, which makes it a run, comes last."""
    original, moved = shutil.move, []

    def replace(path, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    def move(path, target):
        moved.append(path.name)
        return original(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        patch.setattr(shutil, "move", move)
        (tmp_path / "out").mkdir()
        paths = export(trained, tmp_path / "out")
    assert all(path.exists() for path in paths)
    assert moved[-1] == "config.json"
    assert len(moved) == len(paths)


def test_failed_command_leaves_nothing(trained, tmp_path, monkeypatch):
    def copyfile(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", copyfile)
        with pytest.raises(OSError, match="No space left on device"):
            export(trained, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_appeared_meanwhile_is_kept(tmp_path):
    def write() -> None:
        with files.new_folder(tmp_path / "out") as temporary:
            (temporary / "ours").touch()
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").touch()

    with pytest.raises(OSError, match="not empty"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]
