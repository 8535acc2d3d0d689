"""Runs of recipes: start one, go on with one, score one."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from egru.activity import ActivitySummary
from egru.recipes.build import build, load
from egru.recipes.config import Config, kind_of
from egru.report import Epoch, RunReport, write_report
from egru.training import (
    Result,
    Run,
    RunError,
    Scores,
    bar,
    checkpoint,
    from_plain,
    score,
    tensorboard,
    to_plain,
    train,
)


def start(config: Config, folder: Path, say: Callable[[str], None] = print) -> Result:
    """Train ``config`` in a new folder. The data are looked for before the folder is made."""
    data = load(config)
    plain = to_plain(config)
    if config.root is not None:
        plain["root"] = os.path.abspath(config.root)
    return _go(config, data, Run.create(folder, plain, say))


def resume(folder: Path, say: Callable[[str], None] = print) -> Result:
    """Go on with the run in ``folder`` from its newest intact checkpoint."""
    run = Run.open(folder, say)
    if run.result() is not None:
        raise RunError(f"{folder} is finished: see its result.json, or `egru evaluate {folder}`")
    config = stored_config(run)
    return _go(config, load(config), run)


def evaluate(
    folder: Path, split: str = "test", say: Callable[[str], None] = print
) -> tuple[Scores, ActivitySummary, int]:
    """Score the best epoch of a run on a split: scores, activity and the epoch."""
    run = Run.open(folder, say)
    config = stored_config(run)
    model, task = build(config, load(config))
    best = run.best()
    checkpoint.load_weights(run.at(best), model)
    scores, activity = score(model, task, split)
    return scores, activity, best


def stored_config(run: Run) -> Config:
    plain = run.config()
    return from_plain(kind_of(plain), plain)


def _go(config: Config, data: object, run: Run) -> Result:
    model, task = build(config, data)  # pyright: ignore[reportArgumentType]
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(bar(config.recipe or "run", config.epochs))
        if config.tensorboard:
            progress = stack.enter_context(tensorboard(progress, run.folder / "tensorboard"))
        result = train(model, task, config, run, progress)
    _report(config, run, result)
    return result


def _report(config: Config, run: Run, result: Result) -> None:
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
    title = config.recipe or run.folder.name
    command = f"egru train {config.recipe}"
    try:
        write_report(run.folder / "report", title, [report], [], command=command, config=dataclasses.asdict(config))
    except ImportError as error:
        run.say(f"no report page: {error}")
