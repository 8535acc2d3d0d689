"""The options of the ``egru`` command."""

import argparse
from collections.abc import Callable
from typing import Any

import egru
from egru.bench import BENCHMARKS
from egru.cli import commands
from egru.cli.arguments import Parser, finite_float, fraction, non_negative_float, positive_float, positive_int
from egru.cli.exit_codes import MEANINGS
from egru.types import C_WEIGHT_FORMATS, EVENTS, WEIGHT_FORMATS

SWEEP_EXAMPLE = """\
example of SPACE.py:

    def search(trial):
        return {
            "hidden": trial.suggest_int("hidden", 32, 256, log=True),
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            "threshold.mean": trial.suggest_float("threshold", -4, 0),
        }

    egru sweep smnist --search space.py --workers 4 --trials 40
    egru sweep smnist --search space.py --objectives quality,macs

`egru train RECIPE --help` lists the fields. Trials whose worker was killed are repeated.
"""

_RUN_OR_NAME = "folder of a run or an export, or name of a pretrained model (smnist)"
_NEW_FOLDER = "new folder; `egru evaluate FOLDER` reads it like a run"
_AGAIN = "nothing was written and there is nothing to resume: run the command again"
_SMOKE = "small network, little data, few epochs: takes less than a minute on a CPU"


def make_parser() -> Parser:
    """Return the parser of the ``egru`` command. Each command sets ``run``, the function that runs it."""
    parser = Parser(
        "egru",
        description=egru.__doc__,
        epilog="exit codes:\n" + "\n".join(f"  {code:<4} {meaning}" for code, meaning in MEANINGS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"egru {egru.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_train(subparsers)
    _add_evaluate(subparsers)
    _add_report(subparsers)
    _add_export(subparsers)
    _add_quieten(subparsers)
    _add_convert(subparsers)
    _add_sweep(subparsers)
    _add_list(subparsers)
    _add_reproduce(subparsers)
    _add_bench(subparsers)
    _add_demo(subparsers)
    _add_doctor(subparsers)
    _add_info(subparsers)
    return parser


def _add_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, description: str, **options: Any
) -> Parser:
    command = subparsers.add_parser(name, help=help, description=description, **options)
    command.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    command.set_defaults(run=run, takes_extra=False, parser=command, interrupted=_AGAIN)
    return command


def _add_train(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "train",
        commands.train,
        "train a recipe, or resume a run",
        "Train a recipe in a new run folder, or resume a run. Every field of the recipe's config is an option: "
        "`egru train RECIPE --help` lists them.",
        usage="egru train RECIPE [--smoke] [--out FOLDER] [--minutes M] [--FIELD VALUE ...]\n"
        "       egru train --resume RUN [--minutes M]",
        add_help=False,
    )
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe, see `egru list`")
    command.add_argument("--smoke", action="store_true", help=_SMOKE)
    command.add_argument("--out", metavar="FOLDER", help="run folder to create (default: runs/RECIPE-TIME)")
    command.add_argument("--resume", metavar="RUN", help="resume the run in this folder, with its settings")
    command.add_argument(
        "--minutes",
        type=positive_float,
        metavar="M",
        help="stop at the end of the epoch in which M minutes have passed; --resume continues",
    )
    command.add_argument(
        "-h", "--help", action="store_true", dest="wants_help", help="show this help; with RECIPE, list its fields"
    )
    command.set_defaults(takes_extra=True)


def _add_evaluate(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "evaluate",
        commands.evaluate,
        "score a run or a pretrained model",
        "Score the best epoch of a run, or a pretrained model, and print its activity. Requires the data set that it "
        "was trained on; `egru doctor` shows which ones are present.",
    )
    command.add_argument("source", metavar="RUN", help=_RUN_OR_NAME)
    command.add_argument(
        "--split", choices=("test", "validation"), default="test", help="split to score (default: test)"
    )
    _add_device(command)


def _add_report(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "report",
        commands.report,
        "write the report page of one run or several, or of a sweep",
        "Write an HTML page with the curves, settings and events of one run, or of several runs side by side. The page "
        "of a sweep shows its trials, the Pareto front of quality and MACs, and quality by setting.",
    )
    command.add_argument("folders", nargs="+", metavar="RUN", help=f"{_RUN_OR_NAME}, or a sweep")
    command.add_argument(
        "--out", metavar="FOLDER", help="folder for the page (default: RUN/report; for several runs: report)"
    )
    command.add_argument(
        "--time", action="store_true", help="measure the time per step of each run on this CPU and record it in the run"
    )
    command.set_defaults(interrupted="the page may be incomplete: run the command again")


def _add_export(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "export",
        commands.export,
        "write the weights of a run's best epoch in small files, or the network as C code or ONNX",
        "Write the weights of the best epoch, in one or more files, and the records of a run to a new folder, "
        "without the training state. With --target c, write the network as one C file and its header; with "
        "--target onnx, as a dense graph that computes all units.",
    )
    command.add_argument("folder", metavar="RUN", help=_RUN_OR_NAME)
    command.add_argument("out", metavar="FOLDER", help=_NEW_FOLDER)
    command.add_argument(
        "--target",
        choices=("run", "c", "onnx"),
        default="run",
        help="a folder that can be read like a run (default), C code, or an ONNX graph (portable, not fast)",
    )
    command.add_argument(
        "--weights",
        choices=tuple(dict.fromkeys((*WEIGHT_FORMATS, *C_WEIGHT_FORMATS))),
        help=f"number format of the weights: {', '.join(WEIGHT_FORMATS)} (default: bfloat16); for C: "
        f"{', '.join(C_WEIGHT_FORMATS)} (default: float32)",
    )
    command.add_argument("--part", type=positive_float, metavar="MIB", help="maximum file size in MiB (default: 16)")
    command.add_argument("--name", help="prefix of the C files, functions and types (default: model)")


def _add_quieten(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "quieten",
        commands.quieten,
        "raise the thresholds of a run for fewer events, without training",
        "Raise the thresholds of a run layer by layer while the validation loss allows it, and export the network. "
        "Nothing is trained. The test split is scored once, at the end.",
    )
    command.add_argument("source", metavar="RUN", help=_RUN_OR_NAME)
    command.add_argument("out", metavar="FOLDER", help=_NEW_FOLDER)
    command.add_argument(
        "--floor",
        type=finite_float,
        nargs="+",
        default=(),
        metavar="F",
        help="raise lower thresholds to F, one for all layers or one per layer (default: search)",
    )
    command.add_argument(
        "--within",
        type=non_negative_float,
        default=1e-3,
        metavar="NATS",
        help="accept a validation loss up to this much above the lowest one found (default: 0.001)",
    )
    _add_weights(command)
    _add_device(command)


def _add_convert(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "convert",
        commands.convert,
        "convert the GRU or LSTM of a run to event layers",
        "Replace the GRU or LSTM of a run by event layers with the same weights, and export the network. Thresholds "
        "are chosen on training sequences without training, or with --activity by fine-tuning. The test split is "
        "scored once, at the end.",
    )
    command.add_argument("source", metavar="RUN", help="folder of a run or an export with cell gru or lstm")
    command.add_argument("out", metavar="FOLDER", help=_NEW_FOLDER)
    command.add_argument("--events", choices=EVENTS, default="delta", help="kind of events (default: delta)")
    command.add_argument(
        "--within",
        type=non_negative_float,
        metavar="NATS",
        help="accepted increase of the loss on 500 training sequences (default: 0.01)",
    )
    command.add_argument(
        "--activity", type=fraction, metavar="F", help="fine-tune until this fraction of units and steps has an event"
    )
    command.add_argument("--epochs", type=positive_int, metavar="N", help="epochs of fine-tuning (default: 20)")
    _add_weights(command)
    _add_device(command)


def _add_sweep(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "sweep",
        commands.sweep,
        "tune the fields of a recipe with Optuna",
        "Tune the fields of a recipe with Optuna. Every trial is a run. The same command resumes a sweep.",
        usage="egru sweep RECIPE --search SPACE.py [--trials N] [--workers N] [--storage STORAGE] [--FIELD VALUE ...]",
        epilog=SWEEP_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("recipe", metavar="RECIPE", help="name of a recipe, see `egru list`; its fields are options here too")
    add("--search", metavar="SPACE.py", required=True, help="Python file that defines search(trial) -> dict of fields")
    add(
        "--trials",
        type=positive_int,
        default=20,
        metavar="N",
        help="total number of trials in the study (default: 20)",
    )
    add("--workers", type=positive_int, default=1, metavar="N", help="parallel trials on this machine (default: 1)")
    add(
        "--storage",
        metavar="STORAGE",
        help="journal file, or postgresql://USER@HOST/DATABASE for several machines (default: FOLDER/journal.log)",
    )
    add("--study", metavar="NAME", help="name of the study in the storage (default: RECIPE)")
    add("--out", metavar="FOLDER", help="folder for the runs (default: sweeps/STUDY)")
    add(
        "--objectives",
        default="quality",
        metavar="A[,B]",
        help="quality, macs or backward-macs, on the validation split; two give a Pareto front (default: quality)",
    )
    add(
        "--pruner",
        choices=("median", "hyperband", "none"),
        help="how to stop bad trials early (default: median; none with several objectives)",
    )
    add("--devices", metavar="A[,B...]", help="devices that workers use in turn, such as cuda:0,cuda:1")
    add("--smoke", action="store_true", help=_SMOKE)
    command.set_defaults(
        takes_extra=True, interrupted="the same command resumes the sweep and repeats unfinished trials"
    )


def _add_list(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "list",
        commands.list_recipes,
        "list the recipes with the paper's numbers",
        "List the recipes by table of the paper, each with the paper's numbers.",
    )
    command.add_argument("table", nargs="?", metavar="TABLE", help="list only this table (default: all)")


def _add_reproduce(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "reproduce",
        commands.reproduce,
        "print the paper's tables with our results",
        "Print a table of the paper with our results, each with its command and date. Without TABLE, list the tables.",
    )
    command.add_argument("table", nargs="?", metavar="TABLE", help="name of a table")
    command.add_argument("--keep", metavar="RUN", help="add a finished run to our results (requires a checkout)")
    command.add_argument("--note", default="", metavar="TEXT", help="remark that the tables show with the kept run")


def _add_bench(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "bench",
        commands.bench,
        "measure speed and memory against dense baselines",
        "Measure speed and memory against dense baselines. `egru bench cpu infer --help` shows the options of that "
        "benchmark. Results are written to the working directory.",
        usage="egru bench {cpu,gpu} [{infer,train,small,lstm}] [OPTIONS]",
        add_help=False,
    )
    command.add_argument("device", nargs="?", choices=tuple(BENCHMARKS), help="device to measure")
    command.add_argument(
        "measured",
        nargs="?",
        choices=("infer", "train", "small", "lstm"),
        help="streaming inference, training, small and medium layers, or LSTMs (default: all)",
    )
    command.add_argument(
        "-h", "--help", action="store_true", dest="wants_help", help="show this help, or that of the benchmark"
    )
    command.set_defaults(
        takes_extra=True,
        interrupted="a benchmark cannot be resumed: run the command again",
    )


def _add_demo(subparsers: Any) -> None:
    command = _add_command(
        subparsers,
        "demo",
        commands.demo,
        "open a page on which a network reads digits that you draw",
        "Open a page in the browser on which the pretrained network reads digits that you draw, pixel by pixel. The "
        "page is one file; nothing is loaded from or sent to the network.",
    )
    command.add_argument("--out", metavar="FILE", help="write a copy of the page instead of opening it")


def _add_doctor(subparsers: Any) -> None:
    _add_command(
        subparsers,
        "doctor",
        commands.doctor,
        "show what is installed, which kernels are used, which data sets are present",
        "Show installed packages, the kernels in use and why, and which data sets are present under EGRU_DATA.",
    )


def _add_info(subparsers: Any) -> None:
    _add_command(
        subparsers, "info", commands.info, "show which kernels are used and why", "Show which kernels are used and why."
    )


def _add_weights(command: Parser) -> None:
    command.add_argument(
        "--weights", choices=WEIGHT_FORMATS, default="bfloat16", help="number format of the weights (default: bfloat16)"
    )


def _add_device(command: Parser) -> None:
    command.add_argument(
        "--device", metavar="DEVICE", help="run on this device in float32 (default: device and precision of the run)"
    )
