"""Train a config in a new run folder, or resume a run."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from egru import training
from egru.compress import raise_thresholds
from egru.data import Classification, Text
from egru.experiments.build import build, load_data
from egru.experiments.config import Config, config_record
from egru.experiments.custom import Custom
from egru.runs.load import TrainedRun, build_run, initialise_from, read_run_config, resolve_source
from egru.runs.report import report
from egru.training import NoProgress, Result, Run, Task, distributed, progress_bar, tensorboard
from egru.training.loop import check_minutes
from egru.training.progress import Progress
from egru.training.run import CONFIG


def train(
    recipe: str,
    config: Config,
    folder: Path,
    log: Callable[[str], None] = print,
    minutes: float | None = None,
    progress: Progress | None = None,
    page: bool = True,
) -> Result:
    """Train a config in a new run folder.

    The folder is created once the data set is loaded and the model is built.

    Args:
        recipe: The name of the recipe that ``config`` comes from, for the records. Any name for a config of your own.
        config: The data set, the network and its training: the config of a recipe, or an instance of your subclass of
            :class:`egru.experiments.CustomClassifier` or :class:`egru.experiments.CustomLanguageModel`.
        folder: The run folder to create.
        log: Called with messages for the user, such as a warning about exploding gradients.
        minutes: Stop at the end of the epoch during which this many minutes have passed. If None, no limit.
        progress: Called after every step and every epoch. If None, a progress bar.
        page: Write the report page at the end. If that fails, the reason is logged.

    Returns:
        The test scores and the activity of the epoch with the best validation score.

    Raises:
        Paused: If ``minutes`` have passed before the last epoch. The run can be resumed.
        RunError: If ``folder`` is not empty, or the training diverges.
        FileNotFoundError: If the data set is not available.

    Example:
        >>> config = egru.experiments.smoke(egru.experiments.find("digits").make())  # seconds instead of minutes
        >>> result = egru.runs.train("digits", config, Path("runs/smoke"))
        >>> print(f"accuracy {result.test.accuracy:.1%}, activity sparsity {result.activity.activity_sparsity:.1%}")
    """
    check_minutes(minutes)
    if not isinstance(config, Custom) and config.root is not None:
        config = dataclasses.replace(config, root=os.path.abspath(config.root))
    if config.start_from is not None:
        config = dataclasses.replace(config, start_from=resolve_source(config.start_from))
    with distributed.process_group(config.device) as device:
        local = dataclasses.replace(config, device=device)
        data = load_data(local)
        model, task = build(local, data)
        if config.start_from is not None:
            initialise_from(model, config.start_from, log)
            zeros = _share_of_zeros(model)
            if zeros > 0.1 and not config.weight_sparsity:
                log(
                    f"{zeros:.0%} of the weights of {config.start_from} are zero and will be trained; "
                    f"--weight-sparsity {zeros:.2f} keeps them zero"
                )
        if config.threshold_floor:
            raise_thresholds(model, config.threshold_floor)
        with distributed.rank_zero_first():
            record = config_record(recipe, config, data)
            run = Run.open(folder, log) if _is_same_run(folder, record) else Run.create(folder, record, log)
        return _run_training(recipe, local, model, task, data, run, minutes, progress, page)


def _share_of_zeros(model: nn.Module) -> float:
    """Return the fraction of zeros in the weight matrices of a model."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    total = sum(matrix.numel() for matrix in matrices)
    return sum(int((matrix == 0).sum()) for matrix in matrices) / max(1, total)


def resume(folder: Path, log: Callable[[str], None] = print, minutes: float | None = None) -> Result:
    """Resume a run from its newest intact checkpoint.

    For a finished run, only the report page is written again.

    Args:
        folder: The folder of the run.
        log: Called with messages for the user, such as a damaged checkpoint.
        minutes: Stop at the end of the epoch during which this many minutes have passed. If None, no limit.

    Returns:
        The test scores and the activity of the epoch with the best validation score.

    Raises:
        Paused: If ``minutes`` have passed before the last epoch. The run can be resumed again.
        RunError: If ``folder`` is not a run or has no intact checkpoint.
        ValueError: If a record of the run is damaged. The message names the file.

    Example:
        >>> result = egru.runs.resume(Path("runs/digits"))
    """
    run = Run.open(folder, log)
    if (result := run.result()) is not None:
        run.log(f"{folder} is finished; its report page is written again")
        if distributed.launched_rank() == 0:
            _write_page(run)
        return result
    recipe, config = read_run_config(run)
    with distributed.process_group(config.device) as device:
        config = dataclasses.replace(config, device=device)
        return _run_training(recipe, config, *build_run(run, config), run, minutes)


def _is_same_run(folder: Path, record: dict[str, Any]) -> bool:
    """Return whether this run exists: created by the first process, or before `torchrun` restarted all processes."""
    if distributed.rank() > 0:
        return True
    exists = distributed.is_elastic() and (folder / CONFIG).exists()
    return exists and Run.open(folder).config() == json.loads(json.dumps(record))


def _run_training(
    recipe: str,
    config: Config,
    model: nn.Module,
    task: Task,
    data: Classification | Text,
    run: Run,
    minutes: float | None = None,
    progress: Progress | None = None,
    page: bool = True,
) -> Result:
    with contextlib.ExitStack() as stack:
        first = distributed.rank() == 0
        if first:
            stack.enter_context(run.lock())
        if not first:
            progress = NoProgress()
        elif progress is None:
            progress = stack.enter_context(progress_bar(recipe, config.epochs))
        if config.tensorboard and first:
            progress = stack.enter_context(tensorboard(progress, run.folder / "tensorboard"))
        result = training.train(model, task, config, run, progress, minutes)
    if page and first:
        _write_page(run, TrainedRun(config, model.cpu().eval(), task, data, result.best_epoch))
    return result


def _write_page(run: Run, trained: TrainedRun | None = None) -> None:
    """Write the report page of a finished run. The result does not depend on it, so an error is only logged."""
    try:
        report([run.folder], log=run.log, trained=trained)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        run.log(f"the report page was not written ({reason}); `egru report {run.folder}` writes it")
