"""benchmarks/compare_builds.py."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import egru

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("build", ["old", "new"])
def test_engine_steps_do_not_allocate(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)
    targets: list[Any] = []
    step, buffer = egru.EventEngine.step, torch.zeros(8)

    def record(engine: egru.EventEngine, x: torch.Tensor, out: Any = None) -> Any:
        targets.append(out)
        # The old build has an argument `out`, too, but is fast without it.
        return step(engine, x, buffer if out is None and build == "old" else out)

    monkeypatch.setattr(egru.EventEngine, "step", record)
    monkeypatch.setattr(egru.EventEngine, "reset", lambda engine: targets.append("reset"))
    run, _ = runpy.run_path(str(ROOT / "benchmarks" / "compare_builds.py"))["make_case"]("engine", "cpu", 3, 8)
    assert targets[-1] == "reset"  # both builds start from the same state
    targets.clear()
    assert run() is run()
    assert (targets[0] is None) == (build == "old")
