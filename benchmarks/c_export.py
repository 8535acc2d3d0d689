"""Measure size and instructions per step of exported C code against dense GRUs, per target.

    python benchmarks/c_export.py                       # all targets; writes benchmarks/results/c_export.json
    python benchmarks/c_export.py --targets cortex-m4f --out x.json
    python benchmarks/c_export.py --table               # print the stored results as Markdown

Networks: 256 and 590 units of which a fifth has an event at every step, and the pretrained ``smnist`` model (590 units)
over one digit. Each is exported with float32 weights, with int8 weights, and in integers only. The rivals in
``benchmarks/c`` have the same size and number format: a dense GRU in float32, and one with int8 weights and activations
as runtimes for microcontrollers compute it, and gates in float32 or in integers. Of each, several orders of summation
are compiled, on aarch64 also one with NEON intrinsics, and the one with the fewest instructions on the target counts.
All programs are compiled with the same options.

Instructions are counted exactly, as the difference between programs of different numbers of steps: with callgrind on
x86-64, with a plugin of QEMU elsewhere. Flash is code and constants without the program around them, RAM is the size
of a state.
"""

import argparse
import datetime
import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import egru
from egru import EventEngine
from egru.files import replace_file
from egru.runtime import export_c
from egru.runtime.c import integer_source, template
from egru.types import C_WEIGHT_FORMATS, CWeightFormat

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.helpers import mnist_sample  # noqa: E402
from tests.runtime.c.networks import compile_objects, fixed_point  # noqa: E402
from tests.runtime.c.targets import TARGETS, Target  # noqa: E402

COUNTED = ("x86-64", "aarch64", "cortex-m4f", "cortex-m7")
OPTIONS = ("-O3", "-fno-trapping-math")
SIZE = {"x86-64": "size", "aarch64": "aarch64-linux-gnu-size"}
ROWS = [(f"-DROWS={n}", f"-DACTIVATION={kind}") for n in (2, 4) for kind in ("int8_t", "int16_t")]
INTRINSICS = ("-DROWS=4", "-DACTIVATION=int8_t", "-DINTRINSICS=1")
RANGE = ("-DROWS=4", "-DACTIVATION=int8_t", "-DFLOAT_GATES=1", "-DRANGE=40.0f")
DENSE: dict[CWeightFormat, tuple[str, list[tuple[str, ...]]]] = {
    "float32": ("dense_float.c", [("-DBY_ROWS=1",), ("-DBY_ROWS=0",)]),
    "int8": ("dense_int8.c", [*((*flags, "-DFLOAT_GATES=1") for flags in (*ROWS, INTRINSICS)), RANGE]),
    "integer": ("dense_int8.c", [(*flags, "-DFLOAT_GATES=0") for flags in (*ROWS, INTRINSICS)]),
}
"""The rival in each number format: its source, and the options of the orders of summation to try."""
RESULTS = ROOT / "benchmarks" / "results" / "c_export.json"


def sparse_network(hidden: int) -> EventEngine:
    """Return an engine in which every fifth unit has an event at every step."""
    torch.manual_seed(0)
    layer = egru.EGRU(1, hidden, reset="none", threshold=egru.Threshold("identity", mean=10.0))
    with torch.no_grad():
        layer.get_parameter("threshold_l0")[::5] = -10.0
    return EventEngine(layer.eval(), readout=torch.nn.Linear(hidden, 10))


def event_program(weights: CWeightFormat, x: torch.Tensor, steps: int) -> str:
    """Return a program that runs the exported network."""
    integer = weights == "integer"
    kind, out = ("int16_t", "int32_t") if integer else ("float", "float")
    return f"""
#include "net.h"
{template.array(kind, "x", fixed_point(x) if integer else x.numpy())}
static net_state state;
void emit(uint32_t word);
void run(void);
void run(void)
{{
    {out} out[NET_OUTPUTS] = {{0}};
    volatile int steps = {steps};
    int t;
    for (t = 0; t < steps; ++t)
        net_step(&state, x + t, out);
    emit((uint32_t)sizeof state);
    emit(out[0] > 0);
}}
"""


def dense_program(integer: bool, steps: int) -> str:
    kind, out = ("int16_t", "int32_t") if integer else ("float", "float")
    return f"""
#include <stdint.h>
void dense_step({kind} x, {out} *out);
void emit(uint32_t word);
void run(void);
void run(void)
{{
    {out} out[10];
    volatile int steps = {steps};
    int t;
    for (t = 0; t < steps; ++t)
        dense_step(({kind})(t + 1), out);
    emit(out[0] > 0);
}}
"""


def write_dense_headers(folder: Path, hidden: int, weights: CWeightFormat) -> None:
    """Write the weights of a dense GRU, and the functions that it shares with the exported code."""
    generator = np.random.default_rng(0)
    inputs = hidden if weights == "float32" else -(-hidden // 16) * 16
    shapes = {"w": 3 * hidden, "v": -(-3 * hidden // 4) * 4 * inputs, "bias": 3 * hidden, "bias_q": hidden}
    shapes |= {"readout": 12 * inputs, "readout_bias": 10, "scale": 3 * hidden}
    kinds = dict.fromkeys(shapes, "int32_t" if weights == "integer" else "float")
    if weights != "float32":
        kinds |= {"v": "int8_t", "readout": "int8_t"} | ({"w": "int16_t"} if weights == "integer" else {})
    text = f"#define HIDDEN {hidden}\n#define OUTPUTS 10\n#include <stdint.h>\n"
    for name, count in shapes.items():
        values = generator.standard_normal(count).astype(np.float32) / hidden**0.5
        if kinds[name] != "float":
            values = np.rint(np.clip(values * 60, -1, 1) * 120).astype(np.int64)
        if name != "scale" or weights != "float32":
            text += template.array(kinds[name], name, values)
    (folder / "weights.h").write_text(text)
    flags = dict.fromkeys(("FLOAT32", "INT8", "INT16", "LSTM_ANY", "GRU_ANY", "MAGNITUDE"), False)
    flags |= dict.fromkeys(("BEFORE", "DELTA_ANY", "SKIP", "DENSE"), False)
    kernels = template.render("float_kernels.c", flags, {})
    (folder / "exponential.h").write_text(kernels.split("static inline float sigmoid")[0])
    flags |= {"AFTER_ANY": True, "INT8": True, "INTEGER": True, "LONG_SHIFT": False}
    preamble = template.render("preamble.c", flags, {}).split("#endif\n", 2)[2]  # without the checks of the header
    names = {"PRE": str(integer_source.PRE_FRACTION), "FIRED_FUNCTION": ""}
    gates = template.render("integer_kernels.c", flags, names)
    (folder / "gates.h").write_text(preamble + integer_source.tables() + gates)


def count_instructions(name: str, target: Target, program: Path) -> int:
    """Return the number of instructions of a program."""
    if name == "x86-64":
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(program)]
        pattern = r"Collected : (\d+)"
    else:
        plugin = program.with_name("count.so")
        source = ROOT / "benchmarks" / "c" / "count.c"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", str(plugin)], check=True)
        command = [target.run[0], "-plugin", str(plugin), *target.run[1:], str(program)]
        pattern = r"instructions: (\d+)"
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    return int(re.findall(pattern, result.stderr)[0])


def per_step(
    name: str, folder: Path, source: Path, main: Callable[[int], str], steps: tuple[int, int], *flags: str
) -> tuple[float, int]:
    """Return the instructions per step between two numbers of steps, and the size of the code and its constants."""
    target = TARGETS[name]
    code = compile_objects([*target.compiler, f"-I{folder}", "-std=c99", "-w", *OPTIONS, *flags], [source])
    counts: list[int] = []
    for n in steps:
        file = folder / f"main{n}.c"
        file.write_text(main(n))
        target.build([file], folder / f"program{n}", "-Wno-unused", objects=code)
        counts.append(count_instructions(name, target, folder / f"program{n}"))
    sizes = subprocess.run([SIZE.get(name, "arm-none-eabi-size"), str(code[0])], capture_output=True, text=True)
    text, data, *_ = sizes.stdout.splitlines()[1].split()
    return (counts[1] - counts[0]) / (steps[1] - steps[0]), int(text) + int(data)


def measure_event(name: str, engine: EventEngine, weights: CWeightFormat, x: torch.Tensor, first: int) -> Any:
    """Return size and instructions per step of an exported network."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = export_c(engine, folder, weights, name="net")[1]
        steps = (first, len(x))
        count, flash = per_step(name, folder, source, lambda n: event_program(weights, x, n), steps)
        ram = int(TARGETS[name].output(folder / f"program{first}")[0], 16)
        return {"flash": flash, "ram": ram, "instructions": count}


@functools.cache
def measure_dense(name: str, hidden: int, weights: CWeightFormat) -> Any:
    """Return size and instructions per step of the best dense GRU, and instructions of the best one in plain C."""
    file, variants = DENSE[weights]
    best: Any = None
    plain = float("inf")
    for flags in variants:
        if "-DINTRINSICS=1" in flags and name != "aarch64":
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_dense_headers(folder, hidden, weights)
            source = Path(shutil.copy(ROOT / "benchmarks" / "c" / file, folder))
            integer = weights == "integer"
            count, flash = per_step(name, folder, source, lambda n: dense_program(integer, n), (2, 5), *flags)  # noqa: B023
            plain = plain if "-DINTRINSICS=1" in flags else min(plain, count)
            if best is None or count < best["instructions"]:
                best = {"flash": flash, "instructions": count, "options": " ".join(flags)}
    return best | {"plain_c": plain}


def measure(name: str, label: str, engine: EventEngine, x: torch.Tensor, first: int) -> dict[str, Any]:
    """Return sizes and instructions per step of a network and of its rivals on one target."""
    rows: dict[str, Any] = {}
    hidden = engine._network.layers[0].hidden
    for weights in C_WEIGHT_FORMATS:
        if weights == "float32" and name.startswith("cortex") and hidden > 512:
            continue  # more than the 4 MiB of the emulated boards
        row = measure_event(name, engine, weights, x, first)
        row["dense"] = measure_dense(name, hidden, weights)
        row["ratio"] = row["instructions"] / row["dense"]["instructions"]
        rows[weights] = row
        print(
            f"{label}, {name}, {weights}: {row['instructions']:,.0f} instructions, ratio {row['ratio']:.3f}", flush=True
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=COUNTED, default=COUNTED, help="default: all")
    parser.add_argument("--networks", nargs="+", help="labels of networks; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write the record to this JSON file")
    parser.add_argument("--table", action="store_true", help="print the stored record as a Markdown table")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    smnist = EventEngine(**egru.pretrained("smnist").streaming())
    networks = {
        "256 units, 80 %": (sparse_network(256), torch.ones(6, 1), 2),
        "590 units, 80 %": (sparse_network(590), torch.ones(6, 1), 2),
        "smnist, one digit": (smnist, mnist_sample()[0][0].float(), 0),
    }
    networks = {label: value for label, value in networks.items() if args.networks is None or label in args.networks}
    record: dict[str, Any] = {"date": datetime.date.today().isoformat(), "environment": environment(), "networks": {}}
    if args.out.exists():  # replace only what is measured now
        record["networks"] = json.loads(args.out.read_text())["networks"]
    for label, (engine, x, first) in networks.items():
        engine.reset_activity()
        engine.run(x)
        sparsity = 1 - engine.activity.events[0] / (len(x) * engine._network.layers[0].hidden)
        facts = record["networks"].setdefault(label, {"targets": {}})
        facts["activity_sparsity"] = sparsity
        for name in args.targets:
            if TARGETS[name].missing:
                print(f"{name} is skipped: {', '.join(TARGETS[name].missing)} is missing", file=sys.stderr)
                continue
            facts["targets"][name] = measure(name, label, engine, x, first)
            replace_file(args.out, (json.dumps(record, indent=2) + "\n").encode())


def table(record: dict[str, Any]) -> str:
    """Return one row per network, target and format."""
    lines = [
        "| network | target | weights | flash | RAM | instructions per step | dense | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, facts in record["networks"].items():
        for name, rows in facts["targets"].items():
            for weights, row in rows.items():
                sizes = f"{row['flash'] / 1024:,.0f} KiB | {row['ram'] / 1024:,.1f} KiB"
                counts = f"{row['instructions']:,.0f} | {row['dense']['instructions']:,.0f} | {row['ratio']:.3f}"
                lines.append(f"| {label} | {name} | {weights} | {sizes} | {counts} |")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """Return versions of the compilers and of the emulator."""
    versions: dict[str, Any] = {"egru": egru.__version__, "options": " ".join(OPTIONS)}
    for tool in ("gcc", "aarch64-linux-gnu-gcc", "arm-none-eabi-gcc", "qemu-system-arm", "valgrind"):
        if shutil.which(tool):
            output = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
            versions[tool] = output.splitlines()[0]
    return versions


if __name__ == "__main__":
    main()
