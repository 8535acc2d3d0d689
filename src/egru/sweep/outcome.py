"""The results of a sweep: a table for the terminal, a CSV file of all trials, the page, and the Pareto front."""

import csv
from pathlib import Path
from typing import Any

from egru.report import pareto_front
from egru.sweep.report import TRIALS, is_sweep, report
from egru.sweep.settings import Sweep

MAX_ROWS = 10
"""Maximum number of rows of the table with a single objective."""


def describe(trial: Any, sweep: Sweep) -> str:
    """Return the state, objectives and fields of a finished trial in one line."""
    fields = ", ".join(f"{name} {_short(value)}" for name, value in trial.params.items())
    match trial.state.name:
        case "COMPLETE":
            values = (f"{g.label} {g.show(v)}" for g, v in zip(sweep.goals(), trial.values, strict=True))
            return f"{', '.join(values)} ({fields})"
        case "PRUNED":
            return f"pruned after epoch {trial.last_step} ({fields})"
        case _:
            return f"failed ({fields})"


def ranked(study: Any, sweep: Sweep) -> list[Any]:
    """Return the complete trials, best first. With several objectives, the Pareto front sorted by the last one."""
    complete = [t for t in study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
    if len(sweep.objectives) > 1:
        return sorted(study.best_trials, key=lambda t: t.values[-1]) if complete else []
    return sorted(complete, key=lambda t: t.value, reverse=sweep.goals()[0].direction == "maximize")


def table(study: Any, sweep: Sweep) -> str:
    """Return a table of the best trials, or of the Pareto front, with their fields.

    Args:
        study: The Optuna study, from :func:`egru.sweep.sweep`.
        sweep: The settings of the sweep.

    Returns:
        The table as text.

    Example:
        >>> study = egru.sweep.sweep(settings)  # settings: an egru.sweep.Sweep  # doctest: +SKIP
        >>> print(egru.sweep.table(study, settings))  # doctest: +SKIP
    """
    rows = ranked(study, sweep)
    states = [t.state.name for t in study.get_trials(deepcopy=False)]
    counts = f"{states.count('COMPLETE')} complete, {states.count('PRUNED')} pruned, {states.count('FAIL')} failed"
    if not rows:
        return f"no complete trials ({counts})"
    fields = list(dict.fromkeys(name for trial in rows for name in trial.params))
    lines = [["trial", *(goal.label for goal in sweep.goals()), *fields]]
    for trial in rows if len(sweep.objectives) > 1 else rows[:MAX_ROWS]:
        values = [goal.show(value) for goal, value in zip(sweep.goals(), trial.values, strict=True)]
        lines.append([str(trial.number), *values, *(_short(trial.params.get(name, "-")) for name in fields)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
    title = f"Pareto front, {len(rows)} trials" if len(sweep.objectives) > 1 else f"best {len(lines) - 1} trials"
    return f"{title} on validation ({counts}):\n{body}"


def write_outcome(study: Any, sweep: Sweep) -> list[Path]:
    """Write ``trials.csv``, the page, and for two objectives ``pareto.svg`` and ``pareto.png`` to the sweep's folder.

    The page is left out if the folder contains no trial, because other machines ran them all.

    Args:
        study: The Optuna study, from :func:`egru.sweep.sweep`.
        sweep: The settings of the sweep.

    Returns:
        The files that were written.

    Example:
        >>> study = egru.sweep.sweep(settings)  # settings: an egru.sweep.Sweep  # doctest: +SKIP
        >>> files = egru.sweep.write_outcome(study, settings)  # doctest: +SKIP
    """
    trials = study.get_trials(deepcopy=False)
    fields = list(dict.fromkeys(name for trial in trials for name in trial.params))
    path = sweep.folder / TRIALS
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", "state", *sweep.objectives, *fields])
        for trial in trials:
            values = trial.values or [""] * len(sweep.objectives)
            writer.writerow([trial.number, trial.state.name, *values, *(trial.params.get(f, "") for f in fields)])
    written = [path, *([report(sweep.folder)] if is_sweep(sweep.folder) else [])]
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    if len(sweep.objectives) != 2 or not complete:
        return written
    quality, cost = sweep.goals()
    figure = pareto_front(
        [(trial.number, trial.values[1], trial.values[0]) for trial in complete],
        {trial.number for trial in study.best_trials},
        cost=cost.label,
        quality=f"{quality.label} on validation",
        format_cost=cost.show,
        format_quality=quality.show,
    )
    figures = [sweep.folder / "pareto.svg", sweep.folder / "pareto.png"]
    for target in figures:
        figure.savefig(target, dpi=160)
    return [*written, *figures]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
