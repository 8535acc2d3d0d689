"""Write the report page of one run or several from the records in their folders."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from egru.experiments.config import Config, Network
from egru.experiments.custom import Custom
from egru.report import Epoch, Raster, RunReport, ThresholdSearch, write_report
from egru.runs.command import changed_settings, flatten, recorded_command
from egru.runs.load import TrainedRun, find_run, load, read_run_config
from egru.runs.raster import draw_rasters
from egru.runs.timing import STEP_TIME, measure_step_times, recorded_step_time
from egru.runtime.shards import find_shards
from egru.training import DamagedCheckpointError, EpochMetrics, Result, Run, RunError, score, to_plain
from egru.types import EVENT_CELLS

MAX_NAMES = 4
"""Runs that the title of a page names. The others are counted."""
_EVENT_SETTINGS = (
    "threshold",
    "surrogate",
    "reset",
    "events",
    "compare",
    "freeze_thresholds",
    "rate_loss",
    "state_loss",
    "squared_rate",
)
"""Beginnings of the names of settings that only event-based cells use."""


def report(
    folders: Sequence[Path],
    out: Path | None = None,
    log: Callable[[str], None] = print,
    trained: TrainedRun | None = None,
    time: bool = False,
) -> Path:
    """Write the report page of runs.

    The events of a run are drawn if its checkpoints and data are available. Otherwise the page says what is missing. A
    run without a result, such as a trial of a sweep, is shown with the scores of its best epoch on the validation
    split, which requires its checkpoints and data.

    Args:
        folders: The folders of runs or exports, or names of pretrained models.
        out: The folder to write the page to. If None, ``report`` in the run's folder for one run, and ``report`` in the
            working directory for several runs or a pretrained model.
        log: Called with messages for the user, such as a damaged checkpoint.
        trained: The model of a single run, on the CPU. If None, it is loaded from the run's checkpoints.
        time: Measure the time per step of each run on this machine's CPU and record it in the run's folder. If False,
            the page shows the times that were recorded before.

    Returns:
        The path of the page.

    Raises:
        ValueError: If ``folders`` is empty.
        RunError: If a folder is not a run, or the run has no epoch yet.
        FileNotFoundError: If a run has no result and its data are not available.

    Example:
        >>> page = egru.runs.report([Path("runs/digits")])
        >>> page.name
        'index.html'
    """
    if not folders:
        raise ValueError("report: folders must contain at least one run")
    runs = [Run.open(find_run(folder)[0], log) for folder in folders]
    if time:
        for folder in folders:
            if not Path(folder).is_dir():
                raise ValueError(
                    f"report: time is recorded in the folder of a run, got {folder}; export the model first"
                )
        for run, measured in zip(runs, measure_step_times([_load_on_cpu(run) for run in runs]), strict=True):
            measured.write(run.folder / STEP_TIME)
    configs = [read_run_config(run) for run in runs]
    names = _distinct_names([config for _, config in configs], [recipe for recipe, _ in configs], folders)
    reports = [_read_report(name, run, *config) for name, run, config in zip(names, runs, configs, strict=True)]
    rasters: list[Raster] = []
    notes: list[str] = []
    for name, run, run_report in zip(names, runs, reports, strict=True):
        if not run_report.event_layers:
            continue
        try:
            model = trained or _load_on_cpu(run)
            run_rasters = draw_rasters(model.model, model.config, model.data)
        except (FileNotFoundError, ImportError, RunError, DamagedCheckpointError) as error:
            notes.append(f"The events of {name} are not drawn: {' '.join(str(error).split())}.")
            continue
        run_rasters = run_rasters[: 1 if len(runs) > 2 else 2]
        prefix = "" if sum(bool(r.event_layers) for r in reports) == 1 else f"{name}: "
        rasters += [dataclasses.replace(raster, title=f"{prefix}{raster.title}") for raster in run_rasters]
    title = f"{configs[0][0]}, {names[0]}"
    if len(runs) > 1:
        more = [f"{len(runs) - MAX_NAMES} more"] if len(runs) > MAX_NAMES else []
        title = f"{len(runs)} runs: {', '.join([*names[:MAX_NAMES], *more])}"
    if out is None:
        out = Path(folders[0]) / "report" if len(runs) == 1 and Path(folders[0]).is_dir() else Path("report")
    command = "" if len(runs) == 1 else f"egru report {' '.join(map(str, folders))}"
    return write_report(out, title, reports, rasters, command=command, config={}, notes=notes)


def _distinct_names(configs: Sequence[Config], recipes: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return one name per run, as short as possible: runs with equal names get their recipe, seed or folder added."""
    short = [config.label for config in configs]
    for suffixes in (recipes, [f"seed {config.seed}" for config in configs], [Path(f).name for f in folders]):
        pairs = zip(short, suffixes, strict=True)
        names = [name if short.count(name) == 1 else f"{name} ({suffix})" for name, suffix in pairs]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(short, 1)]


def _read_report(name: str, run: Run, recipe: str, config: Config) -> RunReport:
    result = run.result()
    search = None if result is None else _read_search(result, config)
    settings = {key: value for key, value in flatten(to_plain(config)).items() if key != "root"}
    if isinstance(config, Custom):
        settings["data"] = run.config().get("data", "")
    if isinstance(config, Network) and config.cell not in EVENT_CELLS:
        settings = {key: value for key, value in settings.items() if not key.startswith(_EVENT_SETTINGS)}
    scored = result or _score_on_validation(run, config)
    return RunReport(
        name,
        () if search else tuple(map(_epoch, run.metrics())),
        scored.test.accuracy,
        scored.activity,
        scored.seconds,
        config.seed,
        scored.test.perplexity,
        "validation" if result is None else "test",
        search,
        recorded_step_time(run.folder),
        config=settings,
        changed=tuple(key for key in changed_settings(recipe, config) if key in settings),
        environment=run.environment(),
        command=recorded_command(recipe, config, result),
    )


def _read_search(result: Result, config: Config) -> ThresholdSearch | None:
    """Return how the thresholds of a run were found, or None if the run was trained."""
    derivation = result.derivation
    if derivation is None:
        return None
    matches = [i for i, trial in enumerate(derivation.trials) if trial.floor == config.threshold_floor]
    chosen = matches[-1] if matches else len(derivation.trials) - 1
    return ThresholdSearch(Path(derivation.source).name, derivation.trials, chosen)


def _score_on_validation(run: Run, config: Config) -> Result:
    """Score the best epoch of a run without a result on the validation split. The test split is not read."""
    metrics = run.metrics()
    if not metrics:
        raise RunError(f"{run.folder} has no finished epoch yet; continue it with `egru train --resume {run.folder}`")
    on_gpu = config.device.startswith("cuda") and torch.cuda.is_available()
    trained = load(run.folder, None if on_gpu else "cpu", run.log)
    run.log(f"{run.folder} has no result: scoring epoch {trained.epoch} on the validation split")
    scores, activity = score(trained.model, trained.task, "validation")
    return Result(trained.epoch or 0, scores, activity, sum(line.seconds for line in metrics))


def _epoch(metrics: EpochMetrics) -> Epoch:
    has_events = metrics.activity.backward_sparsity is not None
    return Epoch(
        metrics.epoch,
        metrics.train.loss,
        metrics.validation.accuracy,
        metrics.activity.activity_sparsity if has_events else None,
        metrics.seconds,
        metrics.validation.perplexity,
        {name: layer.activity_sparsity for name, layer in metrics.layers.items()} if has_events else {},
    )


def _load_on_cpu(run: Run) -> TrainedRun:
    if not run.saved_epochs() and not find_shards(run.folder):
        raise FileNotFoundError("the run has no checkpoints")
    return load(run.folder, "cpu", run.log)
