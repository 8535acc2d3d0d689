"""Runs of recipes: start one, go on with one, score one."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from egru.activity import ActivitySummary
from egru.compress import raise_thresholds
from egru.experiments.build import build, load
from egru.experiments.config import Config, read, stored
from egru.runs.report import report
from egru.runs.trained import anywhere, new_folder, run_or_pretrained, start_with, trained
from egru.runtime.export import save_parts
from egru.training import (
    Result,
    Run,
    RunError,
    Scores,
    Silent,
    Task,
    bar,
    checkpoint,
    distributed,
    score,
    tensorboard,
    train,
)
from egru.training.loop import check_minutes
from egru.training.progress import Progress
from egru.training.run import CONFIG


def start(
    recipe: str,
    config: Config,
    folder: Path,
    say: Callable[[str], None] = print,
    minutes: float | None = None,
    progress: Progress | None = None,
    page: bool = True,
) -> Result:
    """Train ``config``, made by ``recipe``, in a new folder; it is made once data and model are there.

    After ``minutes`` the run is saved at the end of an epoch and :class:`egru.training.Paused` raised.
    ``progress``: who hears of it; a bar if None. ``page``: write the report page in the end.
    """
    check_minutes(minutes)
    if config.root is not None:
        config = dataclasses.replace(config, root=os.path.abspath(config.root))
    if config.start_from is not None:
        config = dataclasses.replace(config, start_from=anywhere(config.start_from))
    with distributed.group(config.device) as device:
        placed = dataclasses.replace(config, device=device)
        model, task = build(placed, load(placed))
        if config.start_from is not None:
            start_with(model, config.start_from, say)
        if config.threshold_floor:
            raise_thresholds(model, config.threshold_floor)
        with distributed.first_goes_first():
            own = stored(recipe, config)
            run = Run.open(folder, say) if _again(folder, own) else Run.create(folder, own, say)
        return _go(recipe, placed, model, task, run, minutes, progress, page)


def _again(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the folder holds this very run: of the first process, or from before `torchrun` started all again."""
    if distributed.rank() > 0:
        return True
    there = distributed.elastic() and (folder / CONFIG).exists()
    return there and Run.open(folder).config() == json.loads(json.dumps(config))


def resume(folder: Path, say: Callable[[str], None] = print, minutes: float | None = None) -> Result:
    """Go on with the run in ``folder`` from its newest intact checkpoint, for ``minutes`` or to its end."""
    run = Run.open(folder, say)
    if run.result() is not None:
        raise RunError(f"{folder} is finished: see its result.json, or `egru evaluate {folder}`")
    recipe, config = read(run.config())
    with distributed.group(config.device) as device:
        config = dataclasses.replace(config, device=device)
        return _go(recipe, config, *build(config, load(config)), run, minutes)


def evaluate(
    folder: Path, split: str = "test", say: Callable[[str], None] = print, device: str | None = None
) -> tuple[Scores, ActivitySummary, int | None]:
    """Score the best epoch of a run, or of a pretrained model by its name, on a split: scores, activity, the epoch."""
    found = trained(*run_or_pretrained(folder, device), say)
    scores, activity = score(found.model, found.task, split)
    return scores, activity, found.epoch


def export(
    folder: Path,
    out: Path,
    weights: str = "bfloat16",
    largest: int = 16 << 20,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Write the best epoch's weights, in files of at most ``largest`` bytes, and what the run recorded to ``out``."""
    run, out = Run.open(folder, say), new_folder(out)
    paths = save_parts(checkpoint.read_weights(run.at(run.best())), out, weights, largest)
    return paths + run.copy_records(out)


def _go(
    recipe: str,
    config: Config,
    model: nn.Module,
    task: Task,
    run: Run,
    minutes: float | None = None,
    progress: Progress | None = None,
    page: bool = True,
) -> Result:
    with contextlib.ExitStack() as stack:
        first = distributed.rank() == 0
        if first:
            stack.enter_context(run.alone())
        if not first:
            progress = Silent()
        elif progress is None:
            progress = stack.enter_context(bar(recipe, config.epochs))
        if config.tensorboard and first:
            progress = stack.enter_context(tensorboard(progress, run.folder / "tensorboard"))
        result = train(model, task, config, run, progress, minutes)
    if page and first:
        report([run.folder], say=run.say)
    return result
