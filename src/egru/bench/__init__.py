"""Speed and memory of the layers and the engine, measured side by side with dense baselines.

Each benchmark is a module with a function ``main(arguments)``: `egru bench cpu infer` and
`python -m egru.bench.infer_cpu` are the same. Results are written to the working directory unless ``--out`` is given.
"""

import argparse
import importlib
from collections.abc import Sequence

BENCHMARKS = {
    "cpu": {"infer": "infer_cpu", "train": "train_cpu"},
    "gpu": {"train": "train_gpu"},
}
"""Module of each benchmark, by device and by what is measured."""


def select(device: str, measured: str | None = None) -> list[str]:
    """Return the modules of the benchmarks of a device.

    Args:
        device: ``"cpu"`` or ``"gpu"``.
        measured: ``"infer"`` or ``"train"``. If None, all benchmarks of the device.

    Raises:
        ValueError: If the device has no such benchmark.
    """
    benchmarks = BENCHMARKS[device]
    if measured is None:
        return list(benchmarks.values())
    if measured not in benchmarks:
        raise ValueError(f"there is no {device} benchmark {measured!r}: the event engine runs on the CPU only")
    return [benchmarks[measured]]


def run(module: str, arguments: Sequence[str] = ()) -> int:
    """Run the benchmark ``module`` with its command-line options and return its exit code."""
    return importlib.import_module(f"egru.bench.{module}").main(list(arguments))


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for the options of the benchmark ``name``, such as ``"cpu infer"``."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"egru bench {name}", description=description, formatter_class=formatter)
