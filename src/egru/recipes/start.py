"""Runs of recipes: start one, go on with one, score one."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import nn

from egru.activity import ActivitySummary
from egru.recipes.build import build, load
from egru.recipes.config import Config, read, stored
from egru.recipes.pages import report
from egru.recipes.trained import trained
from egru.runtime.export import save_parts
from egru.training import (
    Result,
    Run,
    RunError,
    Scores,
    Task,
    bar,
    checkpoint,
    score,
    tensorboard,
    train,
)
from egru.training.run import CONFIG, ENVIRONMENT, METRICS, RESULT

RECORDS = (CONFIG, ENVIRONMENT, METRICS, RESULT)
"""What a run is apart from its checkpoints and its page."""


def start(
    recipe: str, config: Config, folder: Path, say: Callable[[str], None] = print, minutes: float | None = None
) -> Result:
    """Train ``config``, made by ``recipe``, in a new folder; it is made once data and model are there.

    After ``minutes`` the run is saved at the end of an epoch and :class:`egru.training.Paused` raised.
    """
    if config.root is not None:
        config = dataclasses.replace(config, root=os.path.abspath(config.root))
    model, task = build(config, load(config))
    return _go(recipe, config, model, task, Run.create(folder, stored(recipe, config), say), minutes)


def resume(folder: Path, say: Callable[[str], None] = print, minutes: float | None = None) -> Result:
    """Go on with the run in ``folder`` from its newest intact checkpoint, for ``minutes`` or to its end."""
    run = Run.open(folder, say)
    if run.result() is not None:
        raise RunError(f"{folder} is finished: see its result.json, or `egru evaluate {folder}`")
    recipe, config = read(run.config())
    return _go(recipe, config, *build(config, load(config)), run, minutes)


def evaluate(
    folder: Path, split: str = "test", say: Callable[[str], None] = print, device: str | None = None
) -> tuple[Scores, ActivitySummary, int | None]:
    """Score the best epoch of a run on a split: scores, activity and the epoch."""
    found = trained(folder, device, say)
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
    run, out = Run.open(folder, say), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists and is not an empty folder; name another one")
    paths = save_parts(checkpoint.read_weights(run.at(run.best())), out, weights, largest)
    for name in RECORDS:
        if (run.folder / name).exists():
            paths.append(Path(shutil.copyfile(run.folder / name, out / name)))
    return paths


def _go(recipe: str, config: Config, model: nn.Module, task: Task, run: Run, minutes: float | None) -> Result:
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.alone())
        progress = stack.enter_context(bar(recipe, config.epochs))
        if config.tensorboard:
            progress = stack.enter_context(tensorboard(progress, run.folder / "tensorboard"))
        result = train(model, task, config, run, progress, minutes)
    report([run.folder], say=run.say)
    return result
