"""The page of a sweep: a table of its trials, quality against MACs, and quality against each setting."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from egru import format
from egru.environment import Environment
from egru.files import replace_file
from egru.report.figures import Figure
from egru.report.html import (
    FOLD,
    definition_list,
    document,
    figure_grid,
    folded,
    format_value,
    json_value,
    small,
    table,
)
from egru.report.scatter import Axis, panel
from egru.report.settings import environment_entries

SPREAD = 4
"""Figures leave out trials that are further from the best one than this multiple of the median's distance."""


@dataclasses.dataclass(frozen=True)
class TrialReport:
    """One trial of a sweep, at its best epoch on the validation split.

    Attributes:
        number: Number of the trial.
        state: "complete", "pruned" or "failed", or "stopped" if it is not known why the trial has no further epochs.
        quality: Accuracy as a fraction, or perplexity. None if the trial has no epoch or diverged.
        macs: Effective forward multiply-accumulates per step. None if the trial has no epoch.
        activity_sparsity: Fraction of outputs without an event. None for a dense model or without an epoch.
        epochs: Number of epochs.
        seconds: Duration of training.
        settings: The settings of the trial.
    """

    number: int
    state: Literal["complete", "pruned", "failed", "stopped"]
    quality: float | None
    macs: float | None
    activity_sparsity: float | None
    epochs: int
    seconds: float
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """The trials of a sweep.

    Attributes:
        name: Name of the sweep.
        recipe: Name of the recipe.
        score: What ``quality`` of a trial is. A higher accuracy and a lower perplexity are better.
        trials: The trials.
        environment: Software and hardware of the trials.
        command: Command that writes the page.
        notes: Remarks, for example why a trial is missing.

    Raises:
        ValueError: If there are no trials.
    """

    name: str
    recipe: str
    score: Literal["accuracy", "perplexity"]
    trials: tuple[TrialReport, ...]
    environment: Environment
    command: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.trials:
            raise ValueError(f"SweepReport {self.name!r}: trials must contain at least one trial, got none")

    def ranked(self) -> list[TrialReport]:
        """Return the complete trials, best first, then the others with an epoch, best first, then the rest."""

        def key(trial: TrialReport) -> tuple[bool, bool, float]:
            return trial.state != "complete", trial.quality is None, -self.merit(trial)

        return sorted(self.trials, key=key)

    def front(self) -> list[TrialReport]:
        """Return the complete trials that no other one surpasses in quality and MACs, in order of MACs."""
        complete = [trial for trial in self.trials if trial.state == "complete" and trial.quality is not None]
        front: list[TrialReport] = []
        for trial in sorted(complete, key=lambda trial: (trial.macs or 0.0, -self.merit(trial))):
            if not front or self.merit(trial) > self.merit(front[-1]):
                front.append(trial)
        return front

    def merit(self, trial: TrialReport) -> float:
        """Return the quality with the sign for which larger is better. Without a quality, zero."""
        return (trial.quality or 0.0) * (1 if self.score == "accuracy" else -1)

    def show(self, quality: float | None) -> str:
        """Format a quality."""
        if quality is None:
            return "-"
        return format.percent(quality, 2) if self.score == "accuracy" else f"{quality:.2f}"

    def varied(self) -> list[str]:
        """Return the names of the settings that differ between trials."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.settings)
        texts = {name: {_text(trial, name) for trial in self.trials} for name in names}
        return [name for name, values in texts.items() if len(values) > 1]


def write_sweep_report(folder: Path, sweep: SweepReport) -> Path:
    """Write ``index.html``, the page of a sweep, to ``folder``.

    Args:
        folder: Folder to write to. It is created if it does not exist.
        sweep: The trials.

    Returns:
        The path of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "index.html", _page(sweep).encode())
    return folder / "index.html"


def _page(sweep: SweepReport) -> str:
    title = f"Sweep {sweep.name}: {sweep.recipe}, {_count(len(sweep.trials), 'trial')}"
    drawn, left_out = _drawn_trials(sweep)
    quality = [_quality(sweep, drawn, left_out)] if drawn else []
    slices = [_slices(sweep, drawn, left_out)] if drawn and sweep.varied() else []
    parts = [f'<p class="kicker">{escape(title)}</p>', *_headline(sweep), *map(small, sweep.notes)]
    if quality:
        parts += ["<h2>Quality against computation</h2>", figure_grid(quality)]
    if slices:
        parts += ["<h2>Quality by setting</h2>", figure_grid(slices)]
    parts += ["<h2>Trials</h2>", _table(sweep), f"<h2>Command</h2><pre>{escape(sweep.command)}</pre>"]
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = definition_list(environment_entries(sweep.environment) | {"page written": date})
    parts.append(
        f'<div class="facts"><section><h2>Shared settings</h2>{_shared(sweep)}</section>'
        f"<section><h2>Environment</h2>{facts}</section></div>"
    )
    return document(title, parts, [*quality, *slices])


def _headline(sweep: SweepReport) -> list[str]:
    """Name the best trial and the Pareto front, and how to score the test split."""
    front = sweep.front()
    if not front:
        return ["<h1>No trial is complete.</h1>"]
    best = max(front, key=sweep.merit)
    least = front[0]
    parts = [f"<h1>The best {sweep.score} is <em>{escape(sweep.show(best.quality))}</em>.</h1>"]
    text = f"Trial {best.number} reached it with {format.count(best.macs or 0.0)} MACs per step."
    if len(front) > 1:
        text += (
            f" {len(front)} trials form the Pareto front. The cheapest, trial {least.number}, has {sweep.score} "
            f"{sweep.show(least.quality)} with {format.count(least.macs or 0.0)} MACs per step."
        )
    note = (
        "All numbers are those of a trial's best epoch on the validation split. The test split was not scored. To "
        f"score a trial, run <code>egru train --resume {escape(sweep.name)}/trial-{best.number:05d}</code>."
    )
    return [*parts, f'<p class="lead">{escape(text)}</p>', f'<p class="small">{note}</p>']


def _drawn_trials(sweep: SweepReport) -> tuple[list[TrialReport], str]:
    """Return the trials that figures show, and a sentence about those that would stretch the axis."""
    measured = [trial for trial in sweep.ranked() if trial.quality is not None]
    merits = sorted(map(sweep.merit, measured), reverse=True)
    if not merits:
        return [], ""
    limit = merits[0] - SPREAD * (merits[0] - merits[len(merits) // 2])
    drawn = [trial for trial in measured if sweep.merit(trial) >= limit]
    if len(drawn) == len(measured):
        return drawn, ""
    side = "below" if sweep.score == "accuracy" else "above"
    number = _count(len(measured) - len(drawn), "trial")
    return drawn, f" Left out: {number} with {sweep.score} {side} {sweep.show(abs(limit))}."


def _points(sweep: SweepReport, trials: Sequence[TrialReport], x: Sequence[float]) -> list[dict[str, Any]]:
    front = {trial.number for trial in sweep.front()}
    return [
        {"x": value, "y": trial.quality, "name": f"trial {trial.number}", "note": _note(sweep, trial)}
        | {"colour": "var(--hue0)" if trial.number in front else "var(--dense)", "hollow": trial.state != "complete"}
        | ({"label": str(trial.number), "large": True} if trial.number in front else {})
        for trial, value in zip(trials, x, strict=True)
    ]


def _note(sweep: SweepReport, trial: TrialReport) -> str:
    settings = ", ".join(f"{name} {_text(trial, name)}" for name in sweep.varied())
    return settings if trial.state == "complete" else f"{trial.state} after epoch {trial.epochs}, {settings}"


def _vertical(sweep: SweepReport) -> Axis:
    return Axis(f"validation {sweep.score}", "percent" if sweep.score == "accuracy" else "number")


def _quality(sweep: SweepReport, trials: Sequence[TrialReport], left_out: str) -> Figure:
    points = _points(sweep, trials, [trial.macs or 0.0 for trial in trials])
    numbers = [trial.number for trial in trials]
    front = [numbers.index(trial.number) for trial in sweep.front() if trial.number in numbers]
    title = f"Validation {sweep.score} against forward MACs per step"
    data = panel(title, Axis("forward MACs per step", "count"), _vertical(sweep), points, front)
    caption = (
        "Each point is a trial. The line connects the Pareto front: no other complete trial has both a better "
        f"{sweep.score} and fewer MACs. Hollow points are trials that were not completed.{left_out}"
    )
    return Figure("pareto", f"Scatter plot: {title}", caption, {"kind": "scatter", "panels": [data]}, wide=True)


def _slices(sweep: SweepReport, trials: Sequence[TrialReport], left_out: str) -> Figure:
    """Draw one panel per varied setting."""
    panels: list[dict[str, Any]] = []
    for name in sweep.varied():
        values = [json_value(trial.settings.get(name)) for trial in trials]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            axis, x = Axis(name), [float(value) for value in values]
        else:
            texts = [_text(trial, name) for trial in trials]
            categories = tuple(sorted(set(texts)))
            axis, x = Axis(name, categories=categories), [float(categories.index(text)) for text in texts]
        points = [{key: v for key, v in point.items() if key != "label"} for point in _points(sweep, trials, x)]
        panels.append(panel(name, axis, _vertical(sweep), points))
    caption = f"Each panel shows all trials by the value of one setting. Blue points are on the Pareto front.{left_out}"
    description = f"Scatter plots: validation {sweep.score} by the value of each setting"
    return Figure("slices", description, caption, {"kind": "scatter", "panels": panels}, wide=True)


def _table(sweep: SweepReport) -> str:
    front = {trial.number for trial in sweep.front()}
    varied = sweep.varied()
    columns = ["state", sweep.score, "MACs per step", "activity sparsity", "epochs", "training time", *varied]
    rows = [
        (
            f"{trial.number}{' (front)' if trial.number in front else ''}",
            [
                trial.state,
                sweep.show(trial.quality),
                "-" if trial.macs is None else format.count(trial.macs),
                format.percent(trial.activity_sparsity),
                str(trial.epochs),
                format.seconds(trial.seconds),
                *(_text(trial, name) for name in varied),
            ],
        )
        for trial in sweep.ranked()
    ]
    return table(columns, rows, corner="trial", narrow=True) + small(
        "Complete trials come first, the best one at the top."
    )


def _shared(sweep: SweepReport) -> str:
    varied = set(sweep.varied())
    shared = {name: _text(sweep.trials[0], name) for name in sweep.trials[0].settings if name not in varied}
    entries = definition_list(shared)
    return entries if len(shared) <= FOLD else folded(f"{len(shared)} settings", entries)


def _text(trial: TrialReport, name: str) -> str:
    if name not in trial.settings:
        return "-"
    value = json_value(trial.settings[name])
    return f"{value:.4g}" if isinstance(value, float) else format_value(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
