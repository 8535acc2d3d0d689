"""Compare the speed of two builds of the package, interleaved.

    python benchmarks/compare_builds.py OLD NEW                     # on the CPU
    python benchmarks/compare_builds.py OLD NEW --device cuda

OLD and NEW are Python interpreters, or ``INTERPRETER:FOLDER`` to put FOLDER first on the module path. Each build runs
in its own process. The processes take turns, so that a change in the load of the machine affects both. Before timing,
the outputs of the two builds are compared. Prints the median time per case and the ratio new / old. Where
memory lands differs from process to process and moves times by several percent: compare with ``--restarts 5``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "engine step, H 590, I 1": {"kind": "engine", "inputs": 1, "hidden": 590, "repeats": 400},
        "engine sequence, T 784, H 590, I 1": {
            "kind": "engine sequence", "T": 784, "inputs": 1, "hidden": 590, "repeats": 20,
        },
        "engine step, H 1350, I 1350": {"kind": "engine", "inputs": 1350, "hidden": 1350, "repeats": 60},
        "training, T 200, B 64, I 1, H 590": {"kind": "train", "T": 200, "B": 64, "inputs": 1, "hidden": 590},
        "training, T 35, B 64, I 1350, H 1350": {"kind": "train", "T": 35, "B": 64, "inputs": 1350, "hidden": 1350},
        "training, T 16, B 8, I 32, H 64": {
            "kind": "train", "T": 16, "B": 8, "inputs": 32, "hidden": 64, "repeats": 20,
        },
        "inference, T 1, B 1, I 32, H 32": {
            "kind": "infer", "T": 1, "B": 1, "inputs": 32, "hidden": 32, "repeats": 400,
        },
    },
    "cuda": {
        "training, T 68, B 64, I 1350, H 1350": {"kind": "train", "T": 68, "B": 64, "inputs": 1350, "hidden": 1350},
        "training, the same, reset gate before": {
            "kind": "train", "T": 68, "B": 64, "inputs": 1350, "hidden": 1350, "reset_gate": "before",
        },
        "training, T 784, B 500, I 1, H 590": {"kind": "train", "T": 784, "B": 500, "inputs": 1, "hidden": 590},
        "training, T 16, B 32, I 64, H 256": {"kind": "train", "T": 16, "B": 32, "inputs": 64, "hidden": 256},
        "training, T 68, B 64, I 590, H 590, float32": {
            "kind": "train", "T": 68, "B": 64, "inputs": 590, "hidden": 590, "precision": "float32",
        },
        "inference, T 64, B 1, I 590, H 590": {"kind": "infer", "T": 64, "B": 1, "inputs": 590, "hidden": 590},
    },
}  # fmt: skip


def make_case(
    kind: str,
    device: str,
    inputs: int,
    hidden: int,
    T: int = 64,
    B: int = 1,
    reset_gate: str = "after",
    precision: str = "bfloat16",
    repeats: int = 1,
) -> tuple[Callable[[], Any], int]:
    """Return a function that runs the case once, and how often to run it per measurement."""
    import torch

    import egru

    torch.manual_seed(0)
    threshold = egru.Threshold.constant(0.15)
    layer = egru.EGRU(inputs, hidden, reset_gate=reset_gate, threshold=threshold).to(device)  # pyright: ignore[reportArgumentType]
    x = torch.randn(T, B, inputs, device=device)
    if kind == "engine sequence":
        engine = egru.EventEngine(layer)
        sequence = x[:, 0].contiguous()
        return lambda: engine.run(sequence), repeats
    if kind == "engine":
        engine = egru.EventEngine(layer)
        rows = [row[0].contiguous() for row in x]
        state = [0]
        # Without allocation: version 0.1.0 returns one buffer at every step; later versions write to `out`.
        returns_buffer = engine.step(rows[0]) is engine.step(rows[0])
        buffer = {} if returns_buffer else {"out": engine.step(rows[0]).clone()}
        engine.reset()  # the builds have taken different numbers of steps so far

        def step() -> Any:
            state[0] = (state[0] + 1) % T
            return engine.step(rows[state[0]], **buffer)

        return step, repeats
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and precision == "bfloat16")
    if kind == "infer":
        layer.eval()

        def infer() -> Any:
            with torch.no_grad(), autocast:
                return layer(x)[0]

        return infer, repeats
    x.requires_grad_(inputs > 1)

    def train() -> Any:
        layer.zero_grad(set_to_none=True)
        with autocast:
            y = layer(x)[0]
        y.float().square().sum().backward()
        return y

    return train, repeats


def work(device: str) -> None:
    """Serve measurements: read the name of a case per line, answer with seconds per run and a checksum."""
    import torch

    import egru

    print(json.dumps({"file": egru.__file__}), flush=True)
    prepared: dict[str, tuple[Callable[[], Any], int]] = {}
    for line in sys.stdin:
        name = line.strip()
        first = name not in prepared
        if first:
            prepared[name] = make_case(device=device, **CASES[device][name])
        run, repeats = prepared[name]
        output = run()
        checksum = float(output.detach().double().abs().sum()) if first else 0.0
        if device == "cuda":
            run()
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats if device == "cpu" else 10 * repeats):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / (repeats if device == "cpu" else 10 * repeats)
        print(json.dumps({"seconds": seconds, "checksum": checksum}), flush=True)


class Build:
    """A process that measures one build."""

    def __init__(self, place: str, device: str, threads: int) -> None:
        interpreter, _, folder = place.partition(":")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        if folder:
            environment["PYTHONPATH"] = os.path.abspath(folder)
        command = [interpreter, os.path.abspath(__file__), "--serve", "--device", device]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        file = Path(json.loads(self.process.stdout.readline())["file"])
        if folder and Path(folder).resolve() not in file.resolve().parents:
            raise SystemExit(
                f"compare_builds: {interpreter} imports {file}, not the package in {folder}: an editable install takes "
                "precedence over the module path; use an interpreter without one"
            )
        print(f"{place}: {file}", flush=True)

    def measure(self, case: str) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Start one process per build, measure every case in alternation, and return the times and ratios."""
    builds = [Build(place, options.device, options.threads) for place in (options.old, options.new)]
    result: dict[str, Any] = {}
    for case in CASES[options.device]:
        first = [build.measure(case) for build in builds]
        old_sum, new_sum = (answer["checksum"] for answer in first)
        difference = abs(old_sum - new_sum) / max(abs(old_sum), 1e-30)
        times: list[list[float]] = [[], []]
        for turn in range(options.turns):
            for i in (0, 1) if turn % 2 == 0 else (1, 0):
                times[i].append(builds[i].measure(case)["seconds"])
        old, new = (statistics.median(values) for values in times)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        result[case] = {"old_seconds": old, "new_seconds": new, "ratio": ratio, "output_difference": difference}
        print(f"{case:46} old {1e6 * old:10.1f} µs  new {1e6 * new:10.1f} µs  new/old {ratio:.3f}", flush=True)
        print(f"{'':46} relative difference of the outputs: {difference:.1e}", flush=True)
    for build in builds:
        build.close()
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="interpreter of the old build, or INTERPRETER:FOLDER")
    parser.add_argument("new", nargs="?", help="interpreter of the new build, or INTERPRETER:FOLDER")
    parser.add_argument("--device", choices=tuple(CASES), default="cpu", help="(cpu)")
    parser.add_argument("--turns", type=int, default=15, help="measurements per build and case (15)")
    parser.add_argument("--restarts", type=int, default=1, help="times to start both processes anew (1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (all cores)")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        work(options.device)
        return 0
    if options.old is None or options.new is None:
        parser.error("name the old and the new build")
    restarts = [compare(options) for _ in range(options.restarts)]
    result: dict[str, Any] = {}
    for case in CASES[options.device]:
        results = [restart[case] for restart in restarts]
        ratio = statistics.median(entry["ratio"] for entry in results)
        result[case] = {"ratio": ratio, "restarts": results}
        if options.restarts > 1:
            print(f"{case:46} new/old {ratio:.3f}, median of {options.restarts} restarts", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
