"""One trial, in a process of its own: what it does to the machine ends with it."""

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


class Over(Exception):
    """The last epoch is done. The test split is left for the trial that will be chosen."""


class Reports(NoProgress):
    """Progress for Optuna: the objective after every epoch, and the end of a trial that is not worth its time."""

    def __init__(self, trial: Any, goals: list[Goal], epochs: int) -> None:
        self.trial, self.goals, self.epochs = trial, goals, epochs

    def epoch(self, metrics: EpochMetrics) -> None:
        if len(self.goals) == 1:  # of several, Optuna prunes by none
            self.trial.report(self.goals[0].of(metrics), metrics.epoch)
            if self.trial.should_prune():
                raise optuna().TrialPruned(f"after epoch {metrics.epoch}")
        if metrics.epoch == self.epochs:
            raise Over


def work(sweep: Sweep, device: str | None, environment: dict[str, str], connection: Connection) -> None:
    """Ask for a trial, run it, tell what it came to.

    ``environment`` is the parent's as it is now; what this process inherits is that of the first sweep's start.

    ``connection`` hears ("trial", number), then ("failed", why) where the trial went wrong by itself, or ("wrong",
    missing, why) where every trial would.
    """
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()
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
    """The objectives of the epoch that validation chose."""
    config = with_fields(sweep.config, read_search(sweep.search)(trial))
    folder, goals = sweep.trial_folder(trial.number), sweep.goals()
    if folder.exists():
        raise ValueError(f"{folder} is there already, from another study: name another --out or --study")
    progress = Reports(trial, goals, config.epochs)
    with contextlib.suppress(Over):
        train(sweep.recipe, config, folder, lambda said: None, progress=progress, page=False)
    run = Run.open(folder)
    best = run.best_epoch()
    line = next((line for line in run.metrics() if line.epoch == best), None)
    if line is None:
        raise RuntimeError(f"the line of epoch {best}, the best, is missing from the metrics of {folder}")
    return [goal.of(line) for goal in goals]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
