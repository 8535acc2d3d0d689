"""The Optuna study of a sweep: its storage, its progress, and what happens to lost trials."""

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
"""How often a lost trial is repeated, so that a trial that always kills its worker does not repeat forever."""
_LOCK_TIMEOUT = 10
"""Seconds after which a worker that holds the journal's lock without writing is considered dead."""
_LOCAL_FIELDS = ("device", "root", "tensorboard")
"""Fields that may differ between machines and between calls."""


def optuna() -> Any:
    """Import Optuna with its log messages disabled.

    Raises:
        ImportError: If Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("sweeps require Optuna: pip install 'egru[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    return optuna


def open_study(sweep: Sweep) -> Any:
    """Create or open the study of a sweep.

    Raises:
        RunError: If the study exists with other settings, or the storage cannot be opened.
        ImportError: If Optuna or the driver of the database is not installed.
    """
    try:
        study = _retry_races(lambda: _open(sweep))
    except ImportError as error:
        raise ImportError(f"the database driver is not installed ({error}): pip install 'egru[sweep]'") from error
    except Exception as error:
        if type(error).__module__.startswith("sqlalchemy"):
            raise RunError(f"--storage: {str(error).splitlines()[0]}") from error
        raise
    stored, current = study.user_attrs["settings"], _shared_settings(sweep)
    name = next((name for name in {**current, **stored} if stored.get(name) != current.get(name)), None)
    if name is not None:
        raise RunError(
            f"study {sweep.study!r} was created with {name} {stored.get(name)!r}, got {current.get(name)!r}: "
            "use the same value or another --study"
        )
    return study


def _retry_races(attempt: Callable[[], Any]) -> Any:
    """Call ``attempt``, and retry if another machine creates the same tables or rows at the same time."""
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
        sampler=engine.samplers.TPESampler(constant_liar=True),  # parallel trials avoid each other
        pruner=_pruner(sweep),
        load_if_exists=True,
    )
    if "settings" not in study.user_attrs:
        study.set_user_attr("settings", _shared_settings(sweep))
    return study


def _shared_settings(sweep: Sweep) -> dict[str, Any]:
    """Return the settings that must be the same whenever a study is resumed, in the form that JSON restores."""
    settings = {"recipe": sweep.recipe, "objectives": list(sweep.objectives)}
    settings |= {name: value for name, value in to_plain(sweep.config).items() if name not in _LOCAL_FIELDS}
    return json.loads(json.dumps(settings))


def _storage(sweep: Sweep) -> Any:
    storages = optuna().storages
    if "://" not in sweep.storage:
        path = Path(sweep.storage).resolve()  # the lock is a symbolic link to it, which must not be relative
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = storages.journal.JournalFileSymlinkLock(str(path), grace_period=_LOCK_TIMEOUT)
        return storages.JournalStorage(storages.journal.JournalFileBackend(str(path), lock))
    scheme, address = sweep.storage.split("://", 1)
    if scheme in ("postgresql", "postgres"):
        scheme = "postgresql+psycopg"  # the default driver depends on SQLAlchemy's version
    from sqlalchemy.pool import NullPool  # a dependency of Optuna

    return storages.RDBStorage(
        f"{scheme}://{address}",
        engine_kwargs={"poolclass": NullPool},  # hundreds of workers must not keep connections open
        heartbeat_interval=sweep.heartbeat,
        heartbeat_stale_trial_callback=enqueue_again,
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


def repair_journal(journal: Path) -> None:
    """Remove the lock and the incomplete last line of a killed writer. Call only if no other process is writing."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    data = journal.read_bytes() if journal.exists() else b""
    if data and not data.endswith(b"\n"):
        with journal.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def enqueue_again(study: Any, trial: Any) -> None:
    """Enqueue a lost trial again, at most :data:`RETRIES` times."""
    tries = trial.user_attrs.get("tries", 1)
    if tries <= RETRIES:
        study.enqueue_trial(trial.params, user_attrs={"replaces": trial.number, "tries": tries + 1})


def mark_lost(study: Any, number: int) -> bool:
    """Mark the trial of a killed worker as failed and enqueue it again. Return False if it had finished."""
    trial = study.get_trials(deepcopy=False)[number]
    if trial.state.is_finished():
        return False
    study.tell(number, state=optuna().trial.TrialState.FAIL)
    enqueue_again(study, trial)
    return True


def mark_abandoned(study: Any, sweep: Sweep, exclusive: bool) -> list[int]:
    """Mark the trials as lost that an earlier call left running in this folder, and return their numbers.

    ``exclusive`` says that no other process uses this study, so that trials without a folder belong to it too.
    """
    running = optuna().trial.TrialState.RUNNING
    default = sweep.home if exclusive else None
    trials = study.get_trials(deepcopy=False, states=(running,))
    abandoned = [trial.number for trial in trials if trial.user_attrs.get("folder", default) == sweep.home]
    return [number for number in abandoned if mark_lost(study, number)]


def mark_stale(study: Any) -> None:
    """Mark the trials in a database as lost whose heartbeat is overdue, on any machine."""
    optuna().storages.fail_stale_trials(study)


def count_finished(study: Any) -> int:
    """Return the number of finished trials. A lost trial and its repetition count once."""
    trials = study.get_trials(deepcopy=False)
    replaced = {t.user_attrs.get("replaces") for t in trials}
    return sum(t.state.is_finished() and t.number not in replaced for t in trials)


def count_elsewhere(study: Any, sweep: Sweep) -> int:
    """Return the number of trials that are running on other machines or in other folders."""
    running = study.get_trials(deepcopy=False, states=(optuna().trial.TrialState.RUNNING,))
    return sum(t.user_attrs.get("folder", sweep.home) != sweep.home for t in running)
