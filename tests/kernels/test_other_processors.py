"""The core on other processors: parity on 64-bit Arm in an emulator, and compilation for other systems."""

import fcntl
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
TOOLS = ("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
ENGINE = [f"tests/runtime/test_engine{part}.py" for part in ("", "_lstm", "_events", "_gaps", "_lazy", "_pruned")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
needs_emulator = pytest.mark.skipif(
    bool(MISSING), reason=f"requires {', '.join(MISSING)} (apt-get install cmake g++-aarch64-linux-gnu qemu-user)"
)


def build(name: str, *options: str) -> Path:
    """Compile the programs of the core in ``build/NAME`` and return the folder. Other processes wait for the first."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DEGRU_PROGRAMS=ON", *options]
        for command in (configure, ["cmake", "--build", str(folder), "--parallel", "2"]):
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return folder


def build_aarch64() -> Path:
    """Compile the programs for 64-bit Arm."""
    return build(
        "aarch64",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )


@pytest.fixture(scope="module")
def programs() -> Path:
    return build_aarch64()


@needs_emulator
@pytest.mark.parametrize(("processor", "levels"), [("cortex-a53", "plain neon"), ("cortex-a76", "plain neon neon_dot")])
def test_levels_follow_the_processor(processor: str, levels: str, programs: Path) -> None:
    command = ["qemu-aarch64", "-cpu", processor, str(programs / "serve")]
    result = subprocess.run(command, input="levels\nlevel\n", capture_output=True, text=True, check=True)
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["ok", *levels.split()],
        ["ok", levels.split()[-1]],
    ]


@needs_emulator
@pytest.mark.parametrize(
    ("processor", "tests", "selected"),
    [
        ("max", ["tests/kernels/test_parity.py"], "cpu or threads or lean"),
        ("max", ENGINE, "not million and not reference"),
        # Without dot products: an instruction that the processor lacks would end the emulator.
        ("cortex-a53", ["tests/kernels/test_parity.py"], "cpu and (float32 or odd)"),
        ("cortex-a53", ENGINE[:1], "not reference"),
    ],
)
def test_parity_tests_pass_in_an_emulator(processor: str, tests: list[str], selected: str, programs: Path) -> None:
    """Python and torch run on this machine, and the core in the emulator."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.emulated_core", "-p", "no:cacheprovider", *tests]
    core = ["qemu-aarch64", "-cpu", processor, str(programs / "serve")]
    result = subprocess.run(
        [*command, "-m", "not slow and not cuda", "-k", selected],
        cwd=ROOT, env=os.environ | {"EGRU_EMULATED_CORE": shlex.join(core)}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@needs_emulator
def test_levels_of_the_continuous_engine_agree(programs: Path) -> None:
    result = subprocess.run(
        ["qemu-aarch64", "-cpu", "max", str(programs / "continuous_check")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout
    assert " 0 failures" in result.stdout


@pytest.mark.parametrize(
    ("target", "system", "processor"),
    [("aarch64-macos", "Darwin", "arm64"), ("x86_64-windows-gnu", "Windows", "AMD64")],
)
def test_programs_compile_and_link(target: str, system: str, processor: str) -> None:
    if importlib.util.find_spec("ziglang") is None or shutil.which("cmake") is None:
        pytest.skip("requires cmake and Zig (pip install ziglang)")
    scripts = BUILD / f"{target}-tools"  # not a temporary folder: CMake configures anew if the compiler has moved
    scripts.mkdir(parents=True, exist_ok=True)
    tools = {"c++": f"c++ -target {target}", "ar": "ar", "ranlib": "ranlib"}
    for name, arguments in tools.items():
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ziglang {arguments} "$@"\n')
        script.chmod(0o755)
    folder = build(
        target,
        "-DCMAKE_BUILD_TYPE=MinSizeRel",
        f"-DCMAKE_SYSTEM_NAME={system}",
        f"-DCMAKE_SYSTEM_PROCESSOR={processor}",
        f"-DCMAKE_CXX_COMPILER={scripts / 'c++'}",
        f"-DCMAKE_AR={scripts / 'ar'}",
        f"-DCMAKE_RANLIB={scripts / 'ranlib'}",
    )
    assert any(folder.glob("engine_check*"))
