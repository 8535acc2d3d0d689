"""Sweeps on several machines with a PostgreSQL server that these tests start and stop."""

import contextlib
import dataclasses
import glob
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from egru.sweep import sweep
from egru.sweep.study import count_finished, open_study
from egru.sweep.worker import work
from egru.training import Run
from tests.helpers import PATIENCE, wait_until
from tests.sweep.small import settings

pytest.importorskip("optuna", reason="requires Optuna: pip install 'egru[sweep]'")
psycopg = pytest.importorskip("psycopg", reason="requires psycopg: pip install 'egru[sweep]'")


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def find_binaries() -> Path | None:
    folders = [Path(path).parent for path in sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))]
    if (path := shutil.which("postgres")) is not None:
        folders.append(Path(path).resolve().parent)
    return folders[-1] if folders else None


@pytest.fixture(scope="module")
def server():
    """Start a server and return the URL of an empty database."""
    bin = find_binaries()
    if bin is None:
        pytest.skip("requires a PostgreSQL server: apt-get install postgresql")
    folder = Path(tempfile.mkdtemp(prefix="egru-postgresql-"))
    options: dict = {"cwd": folder}
    if os.geteuid() == 0:  # PostgreSQL does not run as root
        options |= {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(folder, "nobody", "nogroup")
    data = folder / "data"
    subprocess.run(
        [bin / "initdb", "--pgdata", data, "--auth", "trust", "--username", "egru", "--no-sync", "--encoding", "UTF8",
         "--locale", "C"],
        check=True, capture_output=True, **options,
    )  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [bin / "postgres", "-D", data, "-k", folder, "-h", "", "-F"],  # a socket in the folder, no port
            stdout=log, stderr=log, **options,
        )  # fmt: skip
    try:
        url = f"postgresql://egru@/postgres?host={folder}"

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(url).close()
                return True
            return False

        wait_until(is_ready)
        yield url
    finally:
        process.send_signal(signal.SIGQUIT)  # immediate shutdown
        process.wait(PATIENCE)
        shutil.rmtree(folder)


def test_two_machines_share_a_study(server, tmp_path):
    """Two sweeps in two folders with one worker each: every trial is in one of the folders."""
    machines = [settings(tmp_path / name, storage=server, study="shared", trials=4) for name in ("one", "two")]
    threads = [threading.Thread(target=sweep, args=(machine, lambda message: None)) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    trials = open_study(machines[0]).get_trials()
    assert 4 <= len(trials) <= 5  # a worker that has not asked for its trial yet is not counted by the other sweep
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    folders = sorted(path.name for machine in machines for path in machine.folder.glob("trial-*"))
    assert folders == [f"trial-{number:05d}" for number in range(len(trials))]
    assert {trial.user_attrs["folder"] for trial in trials} == {machine.home for machine in machines}
    before = len(trials)
    study = sweep(dataclasses.replace(machines[1], trials=before + 1), lambda message: None)
    assert len(study.get_trials()) == before + 1


def test_trial_of_a_dead_machine_is_repeated_by_another(server, tmp_path):
    """Without a supervisor, the missing heartbeat shows that the trial is lost."""
    dead = settings(tmp_path / "dead", endless=0, storage=server, study="heartbeat", heartbeat=1)
    reading, writing = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(
        target=work, args=(dead, None, dict(os.environ), writing)
    )
    process.start()
    wait_until(lambda: len(Run(dead.trial_folder(0)).metrics()) >= 2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    reading.close()
    time.sleep(3.5)
    study = sweep(settings(tmp_path / "alive", storage=server, study="heartbeat", heartbeat=1, trials=1))
    lost, repeated = study.get_trials()
    assert (lost.state.name, repeated.state.name) == ("FAIL", "COMPLETE")
    assert repeated.params == lost.params
    assert count_finished(study) == 1
