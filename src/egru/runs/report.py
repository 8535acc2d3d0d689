"""Write the report page of one run or several from the records in their folders."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from egru.experiments.config import Config, read_config
from egru.report import Epoch, Raster, RunReport, write_report
from egru.runs.command import flatten, recorded_command
from egru.runs.load import TrainedRun, load, training_metrics
from egru.runs.raster import draw_rasters
from egru.runtime.shards import find_shards
from egru.training import DamagedCheckpointError, EpochMetrics, Run, RunError, to_plain


def report(
    folders: Sequence[Path],
    out: Path | None = None,
    log: Callable[[str], None] = print,
    trained: TrainedRun | None = None,
) -> Path:
    """Write the report page of finished runs.

    The events of a run are drawn if its checkpoints and data are available. Otherwise the page says what is missing.

    Args:
        folders: The folders of the runs.
        out: The folder to write the page to. If None, ``report`` in the run's folder for one run, and ``report`` in the
            working directory for several.
        log: Called with messages for the user, such as a damaged checkpoint.
        trained: The model of a single run, on the CPU. If None, it is loaded from the run's checkpoints.

    Returns:
        The path of the page.

    Raises:
        ValueError: If ``folders`` is empty.
        RunError: If a folder is not a run, or the run is not finished.
    """
    if not folders:
        raise ValueError("report: folders must contain at least one run")
    runs = [Run.open(folder, log) for folder in folders]
    configs = [read_config(run.config()) for run in runs]
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
    title = f"{configs[0][0]}, {names[0]}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    if out is None:
        out = Path(folders[0]) / "report" if len(runs) == 1 else Path("report")
    command = "" if len(runs) == 1 else f"egru report {' '.join(map(str, folders))}"
    return write_report(out, title, reports, rasters, command=command, config={}, notes=notes)


def _distinct_names(configs: Sequence[Config], recipes: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return one name per run, as short as possible: runs with equal names get their recipe, seed or folder added."""
    short = [f"{config.cell.upper()} {config.hidden}" for config in configs]
    for suffixes in (recipes, [f"seed {config.seed}" for config in configs], [Path(f).name for f in folders]):
        pairs = zip(short, suffixes, strict=True)
        names = [name if short.count(name) == 1 else f"{name} ({suffix})" for name, suffix in pairs]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(short, 1)]


def _read_report(name: str, run: Run, recipe: str, config: Config) -> RunReport:
    result = run.result()
    if result is None:
        epochs = len(run.metrics())
        raise RunError(
            f"{run.folder} is not finished ({epochs} of {config.epochs} epochs): `egru train --resume {run.folder}`"
        )
    settings = flatten(to_plain(config))
    del settings["root"]
    return RunReport(
        name,
        tuple(map(_epoch, training_metrics(run))),
        result.test.accuracy,
        result.activity,
        result.seconds,
        config.seed,
        result.test.perplexity,
        config=settings,
        environment=run.environment(),
        command=recorded_command(recipe, config, result),
    )


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
