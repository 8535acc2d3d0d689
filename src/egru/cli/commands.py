"""The ``egru`` commands. Imports are inside the functions, so that each command loads only what it uses."""

import argparse
import contextlib
import datetime
import io
import re
import sys
from pathlib import Path
from typing import Any

from egru.cli.exit_codes import ExitCode


class UsageError(Exception):
    """The options are not valid."""


def train(options: argparse.Namespace) -> int:
    """Train a recipe or resume a run. With `torchrun`, only the first process prints."""
    from egru.training import distributed

    if options.wants_help and options.recipe is None:
        options.parser.print_help()
        return 0
    if options.recipe is None and options.resume is None:
        options.parser.error("a RECIPE (see `egru list`) or --resume RUN is required")
    if distributed.launched_processes() > 1 and not (options.out or options.resume):
        raise ValueError("multi-process runs require --out, so that a restart can find the run")
    with distributed.only_rank_zero_prints():
        return _train(options)


def _train(options: argparse.Namespace) -> int:
    from egru import experiments, runs

    arguments = options.extra + ["--help"] * options.wants_help
    if options.resume:
        if options.recipe or options.smoke or options.out or arguments:
            raise ValueError(
                "--resume uses the settings of the run and accepts neither a recipe nor options other than --minutes"
            )
        folder = Path(options.resume)
        result = runs.resume(folder, minutes=options.minutes)
    else:
        recipe = experiments.find(options.recipe)
        config = _configure(recipe, options.smoke, arguments)
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path(options.out or Path("runs") / f"{options.recipe}-{stamp}")
        print(f"{recipe.name} in {folder}; paper: {recipe.paper}")
        result = runs.train(recipe.name, config, folder, minutes=options.minutes)
    _print_scores(f"test, epoch {result.best_epoch} (best on validation)", result.test, result.activity)
    print(f"run folder: {folder}; report: {folder / 'report' / 'index.html'}")
    return 0


def sweep(options: argparse.Namespace) -> int:
    """Tune the fields of a recipe, or resume a sweep."""
    from egru import experiments
    from egru.sweep import Sweep, sweep, table, write_outcome

    recipe = experiments.find(options.recipe)
    config = _configure(recipe, options.smoke, options.extra)
    folder = Path(options.out or Path("sweeps") / (options.study or recipe.name))
    objectives = tuple(options.objectives.split(","))
    settings = Sweep(
        recipe=recipe.name,
        config=config,
        search=Path(options.search),
        folder=folder,
        storage=options.storage or str(folder / "journal.log"),
        study=options.study or recipe.name,
        objectives=objectives,
        trials=options.trials,
        workers=options.workers,
        pruner=options.pruner or ("median" if len(objectives) == 1 else "none"),
        devices=tuple(filter(None, (options.devices or "").split(","))),
    )
    print(f"{recipe.name} in {folder}: {settings.trials} trials, {settings.workers} in parallel", flush=True)
    try:
        study = sweep(settings, lambda message: print(message, flush=True))
    except KeyboardInterrupt:
        print("egru: stopped; the same command resumes the sweep and repeats unfinished trials", file=sys.stderr)
        return ExitCode.INTERRUPTED
    print(table(study, settings))
    print(f"written: {', '.join(map(str, write_outcome(study, settings)))}; runs: {folder / 'trial-*'}")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Score a run or a pretrained model."""
    from egru import runs

    scores, activity, epoch = runs.evaluate(Path(options.source), options.split, device=options.device)
    _print_scores(f"{options.split}, epoch {epoch or 'unknown'}", scores, activity)
    print(activity)
    return 0


def export(options: argparse.Namespace) -> int:
    """Write the best weights of a run as small files."""
    from egru import format, runs

    largest = int(options.part * 2**20)
    for path in runs.export(Path(options.folder), Path(options.out), options.weights, largest):
        print(f"{path}: {format.size(path.stat().st_size)}")
    return 0


def quieten(options: argparse.Namespace) -> int:
    """Raise the thresholds of a run."""
    from egru import runs

    source, out, floor = Path(options.source), Path(options.out), tuple(options.floor)
    result = runs.quieten(source, out, floor, options.within, options.weights, options.device)
    _print_scores("test", result.test, result.activity)
    print(f"written: {out}; `egru evaluate {out}` reads it like a run")
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the report page of one run or several."""
    from egru import runs

    folders, out = [Path(folder) for folder in options.folders], options.out and Path(options.out)
    print(runs.report(folders, out, time=options.time))
    return 0


def reproduce(options: argparse.Namespace) -> int:
    """Print a table of the paper with our results, list the tables, or add a run to our results."""
    from egru.runs import reproduce

    if options.keep is not None:
        print(f"written: {', '.join(map(str, reproduce.keep_run(Path(options.keep))))}")
        return 0
    for line in reproduce.list_tables() if options.table is None else reproduce.format_table(options.table):
        print(line)
    return 0


def list_recipes(options: argparse.Namespace) -> int:
    """List the recipes by table."""
    from egru.experiments import RECIPES
    from egru.experiments.tables import TABLES, find_table

    width = max(map(len, RECIPES))
    for table in TABLES.values() if options.table is None else [find_table(options.table)]:
        print(f"{table.title}:")
        for name in table.recipes(aliases=True):
            print(f"  {name:{width}}  {RECIPES[name].summary} [{RECIPES[name].paper}]")
        print()
    return 0


def bench(options: argparse.Namespace) -> int:
    """Run one benchmark, with its options, or all benchmarks of a device."""
    from egru.bench import BENCHMARKS, run, select

    if options.device is None:
        if not options.wants_help:
            options.parser.error(f"a device is required: {' or '.join(BENCHMARKS)}")
        options.parser.print_help()
        return 0
    try:
        modules = select(options.device, options.measured)
    except ValueError as error:
        raise UsageError(f"bench: {error}") from None
    if len(modules) == 1:
        return run(modules[0], options.extra + ["--help"] * options.wants_help)
    if options.wants_help:
        options.parser.print_help()
        return 0
    if options.extra:
        choices = " or ".join(BENCHMARKS[options.device])
        raise UsageError(f"bench: {' '.join(options.extra)}: options require the name of one benchmark, {choices}")
    return max(run(module) for module in modules)


def doctor(options: argparse.Namespace) -> int:
    """Show packages, kernels and data sets."""
    from egru.doctor import describe

    for line in describe():
        print(line)
    return 0


def info(options: argparse.Namespace) -> int:
    """Show which kernels are used and why."""
    from egru import kernels

    for name, status in kernels.info().items():
        print(f"{name}: {status}")
    return 0


def _configure(recipe: Any, smoke: bool, arguments: list[str]) -> Any:
    """Return the config of ``recipe`` with the fields that are given as options."""
    from egru import experiments

    config, program = recipe.make(), f"egru train {recipe.name}"
    if smoke:
        config = experiments.smoke(config)
    if not arguments:
        return config
    try:
        import tyro
    except ImportError as error:
        raise ImportError("options require tyro: pip install 'egru[train]'") from error
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(type(config), default=config, args=arguments, prog=program)
    except SystemExit as stop:
        if stop.code:  # tyro prints a box of several lines; its first part is the error
            message = re.split(r"─{5,}", errors.getvalue().split("\n", 1)[-1])[0]
            raise UsageError(f"{' '.join(message.replace('│', ' ').split())}; see {program} --help") from None
        raise


def _print_scores(label: str, scores: Any, activity: Any) -> None:
    from egru import format

    quality = f"accuracy {format.percent(scores.accuracy, 2)}"
    if scores.perplexity is not None:
        quality = f"perplexity {scores.perplexity:.2f}, {quality}"
    sparsity = f"activity sparsity {format.percent(activity.activity_sparsity)}"
    if activity.backward_sparsity is not None:
        sparsity += f", backward sparsity {format.percent(activity.backward_sparsity)}"
    macs = f"{format.count(activity.forward_macs)} of {format.count(activity.dense_forward_macs)} MACs per step"
    print(f"{label}: {quality}, {sparsity}, {macs}")
