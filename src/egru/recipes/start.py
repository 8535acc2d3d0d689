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
from egru.recipes.build import build, load
from egru.recipes.config import Config, read, stored
from egru.report import Epoch, RunReport, write_report
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
from egru.training.progress import Progress
from egru.training.run import CONFIG


def start(
    recipe: str,
    config: Config,
    folder: Path,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
    page: bool = True,
) -> Result:
    """Train ``config``, made by ``recipe``, in a new folder; it is made once data and model are there.

    ``progress``: who hears of it; a bar if None. ``page``: write the report page in the end.
    """
    if config.root is not None:
        config = dataclasses.replace(config, root=os.path.abspath(config.root))
    with distributed.group(config.device) as device:
        placed = dataclasses.replace(config, device=device)
        model, task = build(placed, load(placed))
        with distributed.first_goes_first():
            own = stored(recipe, config)
            run = Run.open(folder, say) if _again(folder, own) else Run.create(folder, own, say)
        return _go(recipe, placed, model, task, run, progress, page)


def _again(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the folder holds this very run: of the first process, or from before `torchrun` started all again."""
    if distributed.rank() > 0:
        return True
    there = distributed.elastic() and (folder / CONFIG).exists()
    return there and Run.open(folder).config() == json.loads(json.dumps(config))


def resume(folder: Path, say: Callable[[str], None] = print) -> Result:
    """Go on with the run in ``folder`` from its newest intact checkpoint."""
    run = Run.open(folder, say)
    if run.result() is not None:
        raise RunError(f"{folder} is finished: see its result.json, or `egru evaluate {folder}`")
    recipe, config = read(run.config())
    with distributed.group(config.device) as device:
        config = dataclasses.replace(config, device=device)
        return _go(recipe, config, *build(config, load(config)), run)


def evaluate(
    folder: Path, split: str = "test", say: Callable[[str], None] = print
) -> tuple[Scores, ActivitySummary, int]:
    """Score the best epoch of a run on a split: scores, activity and the epoch."""
    run = Run.open(folder, say)
    _, config = read(run.config())
    model, task = build(config, load(config))
    best = run.best()
    checkpoint.load_weights(run.at(best), model)
    scores, activity = score(model, task, split)
    return scores, activity, best


def _go(
    recipe: str,
    config: Config,
    model: nn.Module,
    task: Task,
    run: Run,
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
        result = train(model, task, config, run, progress)
    if page and first:
        _report(recipe, config, run, result)
    return result


def _report(recipe: str, config: Config, run: Run, result: Result) -> None:
    """The run's page; a run without matplotlib is still a run."""
    history = tuple(
        Epoch(
            line["epoch"],
            line["train"]["loss"],
            line["validation"]["accuracy"],
            None if line["activity"]["backward_sparsity"] is None else line["activity"]["activity_sparsity"],
            line["seconds"],
        )
        for line in run.metrics()
    )
    name = f"{config.cell.upper()} {config.hidden}"
    report = RunReport(
        name, history, result.test.accuracy, result.activity, result.seconds, config.seed, result.test.perplexity
    )
    folder, command = run.folder / "report", f"egru train {recipe}"
    try:
        write_report(folder, recipe, [report], [], command=command, config=dataclasses.asdict(config))
    except ImportError as error:
        run.say(f"no report page: {error}")
