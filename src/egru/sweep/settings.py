"""The settings of a sweep: the recipe, the search space, the objectives and the study."""

import dataclasses
import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from egru import format
from egru.experiments import Config, LanguageConfig
from egru.training import EpochMetrics

Search = Callable[[Any], dict[str, Any]]
"""Returns the fields of a trial, given an Optuna trial."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The settings of a sweep. Validated when they are created.

    Attributes:
        recipe: Name of the recipe.
        config: The config that every trial starts from. The fields that ``search`` returns replace its fields.
        search: Python file that defines ``search(trial)``.
        folder: Folder for the runs, one per trial.
        storage: Journal file, or URL of a database.
        study: Name of the study in the storage.
        objectives: One or more names from :func:`goals`.
        trials: Number of trials in the study at the end, including those of earlier calls and other machines.
        workers: Number of parallel trials on this machine.
        pruner: Which trials to stop early. Must be ``"none"`` with several objectives.
        devices: Devices that the workers use in turn. If empty, the device of the config.
        heartbeat: Seconds between two heartbeats of a trial in a database. Two missed ones mean that it is lost.

    Example:
        >>> settings = egru.sweep.Sweep(
        ...     recipe="digits", config=egru.experiments.find("digits").make(), search=Path("space.py"),
        ...     folder=Path("sweeps/digits"), storage="sweeps/digits/journal.log", study="digits", trials=10,
        ... )
    """

    recipe: str
    config: Config
    search: Path
    folder: Path
    storage: str
    study: str
    objectives: tuple[str, ...] = ("quality",)
    trials: int = 20
    workers: int = 1
    pruner: Literal["median", "hyperband", "none"] = "median"
    devices: tuple[str, ...] = ()
    heartbeat: int = 60

    def __post_init__(self) -> None:
        for name in ("trials", "workers", "heartbeat"):
            if getattr(self, name) < 1:
                raise ValueError(f"sweep: {name} must be at least 1, got {getattr(self, name)}")
        available = goals(self.config)
        for name in self.objectives:
            if name not in available:
                raise ValueError(f"sweep: objectives must be among {', '.join(available)}, got {name!r}")
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise ValueError(f"sweep: objectives must be non-empty and distinct, got {', '.join(self.objectives)!r}")
        if len(self.objectives) > 1 and self.pruner != "none":
            raise ValueError(f"sweep: pruner must be none with several objectives, got {self.pruner!r}")

    @property
    def home(self) -> str:
        """The machine and folder of the sweep, which identify its trials in a shared study."""
        return f"{socket.gethostname()}:{self.folder.resolve()}"

    def trial_folder(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.folder / f"trial-{number:05d}"

    def goals(self) -> list["Goal"]:
        """Return the objectives of the sweep."""
        available = goals(self.config)
        return [available[name] for name in self.objectives]


@dataclasses.dataclass(frozen=True)
class Goal:
    """An objective.

    Attributes:
        label: Its name in tables.
        direction: Whether a lower or a higher value is better.
        value: Returns the value after an epoch.
        show: Formats a value.
    """

    label: str
    direction: Literal["minimize", "maximize"]
    value: Callable[[EpochMetrics], float]
    show: Callable[[float], str]


def goals(config: Config) -> dict[str, Goal]:
    """Return the available objectives by name. All are measured on the validation split.

    Args:
        config: The config that the trials start from.

    Example:
        >>> list(egru.sweep.goals(egru.experiments.find("digits").make()))
        ['quality', 'macs', 'backward-macs']
    """
    if isinstance(config, LanguageConfig):
        quality = Goal("perplexity", "minimize", _perplexity, "{:.2f}".format)
    else:
        quality = Goal("accuracy", "maximize", lambda metrics: metrics.validation.accuracy, format.percent)
    return {
        "quality": quality,
        "macs": Goal("MACs/step", "minimize", lambda metrics: metrics.activity.forward_macs, format.count),
        "backward-macs": Goal(
            "backward MACs/step", "minimize", lambda metrics: metrics.activity.backward_macs, format.count
        ),
    }


def _perplexity(metrics: EpochMetrics) -> float:
    assert metrics.validation.perplexity is not None
    return metrics.validation.perplexity


def read_search(path: Path) -> Search:
    """Return the function ``search`` of a Python file.

    Args:
        path: Path of the file.

    Returns:
        A function of an Optuna trial that returns the fields of the trial.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be run or defines no function ``search``. The returned function raises it too,
            if ``search`` fails or does not return a dict.

    Example:
        >>> code = 'def search(trial): return {"hidden": trial.suggest_int("hidden", 32, 256, log=True)}'
        >>> size = Path("space.py").write_text(code)
        >>> search = egru.sweep.read_search(Path("space.py"))
    """
    if not path.is_file():
        raise FileNotFoundError(f"--search: {path} does not exist")
    spec = importlib.util.spec_from_file_location("egru_search", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--search: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    search = getattr(module, "search", None)
    if not callable(search):
        raise ValueError(f"{path} must define a function search(trial) that returns a dict of fields")

    def checked_search(trial: Any) -> dict[str, Any]:
        try:
            fields = search(trial)
        except Exception as error:
            raise ValueError(f"{path}: search: {type(error).__name__}: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path}: search must return a dict of fields, got {type(fields).__name__}")
        return fields

    return checked_search
