"""The ``egru`` commands. Imports are inside the functions, so that each command loads only what it uses."""

import argparse
import contextlib
import datetime
import functools
import io
import itertools
from pathlib import Path
from typing import Any

from egru.cli.arguments import UsageError, unknown_arguments
from egru.types import C_WEIGHT_FORMATS, WEIGHT_FORMATS


def train(options: argparse.Namespace) -> int:
    """Train a recipe or resume a run. With `torchrun`, only the first process prints."""
    if options.wants_help and options.recipe is None:
        options.parser.print_help()
        return 0
    if options.recipe is None and options.resume is None:
        options.parser.error("a RECIPE (see `egru list`) or --resume RUN is required")
    if options.resume and (options.recipe or options.smoke or options.out or options.extra or options.wants_help):
        options.parser.error(
            "--resume uses the settings of the run and accepts neither a recipe nor options other than --minutes"
        )
    from egru.training import distributed

    if distributed.launched_processes() > 1 and not (options.out or options.resume):
        raise UsageError("multi-process runs require --out, so that a restart can find the run")
    with distributed.only_rank_zero_prints():
        return _train(options)


def _train(options: argparse.Namespace) -> int:
    from egru import runs
    from egru.training import Run

    if options.resume:
        folder = Path(options.resume)
        run = functools.partial(runs.resume, folder)
    else:
        recipe = _find_recipe(options.recipe)
        config = _configure(recipe, options, options.extra + ["--help"] * options.wants_help)
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path(options.out or Path("runs") / f"{options.recipe}-{stamp}")
        paper = f"; {recipe.describe_paper(config)}" if recipe.papers else ""
        print(f"{recipe.name} in {folder}: {recipe.summary}{paper}")
        run = functools.partial(runs.train, recipe.name, config, folder)
    try:
        result = run(minutes=options.minutes)
    except KeyboardInterrupt:
        if (folder / "config.json").exists():
            options.interrupted = f"`egru train --resume {folder}` continues from the last checkpoint"
        raise
    _print_scores(f"test, epoch {result.best_epoch} (best on validation)", result.test, result.activity)
    if (energy := Run.open(folder).energy()) is not None:
        print(energy)
    page = folder / "report" / "index.html"
    print(f"run folder: {folder}; report: {page}" if page.exists() else f"run folder: {folder}")
    return 0


def sweep(options: argparse.Namespace) -> int:
    """Tune the fields of a recipe, or resume a sweep."""
    from egru.sweep import Sweep, sweep, table, write_outcome

    recipe = _find_recipe(options.recipe)
    config = _configure(recipe, options, options.extra)
    folder = Path(options.out or Path("sweeps") / (options.study or recipe.name))
    objectives = tuple(options.objectives.split(","))
    try:
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
    except ValueError as error:
        raise UsageError(f"{error}; see `egru sweep --help`") from None
    print(f"{recipe.name} in {folder}: {settings.trials} trials, {settings.workers} in parallel", flush=True)
    study = sweep(settings, lambda message: print(message, flush=True))
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
    """Write the best weights of a run as small files, or the network as C code or as an ONNX graph."""
    accepted = {"c": C_WEIGHT_FORMATS, "onnx": ("float32",)}.get(options.target, WEIGHT_FORMATS)
    if options.weights is not None and options.weights not in accepted:
        raise UsageError(
            f"export: --target {options.target} supports --weights {', '.join(accepted)}; got {options.weights}"
        )
    for option, target in (("part", "run"), ("name", "c")):
        if getattr(options, option) is not None and options.target != target:
            raise UsageError(f"export: --{option} requires --target {target}")
    from egru import format, runs

    folder, out = Path(options.folder), Path(options.out)
    if options.target == "c":
        paths = runs.export_c(folder, out, options.weights or "float32", options.name or "model")
    elif options.target == "onnx":
        paths = runs.export_onnx(folder, out)
    else:
        paths = runs.export(folder, out, options.weights or "bfloat16", int((options.part or 16) * 2**20))
    for path in paths:
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


def convert(options: argparse.Namespace) -> int:
    """Convert the GRU or LSTM of a run to event layers."""
    if options.epochs is not None and options.activity is None:
        raise UsageError("convert: --epochs requires --activity; without it nothing is trained")
    if options.within is not None and options.activity is not None:
        raise UsageError("convert: --within and --activity exclude each other")
    from egru import runs

    given = {name: getattr(options, name) for name in ("within", "activity", "epochs")}
    given = {name: value for name, value in given.items() if value is not None}
    out = Path(options.out)
    common = {"weights": options.weights, "device": options.device}
    result = runs.convert(Path(options.source), out, options.events, **given, **common)
    _print_scores("test", result.test, result.activity)
    print(f"written: {out}; `egru evaluate {out}` reads it like a run")
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the report page of one run or several, or of a sweep."""
    from egru import runs, sweep

    folders, out = [Path(folder) for folder in options.folders], options.out and Path(options.out)
    sweeps = [folder for folder in folders if sweep.is_sweep(folder)]
    if sweeps and (len(folders) > 1 or options.time):
        others = "--time" if len(folders) == 1 else "other folders"
        raise UsageError(f"report: {sweeps[0]} is a sweep, whose page cannot be combined with {others}")
    print(sweep.report(folders[0], out) if sweeps else runs.report(folders, out, time=options.time))
    return 0


def reproduce(options: argparse.Namespace) -> int:
    """Print a table of the paper with our results, list the tables, or add a run to our results."""
    from egru.runs import reproduce

    if options.table is not None:
        _find_table(options.table)
    if options.keep is not None:
        print(f"written: {', '.join(map(str, reproduce.keep_run(Path(options.keep), note=options.note)))}")
        return 0
    for line in reproduce.list_tables() if options.table is None else reproduce.format_table(options.table):
        print(line)
    return 0


def list_recipes(options: argparse.Namespace) -> int:
    """List the recipes by table."""
    from egru.experiments import RECIPES
    from egru.experiments.tables import TABLES

    width = max(map(len, RECIPES))
    for table in TABLES.values() if options.table is None else [_find_table(options.table)]:
        print(f"{table.title}:")
        for name in table.recipes(aliases=True):
            print(f"  {name:{width}}  {RECIPES[name].summary} [{RECIPES[name].describe_paper() or 'not in the paper'}]")
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


def demo(options: argparse.Namespace) -> int:
    """Open the page that reads drawn digits, or write a copy."""
    from egru.demo import PAGE
    from egru.files import replace_file

    if options.out is not None:
        replace_file(Path(options.out), PAGE.read_bytes())
        print(f"written: {options.out}")
    else:
        import webbrowser

        opened = webbrowser.open(PAGE.as_uri())
        print(PAGE if opened else f"no browser found; open this file: {PAGE}")
    return 0


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


def _find_recipe(name: str) -> Any:
    from egru import experiments

    try:
        return experiments.find(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _find_table(name: str) -> Any:
    from egru.experiments.tables import find_table

    try:
        return find_table(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _configure(recipe: Any, options: argparse.Namespace, arguments: list[str]) -> Any:
    """Return the config of ``recipe`` with the fields that are given as options."""
    from egru import experiments

    config, program = recipe.make(), f"egru train {recipe.name}"
    if options.smoke:
        config = experiments.smoke(config)
    if not arguments:
        return config
    known = _field_options(config)
    unknown = [name for name in arguments if name.startswith("--") and _option_name(name) not in known]
    if unknown:
        raise UsageError(
            f"{unknown_arguments(unknown, [*known, *options.parser.option_names()])}; see `{program} --help`"
        )
    try:
        import tyro
    except ImportError as error:
        raise ImportError("options of a recipe require tyro: pip install 'egru[train]'") from error
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            config = tyro.cli(
                type(config),
                default=config,
                args=arguments,
                prog=program,
                description=f"{recipe.summary}. The fields of this recipe are options, in addition to those that "
                f"`{options.parser.prog} --help` shows.",
            )
        config.layer_options()
    except ValueError as error:
        raise UsageError(f"{error}; see `{program} --help`") from None
    except SystemExit as stop:
        if not stop.code:
            raise
        message = _first_message(errors.getvalue()).replace(f"{type(config).__name__}: ", "")
        raise UsageError(f"{message}; see `{program} --help`") from None
    return config


def _first_message(box: str) -> str:
    """Return the error in a box that tyro prints: a title, then texts between rules."""
    lines = [line.strip(" │╭╮╰╯") for line in box.splitlines()[1:]]
    lines = ["" if set(line) <= set("─-") else line for line in lines]
    text = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines))
    return " ".join(text).removeprefix("Error parsing ").removesuffix(".")


def _option_name(argument: str) -> str:
    return argument.partition("=")[0].replace("_", "-")  # tyro accepts both spellings


def _field_options(config: Any) -> set[str]:
    """Return the options that set the fields of ``config``, as tyro spells them."""
    from egru.records import to_plain

    options = {"--help"}

    def add(values: dict[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                add(value, f"{prefix}{name}.")
            else:
                options.add(_option_name(f"{prefix}{name}"))
            if isinstance(value, bool):
                options.add(_option_name(f"{prefix}no-{name}"))

    add(to_plain(config), "--")
    return options


def _print_scores(label: str, scores: Any, activity: Any) -> None:
    from egru import format

    quality = f"accuracy {format.percent(scores.accuracy, 2)}"
    if scores.perplexity is not None:
        quality = f"perplexity {scores.perplexity:.2f}, {quality}"
    sparsity = f"activity sparsity {format.percent(activity.activity_sparsity)}"
    if activity.backward_sparsity is not None:
        sparsity += f", backward sparsity {format.percent(activity.backward_sparsity)}"
    if activity.weight_sparsity:
        sparsity += f", weight sparsity {format.percent(activity.weight_sparsity)}"
    macs = f"{format.count(activity.forward_macs)} of {format.count(activity.dense_forward_macs)} MACs per step"
    print(f"{label}: {quality}, {sparsity}, {macs}")
