"""What a sweep is told: a recipe, a search space, objectives, a place to remember."""

import dataclasses
import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from egru.experiments import Config, LanguageConfig
from egru.report import format
from egru.training import EpochMetrics

Search = Callable[[Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep's settings, as every worker gets them."""

    recipe: str
    config: Config
    """The recipe's own fields; what ``search`` returns goes on top."""
    search: Path
    """A Python file with a function ``search(trial)`` that returns fields."""
    folder: Path
    """Where trials go, one run folder each."""
    storage: str
    """A journal file, or the URL of a database."""
    study: str
    objectives: tuple[str, ...] = ("quality",)
    trials: int = 20
    """Trials in the study when the sweep is done, those of earlier calls and of other machines included."""
    workers: int = 1
    pruner: Literal["median", "hyperband", "none"] = "median"
    devices: tuple[str, ...] = ()
    """Workers take them in turn; none: the config's own."""
    heartbeat: int = 60
    """Seconds between two signs of life of a trial in a database; two missed in a row, and it counts as lost."""

    def __post_init__(self) -> None:
        for name in ("trials", "workers", "heartbeat"):
            if getattr(self, name) < 1:
                raise ValueError(f"sweep: {name} must be at least 1, got {getattr(self, name)}")
        known = goals(self.config)
        for name in self.objectives:
            if name not in known:
                raise ValueError(f"sweep: objectives must be of {', '.join(known)}, got {name!r}")
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise ValueError(f"sweep: objectives must be one or more, none twice, got {', '.join(self.objectives)!r}")
        if len(self.objectives) > 1 and self.pruner != "none":
            raise ValueError(f"sweep: pruner must be none with several objectives, got {self.pruner!r}")

    @property
    def home(self) -> str:
        """Which machine and folder a trial belongs to."""
        return f"{socket.gethostname()}:{self.folder.resolve()}"

    def trial_folder(self, number: int) -> Path:
        return self.folder / f"trial-{number:05d}"

    def goals(self) -> list["Goal"]:
        known = goals(self.config)
        return [known[name] for name in self.objectives]


@dataclasses.dataclass(frozen=True)
class Goal:
    """One objective: what an epoch's line of metrics says of it, and how people read it."""

    label: str
    direction: Literal["minimize", "maximize"]
    of: Callable[[EpochMetrics], float]
    show: Callable[[float], str]


def goals(config: Config) -> dict[str, Goal]:
    """Every objective there is, by name. All are read in validation."""
    if isinstance(config, LanguageConfig):
        quality = Goal("perplexity", "minimize", lambda line: _known(line.validation.perplexity), "{:.2f}".format)
    else:
        quality = Goal("accuracy", "maximize", lambda line: line.validation.accuracy, format.percent)
    return {
        "quality": quality,
        "macs": Goal("MACs a step", "minimize", lambda line: line.activity.forward_macs, format.count),
        "backward-macs": Goal(
            "backward MACs a step", "minimize", lambda line: line.activity.backward_macs, format.count
        ),
    }


def _known(perplexity: float | None) -> float:
    """Return the perplexity of a language model, which is always measured."""
    assert perplexity is not None
    return perplexity


def read_search(path: Path) -> Search:
    """The function ``search`` of a Python file; its errors, and those of calling it, are ValueErrors of one line."""
    if not path.is_file():
        raise FileNotFoundError(f"--search: there is no file {path}")
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
        raise ValueError(f"{path} has no function search(trial) that returns a dict of fields")

    def called(trial: Any) -> dict[str, Any]:
        try:
            fields = search(trial)
        except Exception as error:
            raise ValueError(f"{path}: search: {type(error).__name__}: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path}: search must return a dict of fields, got {type(fields).__name__}")
        return fields

    return called
