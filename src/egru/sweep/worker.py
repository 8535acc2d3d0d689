"""Run one trial of a sweep in a separate process, which frees all resources when it ends."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from egru.experiments import with_fields
from egru.runs import train
from egru.sweep.settings import Goal, Sweep, read_search
from egru.sweep.study import open_study, optuna
from egru.training import EpochMetrics, NoProgress, Run


class TrialFinished(Exception):
    """Ends a trial after its last epoch, before the test split is scored."""


class OptunaProgress(NoProgress):
    """Reports the objective to Optuna after every epoch, and stops trials that Optuna prunes."""

    def __init__(self, trial: Any, goals: list[Goal], epochs: int) -> None:
        self.trial, self.goals, self.epochs = trial, goals, epochs

    def epoch(self, metrics: EpochMetrics) -> None:
        if len(self.goals) == 1:  # Optuna does not prune with several objectives
            self.trial.report(self.goals[0].value(metrics), metrics.epoch)
            if self.trial.should_prune():
                raise optuna().TrialPruned(f"after epoch {metrics.epoch}")
        if metrics.epoch == self.epochs:
            raise TrialFinished


def work(sweep: Sweep, device: str | None, environment: dict[str, str], connection: Connection) -> None:
    """Ask the study for a trial, run it and report its objectives to the study.

    Args:
        sweep: The settings of the sweep.
        device: Device of the trial. If None, that of the config.
        environment: The current environment variables of the parent. They are passed because a worker inherits the
            variables from when the first worker was started.
        connection: Receives ``("trial", number)``, then ``("failed", reason)`` if the trial failed, or
            ``("wrong", is_file_missing, reason)`` if every trial would fail.
    """
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // sweep.workers)))
    if device is not None:
        sweep = dataclasses.replace(sweep, config=dataclasses.replace(sweep.config, device=device))

    def objective(trial: Any) -> list[float]:
        connection.send(("trial", trial.number))
        trial.set_user_attr("folder", sweep.home)
        try:
            return run_trial(sweep, trial)
        except RuntimeError as error:  # diverged, out of memory
            connection.send(("failed", " ".join(str(error).split())))
            raise

    try:
        open_study(sweep).optimize(objective, n_trials=1, catch=(RuntimeError,))
    except Exception as error:
        connection.send(("wrong", isinstance(error, FileNotFoundError), " ".join(str(error).split())))


def run_trial(sweep: Sweep, trial: Any) -> list[float]:
    """Train the config of a trial and return the objectives of its best epoch on validation."""
    config = with_fields(sweep.config, read_search(sweep.search)(trial))
    folder, goals = sweep.trial_folder(trial.number), sweep.goals()
    if folder.exists():
        raise ValueError(f"{folder} exists already, from another study; choose another --out or --study")
    progress = OptunaProgress(trial, goals, config.epochs)
    with contextlib.suppress(TrialFinished):
        train(sweep.recipe, config, folder, lambda message: None, progress=progress, page=False)
    run = Run.open(folder)
    best = run.best_epoch()
    metrics = next((metrics for metrics in run.metrics() if metrics.epoch == best), None)
    if metrics is None:
        raise RuntimeError(f"the metrics of {folder} have no line for epoch {best}, the best one")
    return [goal.value(metrics) for goal in goals]


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
