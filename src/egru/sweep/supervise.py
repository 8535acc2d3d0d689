"""The sweep itself: so many workers at a time, a new one for every trial, nothing lost but what a dead one held."""

import contextlib
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from egru.sweep.outcome import describe
from egru.sweep.settings import Sweep, read_search
from egru.sweep.study import RETRIES, done, elsewhere, lose, lose_stale, mend, open_study, reclaim
from egru.sweep.worker import work
from egru.training import RunError


def sweep(settings: Sweep, say: Callable[[str], None] = print) -> Any:
    """Run trials until the study has as many as asked for; returns the study."""
    read_search(settings.search)  # its errors first
    settings.folder.mkdir(parents=True, exist_ok=True)
    with _alone(settings.folder):
        own = "://" not in settings.storage and Path(settings.storage).resolve().parent == settings.folder.resolve()
        if own:
            mend(Path(settings.storage))
        study = open_study(settings)
        for number in reclaim(study, settings, own):
            say(f"trial {number} was left in the middle: tried again")
        if had := done(study):
            say(f"going on with study {settings.study!r}: {had} of {settings.trials} trials are there")
        _supervise(study, settings, say, own)
    return study


@dataclasses.dataclass
class _Worker:
    process: Any
    connection: Connection
    trial: int | None = None
    failed: str | None = None
    wrong: Exception | None = None

    def listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                match self.connection.recv():
                    case ("trial", number):
                        self.trial = number
                    case ("failed", why):
                        self.failed = why
                    case ("wrong", missing, why):
                        self.wrong = (FileNotFoundError if missing else RunError)(why)


def _supervise(study: Any, settings: Sweep, say: Callable[[str], None], own: bool) -> None:
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    if sys.platform != "win32":
        context.set_forkserver_preload(["egru.sweep", "optuna", "torch._dynamo"])  # the slow part of a start, once
    workers: dict[int, _Worker] = {}
    fruitless = 0
    try:
        while True:
            lose_stale(study)
            wanted = settings.trials - done(study) - elsewhere(study, settings) - len(workers)
            free = [slot for slot in range(settings.workers) if slot not in workers]
            for slot in free[: max(wanted, 0)]:
                device = settings.devices[slot % len(settings.devices)] if settings.devices else None
                ours, theirs = context.Pipe(duplex=False)
                given = (settings, device, dict(os.environ), theirs)
                process = context.Process(target=work, args=given, name=f"egru sweep {slot}")
                process.start()
                theirs.close()
                workers[slot] = _Worker(process, ours)
            if not workers:
                return
            wait([worker.process.sentinel for worker in workers.values()], timeout=10)
            for slot, worker in list(workers.items()):
                if not worker.process.is_alive():
                    del workers[slot]
                    fruitless = 0 if _settle(study, settings, worker, say) else fruitless + 1
            if fruitless > RETRIES:
                raise RunError(f"{fruitless} workers in a row ended before they had a trial, as the last lines say")
    finally:  # Ctrl-C, or an error that every trial would run into
        for worker in workers.values():
            worker.process.terminate()
        for worker in workers.values():
            worker.process.join()
        if own:
            mend(Path(settings.storage))
        for worker in workers.values():
            worker.listen()
            if worker.trial is not None:
                lose(study, worker.trial)


def _settle(study: Any, settings: Sweep, worker: _Worker, say: Callable[[str], None]) -> bool:
    """A worker has ended: say what its trial came to, or put it in line again; False if it had none yet."""
    worker.process.join()
    worker.listen()
    if worker.wrong is not None:
        raise worker.wrong
    if worker.trial is None:
        say(f"a worker ended before it had a trial (exit code {worker.process.exitcode})")
        return False
    if lose(study, worker.trial):
        say(f"trial {worker.trial}: its worker was lost (exit code {worker.process.exitcode}), tried again")
        return True
    trial = study.get_trials(deepcopy=False)[worker.trial]
    say(f"trial {trial.number}: {describe(trial, settings)}" + (f": {worker.failed}" if worker.failed else ""))
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One sweep at a time in a folder; a killed one lets go by itself."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with (folder / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another sweep works in {folder}; wait for it, or name another --out") from error
        yield
