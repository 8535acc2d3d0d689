"""The page of a sweep, from the records of its trials. Requires neither Optuna nor the study's storage."""

import csv
import math
from collections.abc import Callable
from pathlib import Path

from egru.experiments.config import Config, LanguageConfig
from egru.report.sweep import SweepReport, TrialReport, write_sweep_report
from egru.runs.command import flatten
from egru.runs.load import read_run_config
from egru.training import EpochMetrics, Run, RunError, to_plain
from egru.training.run import CONFIG

TRIALS = "trials.csv"
"""The table of trials that a sweep writes at its end."""
_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
_LOCAL_SETTINGS = ("root", "device", "tensorboard")
"""Settings that may differ between trials without being part of the search."""


def is_sweep(folder: Path) -> bool:
    """Return whether a folder contains the runs of a sweep.

    Args:
        folder: Any folder.

    Example:
        >>> egru.sweep.is_sweep(Path("runs/digits"))
        False
    """
    return not (folder / CONFIG).exists() and any(folder.glob("trial-*/config.json"))


def report(folder: Path, out: Path | None = None, log: Callable[[str], None] = print) -> Path:
    """Write the page of a sweep: its trials, the Pareto front of quality and MACs, and quality by setting.

    The page can be written at any time, also while the sweep is running.

    Args:
        folder: The folder of the sweep.
        out: The folder to write the page to. If None, ``report`` in ``folder``.
        log: Called with messages for the user, such as a trial that cannot be read.

    Returns:
        The path of the page.

    Raises:
        RunError: If ``folder`` is not the folder of a sweep, or no trial can be read.

    Example:
        >>> page = egru.sweep.report(Path("sweeps/digits"))  # doctest: +SKIP
    """
    folder = Path(folder)
    if not is_sweep(folder):
        raise RunError(f"{folder} is not a sweep: it has no folders trial-*/ with a {CONFIG}")
    states = _recorded_states(folder / TRIALS)
    trials: list[TrialReport] = []
    notes: list[str] = []
    first: tuple[Run, str, Config] | None = None
    for path in sorted(folder.glob("trial-*")):
        try:
            run = Run.open(path, log)
            recipe, config = read_run_config(run)
            trials.append(_read_trial(run, config, states))
        except (RunError, ValueError) as error:
            notes.append(f"{path.name} is left out: {' '.join(str(error).split())}.")
            log(notes[-1])
        else:
            first = first or (run, recipe, config)
    if first is None:
        raise RunError(f"{folder} has no trial that can be read")
    run, recipe, config = first
    score = "perplexity" if isinstance(config, LanguageConfig) else "accuracy"
    command = f"egru report {folder}"
    sweep = SweepReport(str(folder), recipe, score, tuple(trials), run.environment(), command, tuple(notes))
    return write_sweep_report(folder / "report" if out is None else Path(out), sweep)


def _recorded_states(path: Path) -> dict[int, str]:
    """Return the states in the table of trials, by number. Empty if the sweep has not ended yet."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {int(row["trial"]): _STATES[row["state"]] for row in rows if row["state"] in _STATES}


def _read_trial(run: Run, config: Config, states: dict[int, str]) -> TrialReport:
    number, metrics = int(run.folder.name.removeprefix("trial-")), run.metrics()
    best = _best_epoch(metrics, config)
    settings = {name: value for name, value in flatten(to_plain(config)).items() if name not in _LOCAL_SETTINGS}
    state = states.get(number, "complete" if metrics and metrics[-1].epoch == config.epochs else "stopped")
    return TrialReport(
        number,
        state,  # pyright: ignore[reportArgumentType]
        None if best is None else _quality(best),
        None if best is None else best.activity.forward_macs,
        None if best is None or best.activity.backward_sparsity is None else best.activity.activity_sparsity,
        len(metrics),
        sum(line.seconds for line in metrics),
        settings,
    )


def _quality(line: EpochMetrics) -> float | None:
    """Return accuracy or perplexity, or None if it is not finite."""
    perplexity = line.validation.perplexity
    quality = line.validation.accuracy if perplexity is None else perplexity
    return quality if math.isfinite(quality) else None


def _best_epoch(metrics: list[EpochMetrics], config: Config) -> EpochMetrics | None:
    """Return the epoch that the trial is judged by: the best of those with a checkpoint, as in training."""
    saved = [line for line in metrics if line.epoch % config.save_every == 0 or line.epoch == config.epochs]

    def merit(line: EpochMetrics) -> tuple[float, ...]:
        scores = line.validation
        loss = math.inf if math.isnan(scores.loss) else scores.loss
        return (scores.accuracy, -loss) if scores.perplexity is None else (-loss,)

    return max(saved or metrics, key=merit, default=None)
