"""The compiled core: levels, threads, interrupts, absence, memory safety. Parity is in test_parity.py."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import egru
from egru import compiled
from egru.events import Surrogate
from egru.kernels import Problem, choose, get, info
from egru.kernels.cpu.kernel import CPUKernel
from egru.types import RESETS, Reset, SequenceCell
from tests.helpers import PATIENCE

ROOT = Path(__file__).parents[2]
needs_core = pytest.mark.skipif(compiled.core is None, reason=f"requires the compiled core: {compiled.missing}")


def problem(
    T: int = 3,
    B: int = 2,
    H: int = 8,
    dtype: torch.dtype = torch.float32,
    shape: str = "triangle",
    cell: SequenceCell = "gru",
) -> Problem:
    zeros, rows = torch.zeros, (3 if cell == "gru" else 4) * H
    return Problem(
        torch.ones(T, B, 1, dtype=dtype), zeros(B, H, dtype=dtype), zeros(B, H, dtype=dtype),
        torch.full((rows, 1), 0.3, dtype=dtype), torch.full((rows, H), 0.1, dtype=dtype), None, None,
        torch.full((H,), -1.0, dtype=dtype), torch.ones((), dtype=dtype), None, None, "none", "after",
        Surrogate(shape=shape), "", cell=cell,
    )  # fmt: skip


@needs_core
def test_auto_chooses_the_core_if_it_supports_the_problem() -> None:
    assert choose("auto", problem()) == "cpu"
    assert choose("auto", problem(dtype=torch.float64)) == "cpu"
    assert choose("auto", problem(shape="rectangle")) == "reference"
    assert choose("auto", problem(dtype=torch.bfloat16)) == "reference"
    assert choose("auto", problem(B=0)) == "reference"
    with pytest.raises(ValueError, match=r"backend='cpu' cannot run this: .*rectangle"):
        choose("cpu", problem(shape="rectangle"))


@needs_core
def test_info_contains_level_threads_and_compiler() -> None:
    assert compiled.core is not None
    text = info()["cpu"]
    assert compiled.core.level() in text
    assert f"{torch.get_num_threads()} thread" in text
    assert compiled.core.compiler() in text


@needs_core
def test_type_stub_is_up_to_date() -> None:
    """``make stub`` writes it."""
    stubgen = pytest.importorskip("nanobind.stubgen", reason="needs nanobind")
    stub = stubgen.StubGen(compiled.core)
    stub.put(compiled.core)
    assert stub.get() == Path(compiled.__file__).with_name("_core.pyi").read_text()


@needs_core
def test_core_of_another_version_is_outdated(tmp_path: Path) -> None:
    """An editable install keeps its core when the sources change."""
    assert compiled.core is not None
    assert not compiled.is_outdated(compiled.core)
    stub = tmp_path / "_core.pyi"
    assert not compiled.is_outdated(compiled.core, stub)  # does not exist
    stub.write_text(Path(compiled.__file__).with_name("_core.pyi").read_text() + "def added() -> None: ...\n")
    assert compiled.is_outdated(compiled.core, stub)


def test_outdated_core_is_not_used() -> None:
    code = """
import sys, types
sys.modules["egru._core"] = types.ModuleType("egru._core")
from egru import compiled
print(compiled.core, compiled.missing)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.startswith(
        "None the compiled core cannot be loaded (it belongs to another version of egru); "
    )


@needs_core
@pytest.mark.parametrize("reset", RESETS)
def test_resets_are_matched_by_name(reset: Reset) -> None:
    call = compiled.require().TrainCall()
    call.reset = reset
    assert call.reset == reset
    with pytest.raises(ValueError, match="reset must be one of output, threshold, hard, none, got 'soft'"):
        call.reset = "soft"


@needs_core
def test_force_level_sets_known_levels_and_refuses_others() -> None:
    assert compiled.core is not None
    try:
        for level in compiled.core.levels():
            compiled.core.force_level(level)
            assert compiled.core.level() == level
        with pytest.raises(ValueError, match=r"unknown level 'sse9'; expected auto, plain"):
            compiled.core.force_level("sse9")
    finally:
        compiled.core.force_level("auto")
    assert compiled.core.level() == (os.environ.get("EGRU_CPU_LEVEL") or compiled.core.levels()[-1])


@needs_core
@pytest.mark.parametrize(("level", "message"), [("plain", "plain"), ("sse9", "EGRU_CPU_LEVEL: unknown level 'sse9'")])
def test_environment_variable_sets_the_level(level: str, message: str) -> None:
    code = "from egru.compiled import core; print(core.level())"
    process = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "EGRU_CPU_LEVEL": level}, capture_output=True, text=True
    )
    assert message in process.stdout + process.stderr


def test_missing_core_is_refused_and_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "core", None)
    monkeypatch.setattr(compiled, "missing", "no compiler")
    monkeypatch.setattr(compiled, "_warned", False)
    kernel = CPUKernel()
    assert "no compiler" in kernel.describe()
    with pytest.warns(RuntimeWarning, match="plain torch, which is slow: no compiler"):
        assert kernel.unsupported(problem()) == "no compiler"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel.unsupported(problem()) == "no compiler"


@needs_core
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_rounds_weights_and_input(precision: str) -> None:
    torch.manual_seed(0)
    exact = problem(T=9, B=5, H=40)
    random = {"input": torch.randn(9, 5, 1).float(), "weight_hh": torch.randn(120, 40).float() / 6}
    exact = dataclasses.replace(exact, **random)
    low = getattr(torch, precision)
    operands = {name: getattr(exact, name).to(low).float() for name in ("input", "weight_ih", "weight_hh")}
    autocast = dataclasses.replace(exact, precision=precision)
    assert choose("auto", autocast) == "cpu"
    results = []
    for variant in (autocast, dataclasses.replace(exact, **operands), exact):
        forward = get("cpu").forward(variant, True)
        ones = [torch.ones_like(out) for out in forward[:4]]
        backward = get("cpu").backward(variant, forward.y, forward.c, forward.reserve, *ones, input_gradient=True)
        results.append([*forward[:4], *backward])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])


@needs_core
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_interrupt_stops_a_long_call_within_a_second(cell: SequenceCell) -> None:
    long = problem(T=5_000, B=4, H=1024, cell=cell)  # seconds of work, and little memory to fill before it starts
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.process_time())  # not affected by other processes
        os.kill(os.getpid(), signal.SIGINT)

    def calls() -> None:
        timer.start()
        while True:  # on a fast machine the first call may end before the interrupt
            get("cpu").forward(long, False)

    timer = threading.Timer(0.3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        calls()
    assert time.process_time() - sent[0] < 1
    timer.join()
    assert torch.isfinite(get("cpu").forward(problem(), False).c).all()


@needs_core
@pytest.mark.parametrize("layer_class", [egru.EGRU, egru.ELSTM])
def test_concurrent_calls_give_equal_results(layer_class: type[egru.EGRU]) -> None:
    """One call at a time uses the thread pool; the others run on their caller's thread."""
    layer = layer_class(16, 96)
    x = torch.randn(20, 8, 16)
    with torch.no_grad():
        expected = layer(x)[0]
    results: list[torch.Tensor] = []

    def work() -> None:
        with torch.no_grad():
            results.extend(layer(x)[0] for _ in range(20))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 80
    assert all(torch.equal(expected, y) for y in results)


@needs_core
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_starts_a_new_thread_pool() -> None:
    code = """
import os, torch, egru
torch.set_num_threads(2)
layer = egru.EGRU(4, 96)
x = torch.randn(5, 2, 4)
with torch.no_grad():
    y = layer(x)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(layer(x)[0], y) else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    process = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@needs_core
@pytest.mark.parametrize("size", [1_000_000, 4_300_000, 5_000_001, 9_000_000])
def test_memory_of_a_call_is_reused_by_the_next(size: int) -> None:
    core = compiled.require()
    core.release_memory()
    for _ in range(3):
        core.allocate(size)  # freed at once
    cached = core.cached_memory()
    core.release_memory()
    assert size <= cached < 1.5 * size, "one block, not three"
