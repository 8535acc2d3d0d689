"""Compile exported networks for a target, run them there or in an emulator, and return what they print."""

import dataclasses
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from egru import EventEngine
from egru.runtime.c.template import array
from tests.runtime.c.networks import WARNINGS, compile_objects, fixed_point

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
        optimise: Level of optimisation.
        requires: Further programs that must be installed.
    """

    compiler: tuple[str, ...]
    sources: tuple[str, ...]
    link: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    optimise: str = "-O2"
    requires: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Programs that are not installed."""
        return [tool for tool in {self.compiler[0], *self.run[:1], *self.requires} if shutil.which(tool) is None]

    def build(self, sources: list[Path], program: Path, *flags: str, objects: Sequence[Path] = ()) -> None:
        """Compile sources, and link them with objects and the harness of this target."""
        folder = program.parent
        harness = [Path(shutil.copy(HARNESS / file, folder)) for file in self.sources]
        compiler = [*self.compiler, self.optimise, f"-I{folder}", *WARNINGS, *flags]
        objects = [*objects, *compile_objects(compiler, sources, f".{program.name}.o")]
        # The harness defines memset and memcpy: the compiler must not implement them by calls of themselves.
        objects += compile_objects([*compiler, "-O1", "-fno-builtin"], harness, f".{program.name}.o")
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
    "sanitized": Target(
        ("gcc", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"), ("linux.c",), optimise="-O0"
    ),
    "aarch64": Target(("aarch64-linux-gnu-gcc",), ("linux.c",), ("-static",), ("qemu-aarch64",)),
    "aarch64 clang": Target(
        ("clang", "--target=aarch64-linux-gnu"),
        ("linux.c",),
        ("-static", "-fuse-ld=lld"),
        ("qemu-aarch64",),
        requires=("aarch64-linux-gnu-gcc", "lld"),
    ),
    "cortex-m4f": _cortex("cortex-m4", "fpv4-sp-d16", "mps2-an386"),
    "cortex-m7": _cortex("cortex-m7", "fpv5-d16", "mps2-an500"),
    "wasm32": Target(("clang", "--target=wasm32"), ("memory.c",), _WASM_LINK, ("node", str(HARNESS / "wasm.js"))),
}
PACKAGES = "gcc gcc-aarch64-linux-gnu qemu-user gcc-arm-none-eabi qemu-system-arm clang lld nodejs"


def main_source(networks: dict[str, tuple[EventEngine, Tensor]], integer: dict[str, tuple[EventEngine, Tensor]]) -> str:
    """Return a program that runs every network on its input and emits the bits of the outputs.

    Half-way, the state is saved, and a second state continues from it.

    Args:
        networks: Networks in float32 arithmetic by name, with their inputs.
        integer: Networks in the integer form.
    """
    parts = ["#include <stdint.h>\n"]
    calls: list[str] = []
    for name, (engine, x) in (networks | integer).items():
        kind = ("int16_t", "int32_t") if name in integer else ("float", "float")
        values = fixed_point(x) if name in integer else x.numpy()
        parts.append(f'#include "{name}.h"\n' + array(kind[0], f"{name}_x", values))
        parts.append(f"static {name}_state {name}_states[2];\n")
        parts.append(f"static uint8_t {name}_saved[{name.upper()}_SAVED_BYTES];\n")
        calls.append(
            f"""
    for (t = 0; t < {len(x)}; ++t) {{
        union {{ {kind[1]} values[{engine.output_size}]; uint32_t bits[{engine.output_size}]; }} out;
        if (t == {len(x) // 2}) {{
            {name}_save(&{name}_states[0], {name}_saved);
            emit((uint32_t){name}_restore(&{name}_states[1], {name}_saved));
        }}
        emit((uint32_t){name}_step(&{name}_states[t >= {len(x) // 2}], {name}_x + {engine.input_size} * t, out.values));
        for (j = 0; j < {engine.output_size}; ++j)
            emit(out.bits[j]);
    }}"""
        )
    parts.append("\nvoid emit(uint32_t word);\nvoid run(void);\n\nvoid run(void)\n{\n    int t, j;\n")
    return "".join([*parts, *calls, "\n}\n"])


def expected_lines(outputs: npt.NDArray[Any]) -> list[str]:
    """Return the lines that the program of :func:`main_source` prints for the outputs of one network."""
    lines: list[str] = []
    for t, out in enumerate(outputs.view(np.uint32)):
        lines += ["00000000"] * (2 if t == len(outputs) // 2 else 1) + [f"{word:08x}" for word in out]
    return lines
