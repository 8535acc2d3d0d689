"""The ``egru`` command."""

import argparse
import contextlib
import datetime
import io
import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import egru

BENCHMARKS = {"cpu": ("infer_cpu.py", "train_cpu.py"), "gpu": ("train_gpu.py",)}
"""What ``egru bench`` runs, in order: scripts of the repository's ``benchmarks/``, each with options of its own."""

SWEEP_EXAMPLE = """\
SPACE.py, for instance:

    def search(trial):
        return {
            "hidden": trial.suggest_int("hidden", 32, 256, log=True),
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            "threshold.mean": trial.suggest_float("threshold", -4, 0),
        }

    egru sweep smnist --search space.py --workers 4 --trials 40
    egru sweep smnist --search space.py --objectives quality,macs

`egru train RECIPE --help` lists the fields. Trials that a killed worker held are tried again.
"""


def bench(device: str, only: str | None, arguments: list[str]) -> int:
    """Run the benchmarks of one device, all of them or the one whose name starts with ``only``."""
    folder = Path(__file__).parents[2] / "benchmarks"
    if not folder.is_dir():
        raise FileNotFoundError("egru bench needs the repository: clone it, `make setup`, and run .venv/bin/egru bench")
    scripts = [name for name in BENCHMARKS[device] if only is None or name.startswith(only)]
    sys.path.insert(0, str(folder))  # as if the script had been run: its neighbours can be imported
    for name in scripts:
        sys.argv = [str(folder / name), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def train(options: argparse.Namespace, arguments: list[str]) -> int:
    """Train a recipe, or go on with a run. Under `torchrun`, together; the first process speaks."""
    from egru.training import distributed

    if distributed.launched() > 1 and not (options.out or options.resume):
        raise ValueError("several processes need --out FOLDER, that a restart can find")
    with distributed.quiet():
        return _train(options, arguments)


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    from egru import experiments, runs

    if options.resume:
        if options.recipe or options.smoke or options.out or arguments:
            raise ValueError("--resume takes the run's own settings; leave the recipe and all other options out")
        folder = Path(options.resume)
        result = runs.resume(folder, minutes=options.minutes)
    else:
        recipe = experiments.find(options.recipe)
        config = experiments.smoke(recipe.make()) if options.smoke else recipe.make()
        config = configured(config, arguments, f"egru train {options.recipe}")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path(options.out or Path("runs") / f"{options.recipe}-{stamp}")
        print(f"{recipe.name} in {folder}; the paper: {recipe.paper}")
        result = runs.train(recipe.name, config, folder, minutes=options.minutes)
    print_scores(f"test, epoch {result.best_epoch} (best in validation)", result.test, result.activity)
    print(f"everything is in {folder}; its page is {folder / 'report' / 'index.html'}")
    return 0


def sweep(options: argparse.Namespace, arguments: list[str]) -> int:
    """Search a recipe's fields; the same command again goes on."""
    from egru import experiments
    from egru.sweep import Sweep, sweep, table, write_outcome

    recipe = experiments.find(options.recipe)
    config = experiments.smoke(recipe.make()) if options.smoke else recipe.make()
    config = configured(config, arguments, f"egru train {options.recipe}")
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
    print(f"{recipe.name} in {folder}, {settings.trials} trials, {settings.workers} at a time", flush=True)
    try:
        study = sweep(settings, lambda said: print(said, flush=True))
    except KeyboardInterrupt:
        print("egru: stopped; the same command goes on, with the trials it was in again", file=sys.stderr)
        return 130
    print(table(study, settings))
    print(f"written: {', '.join(map(str, write_outcome(study, settings)))}; trials are runs: {folder / 'trial-*'}")
    return 0


def configured(config: Any, arguments: list[str], program: str) -> Any:
    """``config`` with the options given; tyro knows them from its fields."""
    if not arguments:
        return config
    try:
        import tyro
    except ImportError as error:
        raise ImportError("options need tyro: pip install 'egru[train]'") from error
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(type(config), default=config, args=arguments, prog=program)
    except SystemExit as stop:
        if stop.code:  # a box of several lines: its first part is the error
            said = re.split(r"─{5,}", errors.getvalue().split("\n", 1)[-1])[0]
            raise UsageError(f"{' '.join(said.replace('│', ' ').split())}; see {program} --help") from None
        raise


class UsageError(Exception):
    """Options that do not make sense."""


def evaluate(run: str, split: str, device: str | None) -> int:
    from egru import runs

    scores, activity, epoch = runs.evaluate(Path(run), split, device=device)
    print_scores(f"{split}, epoch {epoch or 'unknown'}", scores, activity)
    print(activity)
    return 0


def export(run: str, out: str, weights: str, part: float) -> int:
    from egru import runs

    paths = runs.export(Path(run), Path(out), weights, int(part * 2**20))
    for path in paths:
        print(f"{path}: {path.stat().st_size / 2**20:.2f} MiB")
    return 0


def quieten(options: argparse.Namespace) -> int:
    from egru import runs

    run, out = Path(options.run), Path(options.out)
    floor, device = tuple(options.floor), options.device
    result = runs.quieten(run, out, floor, options.within, options.weights, device)
    print_scores("test", result.test, result.activity)
    print(f"everything is in {out}; `egru evaluate {out}` reads it like a run")
    return 0


def report(folders: list[str], out: str | None) -> int:
    from egru import runs

    print(runs.report([Path(folder) for folder in folders], None if out is None else Path(out)))
    return 0


def reproduce(table: str | None, run: str | None) -> int:
    from egru.runs import reproduce

    if run is not None:
        print(f"kept in {reproduce.keep(Path(run))}")
        return 0
    for line in reproduce.listing() if table is None else reproduce.lines(table):
        print(line)
    return 0


def print_scores(what: str, scores: Any, activity: Any) -> None:
    quality = f"accuracy {100 * scores.accuracy:.2f} %"
    if scores.perplexity is not None:
        quality = f"perplexity {scores.perplexity:.2f}, {quality}"
    backward = activity.backward_sparsity
    sparsity = f"{100 * activity.activity_sparsity:.1f} % silent"
    sparsity += "" if backward is None else f", {100 * backward:.1f} % backward sparsity"
    macs = f"{activity.forward_macs / 1e6:.3g} M of {activity.dense_forward_macs / 1e6:.3g} M MACs a step"
    print(f"{what}: {quality}, {sparsity}, {macs}")


def list_recipes() -> int:
    from egru.experiments import RECIPES

    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        print(f"{name:{width}}  {recipe.summary} [{recipe.paper}]")
    return 0


def doctor() -> int:
    from egru.doctor import lines

    for line in lines():
        print(line)
    return 0


def info() -> int:
    for name, standing in egru.kernels.info().items():
        print(f"{name}: {standing}")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("egru", description=egru.__doc__)
    parser.add_argument("-v", "--verbose", action="store_true", help="show the trace of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "train",
        help="train a recipe of `egru list`, or go on with a run",
        usage="egru train RECIPE [--smoke] [--out FOLDER] [--minutes M] [--FIELD VALUE ...]\n"
        "       egru train --resume RUN [--minutes M]",
        description="Train a recipe. `egru train RECIPE --help` shows its fields; every one is an option.",
        add_help=False,
    )
    run.add_argument("recipe", nargs="?", metavar="RECIPE", help="one of `egru list`")
    run.add_argument("--smoke", action="store_true", help="in small: under a minute on a CPU")
    run.add_argument("--out", metavar="FOLDER", help="where the run goes; runs/RECIPE-TIME by default")
    run.add_argument("--resume", metavar="RUN", help="go on with the run in this folder, with its own settings")
    run.add_argument(
        "--minutes", type=float, metavar="M", help="stop after the epoch that is in flight by then; --resume goes on"
    )
    run.add_argument("-h", "--help", action="store_true", dest="wants_help", help="show this, or the recipe's fields")
    search = commands.add_parser(
        "sweep",
        help="search a recipe's fields with Optuna",
        usage="egru sweep RECIPE --search SPACE.py [--trials N] [--workers N] [--storage PLACE] [--FIELD VALUE ...]",
        description="Search a recipe's fields. Every trial is a run; the same command again goes on where it stopped.",
        epilog=SWEEP_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    search.add_argument("recipe", metavar="RECIPE", help="one of `egru list`; its fields are options here too")
    search.add_argument("--search", metavar="SPACE.py", required=True, help="defines search(trial) -> dict of fields")
    search.add_argument("--trials", type=int, default=20, metavar="N", help="in the study in the end (20)")
    search.add_argument("--workers", type=int, default=1, metavar="N", help="trials at a time on this machine (1)")
    place = "a journal file, or postgresql://USER@HOST/DATABASE for many machines (FOLDER/journal.log)"
    search.add_argument("--storage", metavar="PLACE", help=place)
    search.add_argument("--study", metavar="NAME", help="the study's name in the storage (RECIPE)")
    search.add_argument("--out", metavar="FOLDER", help="where the runs go (sweeps/STUDY)")
    what = "of quality, macs, backward-macs, all in validation; two give a Pareto front (quality)"
    search.add_argument("--objectives", default="quality", metavar="A[,B]", help=what)
    chosen = "what stops bad trials early (median; none with several objectives)"
    search.add_argument("--pruner", choices=("median", "hyperband", "none"), help=chosen)
    search.add_argument("--devices", metavar="A[,B...]", help="such as cuda:0,cuda:1; workers take them in turn")
    search.add_argument("--smoke", action="store_true", help="every trial in small: under a minute on a CPU")
    score = commands.add_parser(
        "evaluate",
        help="score the best epoch of a run, or a pretrained model",
        description="Score the best epoch of a run, or a pretrained model: `egru evaluate smnist`. The data are "
        "those it was trained on, under EGRU_DATA.",
    )
    score.add_argument("run", metavar="RUN", help="a run's folder, or the name of a pretrained model: smnist")
    score.add_argument("--split", choices=("test", "validation"), default="test")
    score.add_argument("--device", help="another device than the run's, in float32: cpu for a run made on a GPU")
    small = commands.add_parser(
        "export", help="a run without its training: the best epoch's weights in small files, and its records"
    )
    small.add_argument("run", metavar="RUN", help="a run's folder")
    small.add_argument("out", metavar="FOLDER", help="a new folder; `egru evaluate FOLDER` reads it")
    small.add_argument("--weights", choices=("float32", "bfloat16", "int8"), default="bfloat16")
    small.add_argument("--part", type=float, default=16, metavar="MIB", help="largest size of a file; 16 by default")
    quiet = commands.add_parser(
        "quieten",
        help="a run with higher thresholds, as high as validation lets them be: fewer events, nothing trained",
        description="Raise a run's thresholds layer by layer while its validation loss falls or stays, and write the "
        "network like `egru export` does. The test split is read once, at the end.",
    )
    quiet.add_argument("run", metavar="RUN", help="a run's folder, an export's, or a pretrained model's name")
    quiet.add_argument("out", metavar="FOLDER", help="a new folder; `egru evaluate FOLDER` reads it")
    each = "lift thresholds below it, all layers' or one a layer's, instead of searching"
    quiet.add_argument("--floor", type=float, nargs="+", default=(), metavar="F", help=each)
    loss = "how far above the lowest seen the validation loss may be, in nats (0.001)"
    quiet.add_argument("--within", type=float, default=1e-3, metavar="NATS", help=loss)
    quiet.add_argument("--weights", choices=("float32", "bfloat16", "int8"), default="bfloat16")
    quiet.add_argument("--device", help="another device than the run's, in float32")
    page = commands.add_parser("report", help="one page of a run, or of several side by side, to open in a browser")
    page.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    page.add_argument("--out", metavar="FOLDER", help="where the page goes: RUN/report, of several runs report")
    tables = commands.add_parser(
        "reproduce", help="the paper's tables, ours beside them; without a name, which there are"
    )
    tables.add_argument("table", nargs="?", metavar="TABLE", help="one of `egru reproduce`")
    tables.add_argument("--keep", metavar="RUN", help="add a finished run to our numbers (in a checkout)")
    commands.add_parser("list", help="all recipes, with the paper's numbers")
    commands.add_parser("doctor", help="what is installed, which kernels are in use, which data are present")
    commands.add_parser("info", help="which kernels are in use, and why")
    run.set_defaults(parser=run)
    measure = commands.add_parser("bench", help="measure against dense rivals; unknown options go to the benchmark")
    measure.add_argument("device", choices=BENCHMARKS)
    measure.add_argument("only", nargs="?", choices=("infer", "train"), help="streaming inference or training")
    for command in (run, search, score, small, quiet, page, tables):
        command.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def run(options: argparse.Namespace, rest: list[str], root: argparse.ArgumentParser) -> int:
    if rest and options.command not in ("train", "sweep", "bench"):
        root.error(f"{options.command} does not know {' '.join(rest)}")
    match options.command:
        case "train":
            if options.wants_help and options.recipe is None:
                options.parser.print_help()
                return 0
            if options.recipe is None and options.resume is None:
                options.parser.error("name a RECIPE of `egru list`, or --resume RUN")
            return train(options, rest + ["--help"] * options.wants_help)
        case "sweep":
            return sweep(options, rest)
        case "evaluate":
            return evaluate(options.run, options.split, options.device)
        case "export":
            return export(options.run, options.out, options.weights, options.part)
        case "quieten":
            return quieten(options)
        case "report":
            return report(options.runs, options.out)
        case "reproduce":
            return reproduce(options.table, options.keep)
        case "list":
            return list_recipes()
        case "doctor":
            return doctor()
        case "info":
            return info()
        case _:
            return bench(options.device, options.only, rest)


def main(arguments: list[str] | None = None) -> int:
    """Errors are one line: 2 where something is missing, 1 where it went wrong, 75 when time is up, 130 after Ctrl-C.

    Where whoever reads the output has left (`egru list | head`), there is nobody to tell: 141 in silence.
    """
    try:
        try:
            return guarded(arguments)
        finally:
            sys.stdout.flush()  # here, not when Python ends
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        return 141


def guarded(arguments: list[str] | None) -> int:
    root = parser()
    options, rest = root.parse_known_args(arguments)
    try:
        return run(options, rest, root)
    except KeyboardInterrupt:
        print("egru: stopped; `egru train --resume RUN` goes on from the last epoch", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except UsageError as error:
        print(f"egru: {error}", file=sys.stderr)
        return 2
    except egru.training.Paused as pause:
        print(f"egru: {pause}", file=sys.stderr)
        return 75
    except (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        if isinstance(error, ArithmeticError | LookupError):  # nobody meant to raise it
            said = f"{type(error).__name__}: {said}; a file of the run may be damaged, -v shows where it happened"
        if options.verbose:
            traceback.print_exc()
        else:
            print(f"egru: {said}", file=sys.stderr)
        return 2 if isinstance(error, FileNotFoundError) else 1
