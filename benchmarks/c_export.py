"""Measure size and instructions per step of exported C code against dense GRUs, per target.

    python benchmarks/c_export.py [--targets x86-64 cortex-m4f ...] [--out benchmarks/results/c_export.json]

Two networks: 256 units of which every fifth has an event at every step, and the pretrained ``smnist`` model (590 units)
in the middle of a digit. Each is exported with float32 weights, int8 weights, and in integers only. The rivals in
``benchmarks/dense`` have the same size: a dense GRU in float32, in the better of two orders of summation, and one with
int8 weights and activations, as runtimes for microcontrollers compute it. All are compiled with the same options.

Instructions are counted exactly: the difference between programs of different numbers of steps, under callgrind, or
under QEMU with one instruction per block. Flash is code and constants without the program around them, RAM is the size
of a state.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
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
from tests.runtime.c.networks import CNetwork, address, compile_library, fixed_point  # noqa: E402
from tests.runtime.c.targets import TARGETS, Target  # noqa: E402

COUNTED = ("x86-64", "aarch64", "cortex-m4f", "cortex-m7")
"""Targets on which instructions are counted. Of wasm32, only the size is measured."""
SIZE = {"x86-64": "size", "aarch64": "aarch64-linux-gnu-size", "wasm32": "llvm-size"}
OPTIMISE = ("-O3", "-fno-trapping-math", "-fno-loop-unroll-and-jam")
FIRST, STEPS = 2, 6
"""Programs of these two numbers of steps are compared: the first steps have no events yet."""


def quiet_network(hidden: int = 256) -> EventEngine:
    """Return an engine in which every fifth unit has an event at every step."""
    torch.manual_seed(0)
    layer = egru.EGRU(1, hidden, reset="none", threshold=egru.Threshold("identity", mean=10.0))
    with torch.no_grad():
        layer.get_parameter("threshold_l0")[::5] = -10.0
    return EventEngine(layer.eval(), readout=torch.nn.Linear(hidden, 10))


def program(name: str, weights: CWeightFormat, x: torch.Tensor, steps: int, saved: bytes | None) -> str:
    """Return a program that runs the exported network, from a saved state if given."""
    integer = weights == "integer"
    kind, out = ("int16_t", "int32_t") if integer else ("float", "float")
    values = fixed_point(x) if integer else x.numpy()
    restore = "" if saved is None else f"if ({name}_restore(&state, saved) != 0) emit(1);"
    state = "" if saved is None else template.array("uint8_t", "saved", np.frombuffer(saved, np.uint8))
    return f"""
#include "{name}.h"
{template.array(kind, "x", values[:steps])}{state}
static {name}_state state;
void emit(uint32_t word);
void run(void);
void run(void)
{{
    {out} out[{name.upper()}_OUTPUTS] = {{0}};
    int t;
    {restore}
    for (t = 0; t < {steps}; ++t) {name}_step(&state, x + t, out);
    emit((uint32_t)sizeof state);
    emit(out[0] > 0);
}}
"""


def dense_program(kind: str, out: str, steps: int) -> str:
    return f"""
#include <stdint.h>
void dense_step({kind} x, {out} *out);
void emit(uint32_t word);
void run(void);
void run(void)
{{
    {out} out[10];
    int t;
    for (t = 0; t < {steps}; ++t) dense_step(({kind})(t + 1), out);
    emit(out[0] > 0);
}}
"""


def dense_sources(folder: Path, hidden: int, integer: bool) -> None:
    """Write the weights of a dense GRU of the same size, and the functions that it shares with the exported code."""
    generator = np.random.default_rng(0)
    shapes = {"w": 3 * hidden, "v": 3 * hidden * hidden, "bias": 3 * hidden, "bias_q": hidden}
    shapes |= {"readout": 10 * hidden, "readout_bias": 10} | ({"scale": 3 * hidden} if integer else {})
    text = f"#define HIDDEN {hidden}\n#define OUTPUTS 10\n#include <stdint.h>\n"
    for name, count in shapes.items():
        values = generator.standard_normal(count).astype(np.float32) / hidden**0.5
        if integer:
            kind = {"v": "int8_t", "readout": "int8_t", "w": "int16_t"}.get(name, "int32_t")
            text += template.array(kind, name, np.rint(np.clip(values * 60, -1, 1) * 120).astype(np.int64))
        else:
            text += template.array("float", name, values)
    (folder / "weights.h").write_text(text)
    kernels = template.render("float_kernels.c", {"FLOAT32": False, "INT8": False}, {})
    (folder / "exponential.h").write_text(kernels.split("static inline float sigmoid")[0])
    tables = template.render("integer_kernels.c", {}, {"PRE": str(integer_source.PRE_FRACTION)})
    (folder / "tables.h").write_text(integer_source.tables() + tables.split("static void copy")[0])


def instructions(name: str, target: Target, binary: Path) -> int:
    """Return the number of instructions of a program."""
    if name == "x86-64":
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(binary)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(re.findall(r"Collected : (\d+)", result.stderr)[0])
    pipe = [*target.run[:1], "-singlestep", "-d", "exec,nochain", "-D", "/dev/stderr", *target.run[1:], str(binary)]
    with subprocess.Popen(pipe, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        return sum(block.count(b"Trace ") for block in iter(lambda: process.stderr.read(1 << 20), b""))  # pyright: ignore


def per_step(name: str, target: Target, folder: Path, sources: list[Path], main: Any, *flags: str) -> float:
    """Return the instructions per step of ``main(steps)``."""
    counts: list[int] = []
    for steps in (FIRST, STEPS):
        source = folder / f"main{steps}.c"
        source.write_text(main(steps))
        binary = folder / f"program{steps}"
        target.build([*sources, source], binary, *OPTIMISE, "-Wno-error", "-w", *flags)
        counts.append(instructions(name, target, binary))
    return (counts[1] - counts[0]) / (STEPS - FIRST)


def flash(name: str, source: Path) -> int:
    """Return the bytes of code and constants of a compiled source."""
    objects = source.with_suffix(f".program{FIRST}.o")
    output = subprocess.run([SIZE.get(name, "arm-none-eabi-size"), str(objects)], capture_output=True, text=True)
    text, data, *_ = output.stdout.splitlines()[1].split()
    return int(text) + int(data)


def measure(name: str, engine: EventEngine, x: torch.Tensor, warm: torch.Tensor | None) -> dict[str, Any]:
    """Return sizes and instructions per step of a network and of its rivals on one target."""
    target = TARGETS[name]
    hidden = engine._network.layers[0].hidden
    rows: dict[str, Any] = {}
    for weights in C_WEIGHT_FORMATS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "native").mkdir()
            library = compile_library(folder / "native", {"net": engine}, weights=weights)
            native = CNetwork(library, "net", engine.output_size, weights == "integer")
            saved = None
            if warm is not None:
                native.run(warm)
                header = (folder / "native" / "net.h").read_text()
                buffer = np.zeros(int(re.findall(r"NET_SAVED_BYTES (\d+)", header)[0]), np.uint8)
                native.call("save", native.state, address(buffer))
                saved = buffer.tobytes()
            source = export_c(engine, folder, weights, name="net")[1]
            count = per_step(name, target, folder, [source], lambda n: program("net", weights, x, n, saved))  # noqa: B023
            state = int(target.output(folder / f"program{FIRST}")[0], 16)
            rows[weights] = {"flash": flash(name, source), "ram": state, "instructions": count}
    for rival, integer, flags in (
        ("dense float32, by rows", False, ("-DBY_ROWS=1",)),
        ("dense float32, by columns", False, ("-DBY_ROWS=0",)),
        ("dense int8", True, ()),
    ):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            dense_sources(folder, hidden, integer)
            file = "dense_int8.c" if integer else "dense_float.c"
            source = Path(shutil.copy(ROOT / "benchmarks" / "dense" / file, folder))
            types = ("int16_t", "int32_t") if integer else ("float", "float")
            count = per_step(name, target, folder, [source], lambda n: dense_program(*types, n), *flags)  # noqa: B023
            rows[rival] = {"flash": flash(name, source), "instructions": count}
    dense_float = min(rows["dense float32, by rows"]["instructions"], rows["dense float32, by columns"]["instructions"])
    for weights in C_WEIGHT_FORMATS:
        dense = dense_float if weights == "float32" else rows["dense int8"]["instructions"]
        rows[weights]["ratio"] = rows[weights]["instructions"] / dense
        rows[weights]["ratio_to_dense_float32"] = rows[weights]["instructions"] / dense_float
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=COUNTED, default=COUNTED, help="default: all")
    default = ROOT / "benchmarks" / "results" / "c_export.json"
    parser.add_argument("--out", type=Path, default=default, help="write the record to this JSON file")
    args = parser.parse_args()
    quiet, smnist = quiet_network(), EventEngine(**egru.pretrained("smnist").streaming())
    image = mnist_sample()[0][0].float()
    networks = {
        "256 units, 80 % sparse": (quiet, torch.ones(STEPS, 1), None),
        "smnist": (smnist, image[400 : 400 + STEPS], image[:400]),
    }
    record: dict[str, Any] = json.loads(args.out.read_text())["networks"] if args.out.exists() else {}
    for label, (engine, x, warm) in networks.items():
        for name in args.targets:
            if TARGETS[name].missing:
                print(f"{name} is skipped: {', '.join(TARGETS[name].missing)} is missing", file=sys.stderr)
                continue
            rows = measure(name, engine, x, warm)
            record.setdefault(label, {})[name] = rows
            for form, row in rows.items():
                ratio = f", {row['ratio']:.3f} of dense" if "ratio" in row else ""
                print(f"{label}, {name}, {form}: {row['instructions']:,.0f} instructions per step{ratio}", flush=True)
    replace_file(args.out, (json.dumps({"environment": environment(), "networks": record}, indent=2) + "\n").encode())


def environment() -> dict[str, Any]:
    """Return versions of the compilers and of the emulator."""
    versions: dict[str, Any] = {"egru": egru.__version__, "options": " ".join(OPTIMISE)}
    for tool in ("gcc", "aarch64-linux-gnu-gcc", "arm-none-eabi-gcc", "qemu-system-arm", "valgrind"):
        if shutil.which(tool):
            output = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
            versions[tool] = output.splitlines()[0]
    return versions


if __name__ == "__main__":
    main()
