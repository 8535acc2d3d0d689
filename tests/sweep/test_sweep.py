"""Sweeps: what the trials are, going on, pruning, objectives, workers and whole sweeps that are killed."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from egru import cli
from egru.experiments import find, with_fields
from egru.runs import resume
from egru.sweep import read_search, sweep, table, worker, write_outcome
from egru.sweep.study import RETRIES, count_finished, mark_lost, open_study, repair_journal
from egru.training import Run, RunError
from tests.sweep.small import SPACE, settings, stillborn

optuna = pytest.importorskip("optuna", reason="needs Optuna: pip install 'egru[sweep]'")
PATH = [os.path.abspath(path) for path in sys.path]


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


def states(study) -> list[str]:
    return [trial.state.name for trial in study.get_trials()]


def until(true, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_every_trial_is_a_run_and_a_study_goes_on(tmp_path):
    said = []
    first = settings(tmp_path, trials=2, workers=2)
    study = sweep(first, said.append)
    assert states(study) == ["COMPLETE"] * 2
    for trial in study.get_trials():
        run = Run.open(tmp_path / f"trial-{trial.number:05d}")
        stored = run.config()["config"]
        assert stored["hidden"] == trial.params["hidden"]
        assert stored["threshold"]["mean"] == trial.params["threshold"]
        lines = run.metrics()
        assert trial.intermediate_values == {line.epoch: line.validation.accuracy for line in lines}
        assert trial.value == lines[run.best_epoch() - 1].validation.accuracy
        assert run.result() is None  # the test split is for the trial that is chosen
    assert resume(tmp_path / "trial-00001").best_epoch == Run.open(tmp_path / "trial-00001").best_epoch()
    assert len(said) == 2
    sweep(first, said.append)
    assert said[2:] == ["resuming study 'small': 2 of 2 trials are finished"]
    study = sweep(dataclasses.replace(first, trials=3), said.append)
    assert states(study) == ["COMPLETE"] * 3
    assert table(study, first).startswith("best 3 trials on validation (3 complete, 0 pruned, 0 failed):\n")
    (written,) = write_outcome(study, first)
    assert written.read_text().splitlines()[0] == "trial,state,quality,hidden,threshold"
    assert len(written.read_text().splitlines()) == 4


@pytest.mark.parametrize("pruner", ["median", "none"])
def test_bad_trials_are_pruned(pruner, tmp_path):
    """Five perfect trials are there already; one of five units cannot keep up."""
    given = settings(tmp_path, trials=6, pruner=pruner)
    study = open_study(given)
    for _ in range(5):
        study.add_trial(optuna.create_trial(value=1.0, intermediate_values={1: 1.0, 2: 1.0}))
    said = []
    study = sweep(given, said.append)
    assert states(study)[-1] == ("PRUNED" if pruner == "median" else "COMPLETE")
    assert len(Run.open(tmp_path / "trial-00005").metrics()) == (1 if pruner == "median" else 2)
    assert ("pruned after epoch 1" in said[-1]) == (pruner == "median")


def test_two_objectives_give_a_pareto_front(tmp_path):
    given = settings(tmp_path, trials=3, workers=2, objectives=("quality", "macs"), pruner="none")
    study = sweep(given, lambda said: None)
    assert [d.name for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    for trial in study.get_trials():
        run = Run.open(given.trial_folder(trial.number))
        line = run.metrics()[run.best_epoch() - 1]
        assert trial.values == [line.validation.accuracy, line.activity.forward_macs]
    shown = table(study, given)
    assert shown.startswith(f"Pareto front, {len(study.best_trials)} trials on validation (3 complete")
    assert {path.name for path in write_outcome(study, given)} == {"trials.csv", "pareto.svg", "pareto.png"}
    assert "</svg>" in (tmp_path / "pareto.svg").read_text()
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_worker_loses_only_its_trial(tmp_path):
    """kill -9 in the middle of trial 0, once trials 1 and 2 have come and gone beside it."""
    given = settings(tmp_path, endless=0, trials=3, workers=2)
    said, found = [], []
    thread = threading.Thread(target=lambda: found.append(sweep(given, said.append)))
    thread.start()
    until(lambda: len(said) == 2 and len(Run(tmp_path / "trial-00000").metrics()) > 2)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    thread.join(90)
    assert not thread.is_alive()
    (study,) = found
    assert states(study) == ["FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    lost, *_, again = study.get_trials()
    assert again.params == lost.params
    assert again.user_attrs["replaces"] == 0
    assert said[2] == "trial 0: the worker was killed (exit code -9), will be repeated"
    assert count_finished(study) == 3


@pytest.mark.parametrize("dead", [RETRIES, RETRIES + 1])
def test_workers_that_die_before_they_have_a_trial(dead, tmp_path, monkeypatch):
    """Now and then is no harm; one after the other ends the sweep."""
    monkeypatch.setattr("egru.sweep.supervise.work", stillborn)
    given, said = settings(tmp_path, trials=1), []
    for i in range(dead):
        (tmp_path / f"dead-{i}").touch()
    if dead > RETRIES:
        with pytest.raises(RunError, match="3 workers in a row ended before they started a trial"):
            sweep(given, said.append)
    else:
        assert states(sweep(given, said.append)) == ["COMPLETE"]
    assert said[:dead] == ["a worker ended before it started a trial (exit code 9)"] * dead


def test_workers_see_the_environment_of_now(tmp_path, monkeypatch):
    """Not that of the moment their server was started."""
    forkserver.ensure_running()
    monkeypatch.setenv("EGRU_UNITS", "5")
    space = "import os\ndef search(trial):\n    return {'hidden': int(os.environ['EGRU_UNITS']), 'epochs': 1}"
    assert states(sweep(settings(tmp_path, space, trials=1), lambda said: None)) == ["COMPLETE"]
    assert Run.open(tmp_path / "trial-00000").config()["config"]["hidden"] == 5


def test_a_killed_sweep_goes_on(tmp_path):
    """The whole of it: kill -9 of the command; its worker ends too, and the next call tries the trial again."""
    given = settings(tmp_path, endless=0, trials=1)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pickle, sys; from egru.sweep import sweep; sweep(pickle.load(sys.stdin.buffer))",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, PATH))},
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(given))
    process.stdin.close()
    run = Run(tmp_path / "trial-00000")
    until(lambda: len(run.metrics()) > 2)
    with pytest.raises(RunError, match="another sweep is running in"):
        sweep(given)
    process.kill()
    process.wait()

    def free() -> bool:
        try:
            with run.lock():
                return True
        except RunError:
            return False

    until(free, 30)
    said = []
    study = sweep(given, said.append)
    assert states(study) == ["FAIL", "COMPLETE"]
    assert said[0] == "trial 0 was interrupted and will be repeated"


def test_ctrl_c_and_the_same_command(tmp_path, capsys, monkeypatch):
    """Ctrl-C ends the worker in the middle of its trial, and of its writing; the same command tries it again."""
    given = settings(tmp_path, endless=0)
    arguments = ["sweep", "digits", "--search", str(given.search), "--trials", "1", "--out", "here", "--limit", "30"]
    arguments += ["--epochs", "2", "--hidden", "4", "--batch", "30"]
    from egru.sweep import supervise

    stopped = []

    def interrupt(*args, **kwargs):
        until(lambda: len(Run(Path("here/trial-00000")).metrics()) > 2)
        until(locked)
        stopped.append(time.monotonic())
        raise KeyboardInterrupt

    def locked() -> bool:
        with contextlib.suppress(FileExistsError):
            Path("here/journal.log.lock").symlink_to(Path("here/journal.log").resolve())
            return True
        return False

    with monkeypatch.context() as patch:
        patch.setattr(supervise, "wait", interrupt)
        assert cli.main(arguments) == 130
    assert time.monotonic() - stopped[0] < 8  # seconds of grace are for workers that may be alive
    assert multiprocessing.active_children() == []
    assert "egru: stopped; the same command resumes" in capsys.readouterr().err
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "best 1 trials on validation (1 complete, 0 pruned, 1 failed):" in out
    assert "written: here/trials.csv" in out


def test_a_lost_trial_is_tried_so_often(tmp_path):
    study = open_study(settings(tmp_path))
    for number in range(RETRIES + 1):
        trial = study.ask({"hidden": optuna.distributions.IntDistribution(2, 6)})
        assert trial.number == number
        assert count_finished(study) == 0
        assert mark_lost(study, number)
        assert not mark_lost(study, number)
    assert count_finished(study) == 1  # given up
    assert states(study) == ["FAIL"] * (RETRIES + 1)
    assert len({t.params["hidden"] for t in study.get_trials()}) == 1


def test_a_trial_that_diverges_counts_and_the_rest_goes_on(tmp_path):
    space = """
def search(trial):
    return {"learning_rate": 1e38 if trial.number == 0 else 1e-3}
"""
    said = []
    study = sweep(settings(tmp_path, space, trials=2), said.append)
    assert states(study) == ["FAIL", "COMPLETE"]
    assert said[0].startswith("trial 0: failed ()")
    assert "is the last good state" in said[0]


def test_a_trial_whose_best_epoch_left_no_line_has_failed(tmp_path, monkeypatch):
    trial = optuna.trial.FixedTrial({"hidden": 3, "threshold": -2.0})

    def train(*given, **options):
        worker.Run.create(tmp_path / "trial-00000", {})

    monkeypatch.setattr(worker, "train", train)
    monkeypatch.setattr(worker.Run, "best", lambda run: 2)
    with pytest.raises(RuntimeError, match=r"the line of epoch 2, the best, is missing from the metrics of .*00000"):
        worker.run_trial(settings(tmp_path), trial)


WRONG = {
    "def search(trial):\n    return {'hiden': 3}": "unknown field 'hiden'; did you mean hidden",
    "def search(trial):\n    return {'threshold.men': 3}": "unknown field 'threshold.men'; did you mean threshold.mean",
    "def search(trial):\n    return {'hidden.size': 3}": "unknown field 'hidden.size'",
    "def search(trial):\n    return {'epochs': 0}": "epochs must be at least 1, got 0",
    "def search(trial):\n    return 3": "search must return a dict of fields, got int",
    "def search(trial):\n    return wrong": "search: NameError: name 'wrong' is not defined",
    "def search(trial)": "space.py: SyntaxError:",
    "import nothing_there": "space.py: ModuleNotFoundError: No module named 'nothing_there'",
    "search = 3": "has no function search(trial) that returns a dict of fields",
}


@pytest.mark.parametrize("space", WRONG)
def test_what_is_wrong_with_a_space_is_said(space, tmp_path):
    (tmp_path / "space.py").write_text(space)
    config = find("digits").make()
    with pytest.raises(ValueError, match=re.escape(WRONG[space])):
        with_fields(config, read_search(tmp_path / "space.py")(None))


def test_what_every_trial_would_run_into_ends_the_sweep(tmp_path):
    given = settings(tmp_path, "def search(trial):\n    return {'hiden': 3}", trials=5)
    with pytest.raises(RunError, match="unknown field 'hiden'"):
        sweep(given)
    assert states(open_study(given)) == ["FAIL"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where the device named is not there")
def test_workers_get_their_device(tmp_path):
    with pytest.raises(RunError, match=r"torch finds no CUDA device, got 'cuda:1'"):
        sweep(settings(tmp_path, devices=("cuda:1",)))


def test_other_settings_are_another_study(tmp_path):
    given = settings(tmp_path)
    open_study(given)
    other = dataclasses.replace(given, config=dataclasses.replace(given.config, limit=20))
    with pytest.raises(RunError, match="study 'small' was created with limit 30, got 20"):
        open_study(other)
    elsewhere = dataclasses.replace(given, config=dataclasses.replace(given.config, root="/elsewhere"))
    open_study(elsewhere)


def test_a_study_from_before_a_field_existed_goes_on(tmp_path):
    given = settings(tmp_path)
    study = open_study(given)
    made = {name: value for name, value in study.user_attrs["settings"].items() if name != "start_from"}
    study.set_user_attr("settings", made)
    assert open_study(given).user_attrs["settings"] == made


def test_a_journal_cut_short_is_mended(tmp_path):
    given = settings(tmp_path)
    open_study(given).ask()
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "wor')
    Path("journal.log.lock").symlink_to(journal)
    repair_journal(journal)
    assert not Path("journal.log.lock").is_symlink()
    assert journal.read_bytes() == whole
    assert states(open_study(given)) == ["RUNNING"]
    repair_journal(tmp_path / "nothing.log")


@pytest.mark.parametrize("folder", ["absolute", "relative"])
def test_a_dead_writers_lock_is_broken(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("egru.sweep.study._LOCK_TIMEOUT", 3)
    study = open_study(settings(Path("here") if folder == "relative" else tmp_path / "here"))
    lock = study._storage._backend._lock
    lock.acquire()
    asked = threading.Thread(target=study.ask, daemon=True)
    asked.start()
    asked.join(30)
    if stuck := asked.is_alive():
        lock.release()
    assert not stuck
    assert states(study) == ["RUNNING"]


def test_fields_with_dots():
    config = with_fields(find("digits").make(), {"threshold.mean": -2, "clip": None, "betas": [0.8, 0.9]})
    assert (config.threshold.mean, config.clip, config.betas) == (-2.0, None, (0.8, 0.9))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["smnits"], 1, "unknown recipe 'smnits'"),
        (["digits", "--search", "nowhere.py"], 2, "--search: there is no file nowhere.py"),
        (["digits", "--objectives", "quality,speed"], 1, "must be of quality, macs, backward-macs, got 'speed'"),
        (["digits", "--objectives", "macs,macs"], 1, "none twice, got 'macs, macs'"),
        (["digits", "--objectives", "quality,macs", "--pruner", "median"], 1, "must be none with several objectives"),
        (["digits", "--workers", "0"], 1, "workers must be at least 1, got 0"),
        (["digits", "--epochs", "many"], 2, "--epochs: invalid literal"),
        (["digits", "--storage", "nodatabase://here"], 1, "--storage: Can't load plugin"),
        (["digits", "--storage", "postgresql://127.0.0.1:1/none"], 1, "--storage: (psycopg.OperationalError)"),
        (["smnist", "--smoke"], 2, "EGRU_DATA"),
    ],
)
def test_errors_are_one_line(arguments, code, words, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("EGRU_DATA", raising=False)
    (tmp_path / "space.py").write_text("ENDLESS = -1\n" + SPACE)
    got = cli.main(["sweep", "--search", "space.py", *arguments])
    err = capsys.readouterr().err
    assert got == code
    assert words in err
    assert err.startswith("egru: ")
    assert err.count("\n") == 1


def test_optuna_that_is_not_there(capsys, monkeypatch, tmp_path):
    (tmp_path / "space.py").write_text(SPACE)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main(["sweep", "digits", "--search", "space.py"]) == 1
    assert "sweeps require Optuna: pip install 'egru[sweep]'" in capsys.readouterr().err


def test_help_shows_a_space(capsys):
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--help"])
    out = capsys.readouterr().out
    assert "def search(trial):" in out
    assert "--objectives" in out


def test_the_example_of_the_help_is_a_space(tmp_path):
    code = cli.SWEEP_EXAMPLE.split("SPACE.py:\n")[1].split("    egru sweep")[0]
    (tmp_path / "space.py").write_text("if True:\n" + code)
    trial = optuna.trial.FixedTrial({"hidden": 40, "learning_rate": 1e-3, "threshold": -2.0})
    config = with_fields(find("smnist").make(), read_search(tmp_path / "space.py")(trial))
    assert json.dumps([config.hidden, config.learning_rate, config.threshold.mean]) == "[40, 0.001, -2.0]"
