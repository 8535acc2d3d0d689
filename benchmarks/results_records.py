"""Records of the runs that docs/results/experiments.md reports, and the numbers derived from them."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

from results_tasks import Score

from egru.environment import Environment
from egru.experiments import RECIPES, Config
from egru.experiments.config import read_config
from egru.experiments.results import without_seed
from egru.experiments.tables import ALIASES
from egru.runs.command import recorded_command
from egru.runs.load import training_metrics
from egru.runs.reproduce import RECORD
from egru.training import EpochMetrics, Result, Run
from egru.training.records import KeptRecord

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
        remark: Remark of the record, such as the precision of the weights that the run started from. May be empty.
    """

    name: str
    recipe: str
    config: Config
    environment: Environment
    metrics: list[EpochMetrics]
    result: Result | None
    engine: dict[str, Any] | None
    remark: str = ""

    @property
    def is_derived(self) -> bool:
        """Whether the run was derived from another one, whose metrics it shares."""
        return self.result is not None and self.result.derivation is not None

    @property
    def note(self) -> str:
        """What follows the seed in the table."""
        remark = f", {self.remark}" if self.remark else ""
        if self.is_derived:
            return f", thresholds raised{remark}"
        if self.config.start_from:
            return f", fine-tuned{self._changed('hidden', 'weight_sparsity')}{remark}"
        return self._changed("reset", "rate_loss") + (", unfinished" if self.result is None else "") + remark

    def _changed(self, *names: str) -> str:
        """Return those of the settings that differ from the recipe."""
        default = RECIPES[self.recipe].make()
        changed = [name for name in names if getattr(self.config, name) != getattr(default, name)]
        return "".join(f", {name.replace('_', ' ')} {getattr(self.config, name)}" for name in changed)

    @property
    def machine(self) -> str:
        """The GPU, or the operating system and architecture."""
        return self.environment.cuda or self.environment.machine

    @property
    def has_events(self) -> bool:
        return self.metrics[-1].activity.backward_sparsity is not None


def read_record(folder: pathlib.Path) -> Record:
    run, engine = Run.open(folder), folder / "engine.json"
    recipe, config = read_config(run.config())
    measured = json.loads(engine.read_text()) if engine.exists() else None
    recipe = ALIASES.get(recipe, recipe)
    remark = KeptRecord.read(folder / RECORD).note if (folder / RECORD).exists() else ""
    return Record(folder.name, recipe, config, run.environment(), training_metrics(run), run.result(), measured, remark)


def group_seeds(runs: Iterable[Record]) -> list[list[Record]]:
    """Group the runs of a recipe that differ only in their seed."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        command = without_seed(recorded_command(run.recipe, run.config, run.result))
        groups.setdefault(f"{command}{run.note}", []).append(run)
    return list(groups.values())


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


def validation_score(run: Record, score: Score) -> float:
    """Return the validation score of the epoch whose weights were tested, or the best so far."""
    if run.result is not None and run.result.derivation is not None:
        return getattr(run.result.derivation.validation, score)
    scores = dict(curve(run, "validation", score))
    return BEST[score](scores.values()) if run.result is None else scores[run.result.best_epoch]


def one_column_perplexity(run: Record, runs: Iterable[Record]) -> float | None:
    """Return the validation perplexity of a text read in one column, like the test text. None if it was not measured.

    `egru quieten` measures it, for the original network first.
    """
    result = run.result
    if result is not None and result.derivation is not None:
        chosen = {trial.floor: trial for trial in result.derivation.trials}[run.config.threshold_floor]
        return chosen.validation.perplexity
    for other in runs:
        derivation = None if other.result is None else other.result.derivation
        if derivation is not None and pathlib.Path(derivation.source).name == run.name and not other.remark:
            return derivation.trials[0].validation.perplexity
    return None
