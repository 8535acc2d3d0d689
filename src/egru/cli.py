"""The ``egru`` command."""

import argparse
import runpy
import sys
from pathlib import Path

import egru

BENCHMARKS = {"cpu": ("infer_cpu.py", "train_cpu.py"), "gpu": ("train_gpu.py",)}
"""What ``egru bench`` runs, in order: scripts of the repository's ``benchmarks/``, each with options of its own."""


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("egru", description=egru.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="which kernels are in use, and why")
    bench_parser = commands.add_parser(
        "bench", help="measure against dense rivals; unknown options go to the benchmark"
    )
    bench_parser.add_argument("device", choices=BENCHMARKS)
    bench_parser.add_argument("only", nargs="?", choices=("infer", "train"), help="streaming inference or training")
    known, rest = parser.parse_known_args(arguments)
    if known.command == "info":
        if rest:
            parser.error(f"info takes no options, got {' '.join(rest)}")
        for name, standing in egru.kernels.info().items():
            print(f"{name}: {standing}")
        return 0
    try:
        return bench(known.device, known.only, rest)
    except FileNotFoundError as error:
        print(f"egru: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
