"""Compile exported networks for a target, run them there or in an emulator, and return what they print."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
from torch import Tensor

from egru import EventEngine
from egru.runtime.c.template import array
from tests.runtime.c.networks import WARNINGS, compile_objects

HARNESS = Path(__file__).with_name("harness")
_CORTEX = ("arm-none-eabi-gcc", "-mthumb", "-mfloat-abi=hard")
_BOARD = (
    *("-display", "none", "-monitor", "none", "-serial", "none", "-chardev", "stdio,id=out"),
    *("-semihosting-config", "enable=on,target=native,chardev=out", "-kernel"),
)


@dataclasses.dataclass(frozen=True)
class Target:
    """How to build and run a program.

    Attributes:
        compiler: Compiler with the options of the target.
        sources: Files of the harness that belong to the program.
        link: Further options of the linker.
        run: Command in front of the program.
    """

    compiler: tuple[str, ...]
    sources: tuple[str, ...]
    link: tuple[str, ...] = ()
    run: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Programs that are not installed."""
        return [tool for tool in {self.compiler[0], *self.run[:1]} if shutil.which(tool) is None]

    def build(self, sources: list[Path], program: Path, *flags: str) -> None:
        """Compile and link sources with the harness of this target."""
        folder = program.parent
        harness = [Path(shutil.copy(HARNESS / file, folder)) for file in self.sources]
        compiler = [*self.compiler, "-O2", f"-I{folder}", *WARNINGS, *flags]
        objects = compile_objects(compiler, sources, f".{program.stem}.o")
        # The harness defines memset and memcpy: the compiler must not implement them by calls of themselves.
        objects += compile_objects([*compiler, "-O1", "-fno-builtin"], harness)
        command = [*self.compiler, *flags, "-o", str(program), *map(str, objects), *self.link]
        subprocess.run(command, check=True, timeout=60)

    def output(self, program: Path) -> list[str]:
        """Run the program and return its lines."""
        result = subprocess.run(
            [*self.run, str(program)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stdout[-500:] + result.stderr[-2000:]
        return result.stdout.split()


def _cortex(cpu: str, fpu: str, board: str) -> Target:
    return Target(
        (*_CORTEX, f"-mcpu={cpu}", f"-mfpu={fpu}"),
        ("cortex_m.c", "memory.c"),
        ("-nostdlib", "-T", str(HARNESS / "cortex_m.ld"), "-lgcc"),
        ("qemu-system-arm", "-M", board, *_BOARD),
    )


_WASM_LINK = ("-nostdlib", "-Wl,--no-entry,--export=run,--allow-undefined")
TARGETS = {
    "x86-64": Target(("gcc",), ("linux.c",)),
    "sanitized": Target(("gcc", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"), ("linux.c",)),
    "aarch64": Target(("aarch64-linux-gnu-gcc",), ("linux.c",), ("-static",), ("qemu-aarch64",)),
    "cortex-m4f": _cortex("cortex-m4", "fpv4-sp-d16", "mps2-an386"),
    "cortex-m7": _cortex("cortex-m7", "fpv5-d16", "mps2-an500"),
    "wasm32": Target(("clang", "--target=wasm32"), ("memory.c",), _WASM_LINK, ("node", str(HARNESS / "wasm.js"))),
}
PACKAGES = "gcc gcc-aarch64-linux-gnu qemu-user gcc-arm-none-eabi qemu-system-arm clang lld nodejs"


def main_source(networks: dict[str, tuple[EventEngine, Tensor]]) -> str:
    """Return a program that runs every network on its input and emits the bits of the outputs.

    Half-way, the state is saved, and a second state continues from it.
    """
    parts = ["#include <stdint.h>\n"]
    calls: list[str] = []
    for name, (engine, x) in networks.items():
        parts.append(f'#include "{name}.h"\n' + array("float", f"{name}_x", x.numpy().astype(np.float32)))
        parts.append(
            f"static {name}_state {name}_states[2];\nstatic uint8_t {name}_saved[{name.upper()}_SAVED_BYTES];\n"
        )
        calls.append(
            f"""
    for (t = 0; t < {len(x)}; ++t) {{
        float out[{engine.output_size}];
        if (t == {len(x) // 2}) {{
            {name}_save(&{name}_states[0], {name}_saved);
            emit((uint32_t){name}_restore(&{name}_states[1], {name}_saved));
        }}
        emit((uint32_t){name}_step(&{name}_states[t >= {len(x) // 2}], {name}_x + {engine.input_size} * t, out));
        for (j = 0; j < {engine.output_size}; ++j)
            emit_float(out[j]);
    }}"""
        )
    parts.append(
        """
void emit(uint32_t word);
void run(void);

static void emit_float(float value)
{
    union { float value; uint32_t bits; } v;
    v.value = value;
    emit(v.bits);
}

void run(void)
{
    int t, j;
"""
    )
    return "".join([*parts, *calls, "\n}\n"])


def expected_lines(engine: EventEngine, x: Tensor) -> list[str]:
    """Return the lines that the program of :func:`main_source` prints for one network."""
    lines: list[str] = []
    for t, out in enumerate(np.asarray(engine.run(x)).view(np.uint32)):
        lines += ["00000000"] * (2 if t == len(x) // 2 else 1) + [f"{word:08x}" for word in out]
    return lines
