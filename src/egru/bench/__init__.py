"""Speed and memory of the layers and the engine, measured side by side with dense baselines.

Each benchmark is a module with a function ``main(arguments)``: `egru bench cpu infer` and
`python -m egru.bench.infer_cpu` are the same. Results are written to a new file in the working directory
unless ``--out`` is given.
"""

import argparse
import datetime
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from egru.cli.arguments import Parser

BENCHMARKS = {
    "cpu": {"infer": "infer_cpu", "train": "train_cpu", "small": "small_cpu", "lstm": "lstm_cpu"},
    "gpu": {"train": "train_gpu", "small": "small_gpu", "lstm": "lstm_gpu"},
}
"""Module of each benchmark, by device and by what is measured."""


def select(device: str, measured: str | None = None) -> list[str]:
    """Return the modules of the benchmarks of a device.

    Args:
        device: ``"cpu"`` or ``"gpu"``.
        measured: ``"infer"``, ``"train"``, ``"small"`` or ``"lstm"``. If None, all benchmarks of the device.

    Raises:
        ValueError: If the device has no such benchmark.
    """
    benchmarks = BENCHMARKS[device]
    if measured is None:
        return list(benchmarks.values())
    if measured not in benchmarks:
        raise ValueError(f"there is no {device} benchmark {measured!r}; choose from {', '.join(benchmarks)}")
    return [benchmarks[measured]]


def run(module: str, arguments: Sequence[str] = ()) -> int:
    """Run the benchmark ``module`` with its command-line options and return its exit code."""
    return importlib.import_module(f"egru.bench.{module}").main(list(arguments))


def make_parser(name: str, description: str | None) -> "Parser":
    """Return a parser for the options of the benchmark ``name``, such as ``"cpu infer"``. It has the option --out."""
    from egru.cli.arguments import Parser  # egru.cli imports this module

    formatter = argparse.RawDescriptionHelpFormatter
    description = description and description.replace("``", "`")
    parser = Parser(f"egru bench {name}", description=description, formatter_class=formatter)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON file to write (default: a new file in the working directory, named after benchmark and time)",
    )
    return parser


def results_file(parser: "Parser", out: Path | None, benchmark: str) -> Path:
    """Return the file for the results, and exit with an error if it cannot be written. Call it before measuring.

    Args:
        parser: Reports the error.
        out: The value of --out. If None, a new file in the working directory: no existing file is overwritten.
        benchmark: Start of the name of the new file.
    """
    if out is None:
        out = Path(f"{benchmark}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json")
        if out.exists():
            parser.error(f"{out} exists; name another file with --out")
    if out.is_dir():
        parser.error(f"--out: {out} is a folder; name a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: cannot create the folder {out.parent}: {error.strerror}")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        parser.error(f"--out: {out} is not writable")
    return out


def write_results(out: Path, results: Mapping[str, Any], draw: Callable[[Path], None]) -> None:
    """Write the results as JSON, and a figure with the same name if matplotlib is installed.

    Args:
        out: JSON file.
        results: Content of the file.
        draw: Draws the figure into a file.
    """
    out.write_text(json.dumps(results, indent=1))
    print(f"written: {out}")
    try:
        draw(out.with_suffix(".png"))
    except ImportError:
        print("no plot: it requires matplotlib (pip install 'egru[bench]')")
    else:
        print(f"written: {out.with_suffix('.png')}")
