"""Sweeps: trials, resuming, pruning, objectives, and what happens when workers or whole sweeps are killed."""

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
from tests.helpers import PATIENCE, wait_until
from tests.sweep.small import SPACE, die_before_trial, settings

optuna = pytest.importorskip("optuna", reason="requires Optuna: pip install 'egru[sweep]'")
PATH = [os.path.abspath(path) for path in sys.path]


@pytest.fixture(autouse=True)
def single_precision(defaults, monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


def states(study) -> list[str]:
    return [trial.state.name for trial in study.get_trials()]


def test_every_trial_is_a_run_and_a_study_resumes(tmp_path):
    messages = []
    first = settings(tmp_path, trials=2, workers=2)
    study = sweep(first, messages.append)
    assert states(study) == ["COMPLETE"] * 2
    for trial in study.get_trials():
        run = Run.open(tmp_path / f"trial-{trial.number:05d}")
        stored = run.config()["config"]
        assert stored["hidden"] == trial.params["hidden"]
        assert stored["threshold"]["mean"] == trial.params["threshold"]
        lines = run.metrics()
        assert trial.intermediate_values == {line.epoch: line.validation.accuracy for line in lines}
        assert trial.value == lines[run.best_epoch() - 1].validation.accuracy
        assert run.result() is None  # trials do not score the test split
    assert resume(tmp_path / "trial-00001").best_epoch == Run.open(tmp_path / "trial-00001").best_epoch()
    assert len(messages) == 2
    sweep(first, messages.append)
    assert messages[2:] == ["resuming study 'small': 2 of 2 trials are finished"]
    study = sweep(dataclasses.replace(first, trials=3), messages.append)
    assert states(study) == ["COMPLETE"] * 3
    assert table(study, first).startswith("best 3 trials on validation (3 complete, 0 pruned, 0 failed):\n")
    written, page = write_outcome(study, first)
    assert page.name == "index.html"
    assert written.read_text().splitlines()[0] == "trial,state,quality,hidden,threshold"
    assert len(written.read_text().splitlines()) == 4


@pytest.mark.parametrize("pruner", ["median", "none"])
def test_bad_trials_are_pruned(pruner, tmp_path):
    """The study has five perfect trials, so that the next one is below their median."""
    sweep_settings = settings(tmp_path, trials=6, pruner=pruner)
    study = open_study(sweep_settings)
    for _ in range(5):
        study.add_trial(optuna.create_trial(value=1.0, intermediate_values={1: 1.0, 2: 1.0}))
    messages = []
    study = sweep(sweep_settings, messages.append)
    assert states(study)[-1] == ("PRUNED" if pruner == "median" else "COMPLETE")
    assert len(Run.open(tmp_path / "trial-00005").metrics()) == (1 if pruner == "median" else 2)
    assert ("pruned after epoch 1" in messages[-1]) == (pruner == "median")


def test_two_objectives_give_a_pareto_front(tmp_path):
    sweep_settings = settings(tmp_path, trials=3, workers=2, objectives=("quality", "macs"), pruner="none")
    study = sweep(sweep_settings, lambda message: None)
    assert [d.name for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    for trial in study.get_trials():
        run = Run.open(sweep_settings.trial_folder(trial.number))
        line = run.metrics()[run.best_epoch() - 1]
        assert trial.values == [line.validation.accuracy, line.activity.forward_macs]
    shown = table(study, sweep_settings)
    assert shown.startswith(f"Pareto front, {len(study.best_trials)} trials on validation (3 complete")
    names = {path.name for path in write_outcome(study, sweep_settings)}
    assert names == {"trials.csv", "index.html", "pareto.svg", "pareto.png"}
    assert "</svg>" in (tmp_path / "pareto.svg").read_text()
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_trial_of_a_killed_worker_is_repeated(tmp_path):
    """Kills trial 0 after trials 1 and 2 have finished."""
    sweep_settings = settings(tmp_path, endless=0, trials=3, workers=2)
    messages, studies = [], []
    thread = threading.Thread(target=lambda: studies.append(sweep(sweep_settings, messages.append)))
    thread.start()
    wait_until(lambda: len(messages) == 2 and len(Run(tmp_path / "trial-00000").metrics()) > 2)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    (study,) = studies
    assert states(study) == ["FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    lost, *_, repeated = study.get_trials()
    assert repeated.params == lost.params
    assert repeated.user_attrs["replaces"] == 0
    assert messages[2] == "trial 0: the worker was killed (exit code -9), will be repeated"
    assert count_finished(study) == 3


@pytest.mark.parametrize("dead", [RETRIES, RETRIES + 1])
def test_workers_that_die_before_their_trial_end_the_sweep_if_there_are_many(dead, tmp_path, monkeypatch):
    monkeypatch.setattr("egru.sweep.supervise.work", die_before_trial)
    sweep_settings, messages = settings(tmp_path, trials=1), []
    for i in range(dead):
        (tmp_path / f"dead-{i}").touch()
    if dead > RETRIES:
        with pytest.raises(RunError, match="3 workers in a row ended before they started a trial"):
            sweep(sweep_settings, messages.append)
    else:
        assert states(sweep(sweep_settings, messages.append)) == ["COMPLETE"]
    assert messages[:dead] == ["a worker ended before it started a trial (exit code 9)"] * dead


def test_workers_have_the_current_environment(tmp_path, monkeypatch):
    """The fork server has the environment of the time when it was started."""
    forkserver.ensure_running()
    monkeypatch.setenv("EGRU_UNITS", "5")
    space = "import os\ndef search(trial):\n    return {'hidden': int(os.environ['EGRU_UNITS']), 'epochs': 1}"
    assert states(sweep(settings(tmp_path, space, trials=1), lambda message: None)) == ["COMPLETE"]
    assert Run.open(tmp_path / "trial-00000").config()["config"]["hidden"] == 5


def test_killed_sweep_resumes(tmp_path):
    """When the sweep is killed, its worker exits, and the next call repeats the trial."""
    sweep_settings = settings(tmp_path, endless=0, trials=1)
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
    process.stdin.write(pickle.dumps(sweep_settings))
    process.stdin.close()
    run = Run(tmp_path / "trial-00000")
    wait_until(lambda: len(run.metrics()) > 2)
    with pytest.raises(RunError, match="another sweep is running in"):
        sweep(sweep_settings)
    process.kill()
    process.wait()

    def is_unlocked() -> bool:
        try:
            with run.lock():
                return True
        except RunError:
            return False

    wait_until(is_unlocked)
    messages = []
    study = sweep(sweep_settings, messages.append)
    assert states(study) == ["FAIL", "COMPLETE"]
    assert messages[0] == "trial 0 was interrupted and will be repeated"


def test_same_command_resumes_after_ctrl_c(tmp_path, capsys, monkeypatch):
    """Ctrl-C stops a worker that holds the journal's lock; the same command repeats its trial."""
    sweep_settings = settings(tmp_path, endless=0)
    arguments = [
        "sweep",
        "digits",
        "--search",
        str(sweep_settings.search),
        "--trials",
        "1",
        "--out",
        "here",
        "--limit",
        "30",
    ]
    arguments += ["--epochs", "2", "--hidden", "4", "--batch", "30"]
    from egru.sweep import supervise

    stopped = []

    def interrupt(*args, **kwargs):
        wait_until(lambda: len(Run(Path("here/trial-00000")).metrics()) > 2)
        wait_until(locked)
        stopped.append(time.monotonic())
        raise KeyboardInterrupt

    def locked() -> bool:
        with contextlib.suppress(FileExistsError):
            Path("here/journal.log.lock").symlink_to(Path("here/journal.log").resolve())
            return True
        return False

    with monkeypatch.context() as patch:
        patch.setattr(supervise, "wait", interrupt)
        patch.setattr("egru.sweep.study._LOCK_TIMEOUT", 200)
        assert cli.main(arguments) == 130
    assert time.monotonic() - stopped[0] < 190  # does not wait for the timeout of the lock
    assert multiprocessing.active_children() == []
    assert "egru: stopped; the same command resumes" in capsys.readouterr().err
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "best 1 trials on validation (1 complete, 0 pruned, 1 failed):" in out
    assert "written: here/trials.csv" in out


def test_lost_trial_is_repeated_at_most_retries_times(tmp_path):
    study = open_study(settings(tmp_path))
    for number in range(RETRIES + 1):
        trial = study.ask({"hidden": optuna.distributions.IntDistribution(2, 6)})
        assert trial.number == number
        assert count_finished(study) == 0
        assert mark_lost(study, number)
        assert not mark_lost(study, number)
    assert count_finished(study) == 1  # not repeated again
    assert states(study) == ["FAIL"] * (RETRIES + 1)
    assert len({t.params["hidden"] for t in study.get_trials()}) == 1


def test_diverging_trial_counts_as_failed_and_the_sweep_continues(tmp_path):
    space = """
def search(trial):
    return {"learning_rate": 1e38 if trial.number == 0 else 1e-3}
"""
    messages = []
    study = sweep(settings(tmp_path, space, trials=2), messages.append)
    assert states(study) == ["FAIL", "COMPLETE"]
    assert messages[0].startswith("trial 0: failed ()")
    assert "is the last good state" in messages[0]


def test_trial_without_metrics_of_its_best_epoch_fails(tmp_path, monkeypatch):
    trial = optuna.trial.FixedTrial({"hidden": 3, "threshold": -2.0})

    def train(*arguments, **options):
        worker.Run.create(tmp_path / "trial-00000", {})

    monkeypatch.setattr(worker, "train", train)
    monkeypatch.setattr(worker.Run, "best_epoch", lambda run: 2)
    with pytest.raises(RuntimeError, match=r"the metrics of .*00000 have no line for epoch 2, the best one"):
        worker.run_trial(settings(tmp_path), trial)


INVALID_SPACES = {
    "def search(trial):\n    return {'hiden': 3}": "unknown field 'hiden'; did you mean hidden",
    "def search(trial):\n    return {'threshold.men': 3}": "unknown field 'threshold.men'; did you mean threshold.mean",
    "def search(trial):\n    return {'hidden.size': 3}": "unknown field 'hidden.size'",
    "def search(trial):\n    return {'epochs': 0}": "epochs must be at least 1, got 0",
    "def search(trial):\n    return 3": "search must return a dict of fields, got int",
    "def search(trial):\n    return wrong": "search: NameError: name 'wrong' is not defined",
    "def search(trial)": "space.py: SyntaxError:",
    "import nothing_there": "space.py: ModuleNotFoundError: No module named 'nothing_there'",
    "search = 3": "must define a function search(trial) that returns a dict of fields",
}


@pytest.mark.parametrize("space", INVALID_SPACES)
def test_invalid_search_space_is_refused(space, tmp_path):
    (tmp_path / "space.py").write_text(space)
    config = find("digits").make()
    with pytest.raises(ValueError, match=re.escape(INVALID_SPACES[space])):
        with_fields(config, read_search(tmp_path / "space.py")(None))


def test_error_of_every_trial_ends_the_sweep(tmp_path):
    sweep_settings = settings(tmp_path, "def search(trial):\n    return {'hiden': 3}", trials=5)
    with pytest.raises(RunError, match="unknown field 'hiden'"):
        sweep(sweep_settings)
    assert states(open_study(sweep_settings)) == ["FAIL"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without a CUDA device")
def test_workers_use_the_given_devices(tmp_path):
    with pytest.raises(RunError, match=r"torch finds no CUDA device, got 'cuda:1'"):
        sweep(settings(tmp_path, devices=("cuda:1",)))


def test_study_with_other_settings_is_refused(tmp_path):
    sweep_settings = settings(tmp_path)
    open_study(sweep_settings)
    other = dataclasses.replace(sweep_settings, config=dataclasses.replace(sweep_settings.config, limit=20))
    with pytest.raises(RunError, match="study 'small' was created with limit 30, got 20"):
        open_study(other)
    elsewhere = dataclasses.replace(
        sweep_settings, config=dataclasses.replace(sweep_settings.config, root="/elsewhere")
    )
    open_study(elsewhere)


def test_study_without_a_newer_field_resumes(tmp_path):
    sweep_settings = settings(tmp_path)
    study = open_study(sweep_settings)
    made = {name: value for name, value in study.user_attrs["settings"].items() if name != "start_from"}
    study.set_user_attr("settings", made)
    assert open_study(sweep_settings).user_attrs["settings"] == made


def test_truncated_journal_is_repaired(tmp_path):
    sweep_settings = settings(tmp_path)
    open_study(sweep_settings).ask()
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "wor')
    Path("journal.log.lock").symlink_to(journal)
    repair_journal(journal)
    assert not Path("journal.log.lock").is_symlink()
    assert journal.read_bytes() == whole
    assert states(open_study(sweep_settings)) == ["RUNNING"]
    repair_journal(tmp_path / "nothing.log")


@pytest.mark.parametrize("folder", ["absolute", "relative"])
def test_lock_of_a_dead_writer_expires(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("egru.sweep.study._LOCK_TIMEOUT", 3)
    study = open_study(settings(Path("here") if folder == "relative" else tmp_path / "here"))
    lock = study._storage._backend._lock
    lock.acquire()
    asked = threading.Thread(target=study.ask, daemon=True)
    asked.start()
    asked.join(PATIENCE)
    if stuck := asked.is_alive():
        lock.release()
    assert not stuck
    assert states(study) == ["RUNNING"]


def test_dotted_names_set_nested_fields():
    config = with_fields(find("digits").make(), {"threshold.mean": -2, "clip": None, "betas": [0.8, 0.9]})
    assert (config.threshold.mean, config.clip, config.betas) == (-2.0, None, (0.8, 0.9))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["smnits"], 2, "unknown recipe 'smnits'"),
        (["digits", "--search", "nowhere.py"], 2, "--search: nowhere.py does not exist"),
        (
            ["digits", "--objectives", "quality,speed"],
            2,
            "objectives must be among quality, macs, backward-macs, got 'speed'",
        ),
        (["digits", "--objectives", "macs,macs"], 2, "objectives must be non-empty and distinct, got 'macs, macs'"),
        (["digits", "--objectives", "quality,macs", "--pruner", "median"], 2, "must be none with several objectives"),
        (["digits", "--epochs", "many"], 2, "--epochs: invalid literal"),
        (["digits", "--storage", "nodatabase://here"], 1, "--storage: Can't load plugin"),
        (["digits", "--storage", "postgresql://127.0.0.1:1/none"], 1, "--storage: (psycopg.OperationalError)"),
        (["smnist", "--smoke"], 2, "EGRU_DATA"),
    ],
)
def test_errors_are_one_line(arguments, code, message, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("EGRU_DATA", raising=False)
    (tmp_path / "space.py").write_text("ENDLESS = -1\n" + SPACE)
    actual = cli.main(["sweep", "--search", "space.py", *arguments])
    err = capsys.readouterr().err
    assert actual == code
    assert message in err
    assert err.startswith("egru: ")
    assert err.count("\n") == 1


def test_missing_optuna_is_reported(capsys, monkeypatch, tmp_path):
    (tmp_path / "space.py").write_text(SPACE)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main(["sweep", "digits", "--search", "space.py"]) == 1
    assert "sweeps require Optuna: pip install 'egru[sweep]'" in capsys.readouterr().err


def test_help_shows_an_example_of_a_search_space(capsys):
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--help"])
    out = capsys.readouterr().out
    assert "def search(trial):" in out
    assert "--objectives" in out


def test_example_in_the_help_is_a_valid_search_space(tmp_path):
    code = cli.SWEEP_EXAMPLE.split("SPACE.py:\n")[1].split("    egru sweep")[0]
    (tmp_path / "space.py").write_text("if True:\n" + code)
    trial = optuna.trial.FixedTrial({"hidden": 40, "learning_rate": 1e-3, "threshold": -2.0})
    config = with_fields(find("smnist").make(), read_search(tmp_path / "space.py")(trial))
    assert json.dumps([config.hidden, config.learning_rate, config.threshold.mean]) == "[40, 0.001, -2.0]"
