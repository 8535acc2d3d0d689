"""Count the instructions of the core on 64-bit Arm per level: steps of the streaming engine, and training.

    python benchmarks/arm_core.py           # writes benchmarks/results/arm_core.json
    python benchmarks/arm_core.py --table   # print the stored results as Markdown

Requires cmake, g++-aarch64-linux-gnu and qemu-user. A plugin of QEMU counts instructions, as the difference between
programs that repeat the same call. Instructions are not time: processors differ in how many they execute per cycle.

The engine has 256 units of which a fifth has an event at every step. Training is one call of the forward and of the
backward pass in float32: 256 units, 64 inputs, 20 steps, a batch of 16. The compiler uses NEON at the plain level too.
"""

import argparse
import datetime
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PROGRAM = ROOT / "build" / "aarch64" / "serve"
EMULATOR = ["qemu-aarch64", "-cpu", "max"]
RESULTS = ROOT / "benchmarks" / "results" / "arm_core.json"
LEVELS = ("plain", "neon", "neon_dot")
STEPS = 20


def measure() -> dict[str, Any]:
    """Return the instructions of each case and level."""
    from tests.kernels.test_other_processors import build_aarch64

    build_aarch64()
    os.environ["EGRU_EMULATED_CORE"] = shlex.join([*EMULATOR, str(PROGRAM)])
    emulated_core: Any = importlib.import_module("tests.emulated_core")  # replaces the core; before egru

    import torch

    import egru
    from egru.events import has_event
    from egru.kernels import get
    from egru.kernels.cpu import kernel as cpu_kernel
    from tests.kernels.parity_cases import Case

    torch.set_num_threads(1)
    cpu_kernel.limits = cpu_kernel.Limits(one_thread=1 << 60, own_threads=1 << 60)
    plugin = Path(tempfile.mkdtemp()) / "count.so"
    source = ROOT / "benchmarks" / "c" / "count.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", str(plugin)], check=True)
    own = emulated_core.emulator

    def count(level: str, work: Callable[[Callable[[], None]], Any]) -> float:
        """Return the instructions of the calls that ``work`` makes after it has called its argument."""
        totals: list[int] = []
        for repeats in (1, 3):
            command = [EMULATOR[0], "-plugin", str(plugin), *EMULATOR[1:], str(PROGRAM)]
            emulator = emulated_core.emulator = emulated_core.Emulator(command, stderr=subprocess.PIPE)
            emulator.call("force_level", level)
            work(lambda: emulator.call("repeat", repeats) and None)  # noqa: B023
            totals.append(int(re.findall(r"instructions: (\d+)", emulator.close())[0]))
        emulated_core.emulator = own
        return (totals[1] - totals[0]) / 2

    layer = egru.EGRU(1, 256, reset="none", threshold=egru.Threshold("identity", mean=10.0)).eval()
    with torch.no_grad():
        layer.get_parameter("threshold_l0")[::5] = -10.0

    def engine_steps(weights: Any) -> Callable[[Callable[[], None]], Any]:
        def work(start: Callable[[], None]) -> None:
            engine = egru.EventEngine(layer, weights)
            engine.run(torch.ones(2, 1))
            start()
            engine.run(torch.ones(STEPS, 1))
            emulated_core.emulator.call("repeat", 1)
            del engine

        return work

    problem = Case(T=20, B=16, I=64, H=256, theta=0.25, reset_scale=1.0).problem(dtype=torch.float32)
    forward = get("cpu").forward(problem, True)
    ones = [torch.ones_like(x) for x in forward[:4]]
    sparsity = 1 - has_event(forward.c, problem.theta, "positive").double().mean().item()

    def run_forward(start: Callable[[], None]) -> None:
        start()
        get("cpu").forward(problem, True)

    def run_backward(start: Callable[[], None]) -> None:
        start()
        get("cpu").backward(problem, forward.y, forward.c, forward.reserve, *ones, True)

    cases: dict[str, tuple[float, Callable[[Callable[[], None]], Any]]] = {
        f"engine, {weights}, per step": (STEPS, engine_steps(weights)) for weights in ("float32", "bfloat16", "int8")
    }
    cases |= {"training, forward": (1, run_forward), "training, backward": (1, run_backward)}
    result: dict[str, Any] = {"activity_sparsity_training": sparsity, "instructions": {}}
    for name, (calls, work) in cases.items():
        row = {level: round(count(level, work) / calls) for level in LEVELS}
        result["instructions"][name] = row
        print(name, row, flush=True)
    return result


def environment() -> dict[str, str]:
    """Return versions of the compiler and of the emulator."""
    tools = ("aarch64-linux-gnu-g++", "qemu-aarch64")
    outputs = {tool: subprocess.run([tool, "--version"], capture_output=True, text=True).stdout for tool in tools}
    return {tool: output.splitlines()[0] for tool, output in outputs.items()}


def table(record: dict[str, Any]) -> str:
    """Return one row per case."""
    lines = ["| | plain | neon | neon_dot | neon_dot / plain |", "|---|---|---|---|---|"]
    for name, row in record["instructions"].items():
        counts = " | ".join(f"{row[level]:,}" for level in LEVELS)
        lines.append(f"| {name} | {counts} | {row['neon_dot'] / row['plain']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the stored record as a Markdown table")
    if parser.parse_args().table:
        print(table(json.loads(RESULTS.read_text())))
        return
    record = {"date": datetime.date.today().isoformat(), "environment": environment(), **measure()}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
