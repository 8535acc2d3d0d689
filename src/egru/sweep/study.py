"""The study a sweep adds to: where Optuna keeps it, how much of it is done, what becomes of lost trials."""

import json
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from egru.sweep.settings import Sweep
from egru.training import RunError, to_plain

RETRIES = 2
"""Times a lost trial is tried again: one that takes its worker down every time must end some day."""
_GRACE = 10
"""Seconds after which a worker that holds the journal's lock, and writes nothing, counts as dead."""
_PLACE = ("device", "root", "tensorboard")
"""Fields that may differ from machine to machine, or call to call."""


def optuna() -> Any:
    """Optuna, quiet, or an error that says how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError("sweeps need Optuna: pip install 'egru[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    return optuna


def open_study(sweep: Sweep) -> Any:
    """The study, made or found; one that was made with other settings is refused."""
    try:
        study = _first_to_come(lambda: _open(sweep))
    except ImportError as error:
        raise ImportError(f"the database's driver is missing ({error}): pip install 'egru[sweep]'") from error
    except Exception as error:
        if type(error).__module__.startswith("sqlalchemy"):
            raise RunError(f"--storage: {str(error).splitlines()[0]}") from error
        raise
    made, own = study.user_attrs["settings"], _settings(sweep)
    name = next((name for name in {**own, **made} if made.get(name) != own.get(name)), None)
    if name is not None:
        raise RunError(
            f"study {sweep.study!r} was made with {name} {made.get(name)!r}, now {own.get(name)!r}: "
            "take that again, or another --study"
        )
    return study


def _first_to_come(attempt: Callable[[], Any]) -> Any:
    """``attempt``, again where another machine made the same tables or rows in the same moment."""
    for wait in (0.2, 0.5, 1.0, 2.0):
        try:
            return attempt()
        except Exception as error:
            if type(error).__name__ not in ("IntegrityError", "ProgrammingError", "StorageInternalError"):
                raise
            time.sleep(wait * (1 + random.random()))
    return attempt()


def _open(sweep: Sweep) -> Any:
    engine = optuna()
    study = engine.create_study(
        storage=_storage(sweep),
        study_name=sweep.study,
        directions=[goal.direction for goal in sweep.goals()],
        sampler=engine.samplers.TPESampler(constant_liar=True),  # parallel trials keep away from each other
        pruner=_pruner(sweep),
        load_if_exists=True,
    )
    if "settings" not in study.user_attrs:
        study.set_user_attr("settings", _settings(sweep))
    return study


def _settings(sweep: Sweep) -> dict[str, Any]:
    """What must be the same whenever a study goes on, as JSON gives it back."""
    own = {"recipe": sweep.recipe, "objectives": list(sweep.objectives)}
    own |= {name: value for name, value in to_plain(sweep.config).items() if name not in _PLACE}
    return json.loads(json.dumps(own))


def _storage(sweep: Sweep) -> Any:
    storages = optuna().storages
    if "://" not in sweep.storage:
        path = Path(sweep.storage).resolve()  # the lock is a link to it: a relative one would lead nowhere
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = storages.journal.JournalFileSymlinkLock(str(path), grace_period=_GRACE)
        return storages.JournalStorage(storages.journal.JournalFileBackend(str(path), lock))
    scheme, address = sweep.storage.split("://", 1)
    if scheme in ("postgresql", "postgres"):
        scheme = "postgresql+psycopg"  # which driver stands behind the plain name depends on SQLAlchemy's version
    from sqlalchemy.pool import NullPool  # comes with Optuna

    return storages.RDBStorage(
        f"{scheme}://{address}",
        engine_kwargs={"poolclass": NullPool},  # hundreds of workers must not hold a connection each
        heartbeat_interval=sweep.heartbeat,
        heartbeat_stale_trial_callback=retry,
    )


def _pruner(sweep: Sweep) -> Any:
    pruners = optuna().pruners
    match sweep.pruner:
        case "median":
            return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=sweep.config.epochs // 10)
        case "hyperband":
            return pruners.HyperbandPruner(min_resource=1, max_resource=sweep.config.epochs)
        case _:
            return pruners.NopPruner()


def mend(journal: Path) -> None:
    """Undo what a dead writer left: its lock, and a half-written last line that Optuna would stumble over later.

    Only where nobody else writes.
    """
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    data = journal.read_bytes() if journal.exists() else b""
    if data and not data.endswith(b"\n"):
        with journal.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def retry(study: Any, trial: Any) -> None:
    """Put a lost trial's fields in line again, a few times."""
    tries = trial.user_attrs.get("tries", 1)
    if tries <= RETRIES:
        study.enqueue_trial(trial.params, user_attrs={"replaces": trial.number, "tries": tries + 1})


def lose(study: Any, number: int) -> bool:
    """The worker of a trial is gone: count it as failed and put it in line again; False if it had ended before."""
    trial = study.get_trials(deepcopy=False)[number]
    if trial.state.is_finished():
        return False
    study.tell(number, state=optuna().trial.TrialState.FAIL)
    retry(study, trial)
    return True


def reclaim(study: Any, sweep: Sweep, own: bool) -> list[int]:
    """Lose what an earlier call left running in this folder. ``own``: nobody else writes to this study."""
    running = optuna().trial.TrialState.RUNNING
    left = study.get_trials(deepcopy=False, states=(running,))
    gone = [t.number for t in left if t.user_attrs.get("folder", sweep.home if own else None) == sweep.home]
    return [number for number in gone if lose(study, number)]


def lose_stale(study: Any) -> None:
    """Lose the trials in a database that have not given a sign of life for too long, wherever they were."""
    optuna().storages.fail_stale_trials(study)


def done(study: Any) -> int:
    """Trials that ended; one that was lost and tried again counts once."""
    trials = study.get_trials(deepcopy=False)
    replaced = {t.user_attrs.get("replaces") for t in trials}
    return sum(t.state.is_finished() and t.number not in replaced for t in trials)


def elsewhere(study: Any, sweep: Sweep) -> int:
    """Trials that other machines, or other folders, are busy with."""
    running = study.get_trials(deepcopy=False, states=(optuna().trial.TrialState.RUNNING,))
    return sum(t.user_attrs.get("folder", sweep.home) != sweep.home for t in running)
