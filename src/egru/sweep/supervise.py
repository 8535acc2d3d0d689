"""Run a sweep: start one process per trial, several at a time, and repeat the trials of killed processes."""

import contextlib
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from egru.sweep import study as studies
from egru.sweep.outcome import describe
from egru.sweep.settings import Sweep, read_search
from egru.sweep.worker import work
from egru.training import RunError


def sweep(settings: Sweep, log: Callable[[str], None] = print) -> Any:
    """Run trials until the study has the requested number. Resumes an existing study.

    Args:
        settings: The recipe, the search space and the study.
        log: Called with one line per finished or lost trial.

    Returns:
        The Optuna study.

    Raises:
        RunError: If the settings do not fit the study, another sweep uses the folder, or every trial would fail.
        FileNotFoundError: If the search space or the data set does not exist.
        ImportError: If Optuna is not installed.

    Example:
        >>> study = egru.sweep.sweep(settings)  # settings: an egru.sweep.Sweep  # doctest: +SKIP
        >>> print(egru.sweep.table(study, settings))  # doctest: +SKIP
    """
    read_search(settings.search)  # reports errors in the search space first
    settings.folder.mkdir(parents=True, exist_ok=True)
    with _lock(settings.folder):
        exclusive = _is_in_folder(settings)
        if exclusive:
            studies.repair_journal(Path(settings.storage))
        study = studies.open_study(settings)
        for number in studies.mark_abandoned(study, settings, exclusive):
            log(f"trial {number} was interrupted and will be repeated")
        if finished := studies.count_finished(study):
            log(f"resuming study {settings.study!r}: {finished} of {settings.trials} trials are finished")
        _supervise(study, settings, log, exclusive)
    return study


def _is_in_folder(settings: Sweep) -> bool:
    """Return whether the study is a journal in the sweep's folder, which only this sweep writes to."""
    return "://" not in settings.storage and Path(settings.storage).resolve().parent == settings.folder.resolve()


@dataclasses.dataclass
class _Worker:
    """A process that runs one trial.

    Attributes:
        process: The process.
        connection: Receives the messages of :func:`egru.sweep.worker.work`.
        trial: The number of the trial, once the worker has one.
        failure: Why the trial failed.
        error: An error that every trial would raise.
    """

    process: Any
    connection: Connection
    trial: int | None = None
    failure: str | None = None
    error: Exception | None = None

    def receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                match self.connection.recv():
                    case ("trial", number):
                        self.trial = number
                    case ("failed", reason):
                        self.failure = reason
                    case ("wrong", missing, reason):
                        self.error = (FileNotFoundError if missing else RunError)(reason)


def _supervise(study: Any, settings: Sweep, log: Callable[[str], None], exclusive: bool) -> None:
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    if sys.platform != "win32":
        context.set_forkserver_preload(["egru.sweep", "optuna", "torch._dynamo"])  # slow imports, done once
    workers: dict[int, _Worker] = {}
    without_trial = 0
    try:
        while True:
            studies.mark_stale(study)
            running = studies.count_elsewhere(study, settings) + len(workers)
            wanted = settings.trials - studies.count_finished(study) - running
            free = [slot for slot in range(settings.workers) if slot not in workers]
            for slot in free[: max(wanted, 0)]:
                workers[slot] = _start_worker(context, settings, slot)
            if not workers:
                return
            wait([worker.process.sentinel for worker in workers.values()], timeout=10)
            for slot, worker in list(workers.items()):
                if not worker.process.is_alive():
                    del workers[slot]
                    without_trial = 0 if _finish(study, settings, worker, log) else without_trial + 1
            if without_trial > studies.RETRIES:
                raise RunError(f"{without_trial} workers in a row ended before they started a trial; see their output")
    finally:  # Ctrl-C, or an error that every trial would raise
        for worker in workers.values():
            worker.process.terminate()
        for worker in workers.values():
            worker.process.join()
        if exclusive:
            studies.repair_journal(Path(settings.storage))
        for worker in workers.values():
            worker.receive()
            if worker.trial is not None:
                studies.mark_lost(study, worker.trial)


def _start_worker(context: Any, settings: Sweep, slot: int) -> _Worker:
    device = settings.devices[slot % len(settings.devices)] if settings.devices else None
    receiver, sender = context.Pipe(duplex=False)
    arguments = (settings, device, dict(os.environ), sender)
    process = context.Process(target=work, args=arguments, name=f"egru sweep {slot}")
    process.start()
    sender.close()
    return _Worker(process, receiver)


def _finish(study: Any, settings: Sweep, worker: _Worker, log: Callable[[str], None]) -> bool:
    """Log the result of a worker that ended, or repeat its trial. Return False if it had not started a trial."""
    worker.process.join()
    worker.receive()
    if worker.error is not None:
        raise worker.error
    if worker.trial is None:
        log(f"a worker ended before it started a trial (exit code {worker.process.exitcode})")
        return False
    if studies.mark_lost(study, worker.trial):
        log(f"trial {worker.trial}: the worker was killed (exit code {worker.process.exitcode}), will be repeated")
        return True
    trial = study.get_trials(deepcopy=False)[worker.trial]
    log(f"trial {trial.number}: {describe(trial, settings)}" + (f": {worker.failure}" if worker.failure else ""))
    return True


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Allow one sweep per folder. The lock of a killed sweep is released by the system."""
    try:
        import fcntl
    except ImportError:  # not available on this system
        yield
        return
    with (folder / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another sweep is running in {folder}; wait for it or choose another --out") from error
        yield
