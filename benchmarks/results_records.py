"""Records of the runs that docs/results.md reports, and the numbers derived from them."""

import dataclasses
import json
import pathlib
import statistics
from typing import Any

from results_tasks import Score

from egru.environment import Environment
from egru.experiments import RECIPES, Config
from egru.experiments.config import read_config
from egru.experiments.tables import ALIASES
from egru.runs.load import training_metrics
from egru.training import EpochMetrics, Result, Run

BEST = {"accuracy": max, "perplexity": min}


@dataclasses.dataclass(frozen=True)
class Record:
    """The records of a run.

    Attributes:
        name: Name of the folder.
        recipe: Current name of the recipe.
        config: Configuration of the run.
        environment: Software and hardware.
        metrics: Metrics of each epoch.
        result: Result on the test split. None if the run is unfinished.
        engine: Streaming benchmark of a language model, from ``benchmarks/language_engine.py``. None if not measured.
    """

    name: str
    recipe: str
    config: Config
    environment: Environment
    metrics: list[EpochMetrics]
    result: Result | None
    engine: dict[str, Any] | None

    @property
    def is_derived(self) -> bool:
        """Whether the run was derived from another one, whose metrics it shares."""
        return self.result is not None and self.result.derivation is not None

    @property
    def note(self) -> str:
        """Remark that follows the seed in the table."""
        if self.is_derived:
            return ", thresholds raised"
        if self.config.start_from:
            return ", fine-tuned"
        default = RECIPES[self.recipe].make()
        changed = [name for name in ("reset", "rate_loss") if getattr(self.config, name) != getattr(default, name)]
        settings = "".join(f", {name.replace('_', ' ')} {getattr(self.config, name)}" for name in changed)
        return settings + (", unfinished" if self.result is None else "")

    @property
    def has_events(self) -> bool:
        return self.metrics[-1].activity.backward_sparsity is not None


def read_record(folder: pathlib.Path) -> Record:
    run, engine = Run.open(folder), folder / "engine.json"
    recipe, config = read_config(run.config())
    measured = json.loads(engine.read_text()) if engine.exists() else None
    recipe = ALIASES.get(recipe, recipe)
    return Record(folder.name, recipe, config, run.environment(), training_metrics(run), run.result(), measured)


def wall_clock(metrics: list[EpochMetrics]) -> tuple[float, bool]:
    """Return the seconds of training, and whether they include the time for checkpoints.

    ``elapsed`` restarts from zero when a run is resumed, so its last value before each restart is added up.
    """
    elapsed = [line.elapsed for line in metrics if line.elapsed is not None]
    if not metrics or len(elapsed) < len(metrics):
        return sum(line.seconds for line in metrics), False
    return sum(now for now, after in zip(elapsed, [*elapsed[1:], 0.0], strict=True) if after < now), True


def curve(run: Record, *path: str) -> list[tuple[int, float]]:
    """Return epochs and values of the metric at ``path``, for example ("validation", "loss"), where it was measured."""
    points = []
    for line in run.metrics:
        value: Any = line
        for key in path:
            value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        if value is not None:
            points.append((line.epoch, value))
    return points


def training_sparsity(run: Record, name: str) -> float | None:
    """Return a sparsity in training mode, averaged over the epochs as in the paper."""
    values = [value for _, value in curve(run, "training_activity", name)]
    return statistics.mean(values) if values else None


def validation_score(run: Record, score: Score) -> float:
    """Return the validation score of the epoch whose weights were tested, or the best so far."""
    if run.result is not None and run.result.derivation is not None:
        return getattr(run.result.derivation.validation, score)
    scores = dict(curve(run, "validation", score))
    return BEST[score](scores.values()) if run.result is None else scores[run.result.best_epoch]
