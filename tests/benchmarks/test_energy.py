"""benchmarks/energy.py."""

import runpy
from argparse import Namespace
from pathlib import Path

import pytest

ENERGY = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "energy.py"))


def test_recipes_run_on_the_gpu_with_warmup_and_without_slow_parts() -> None:
    options = Namespace(device="cuda", precision="bfloat16", graph=True, warmup=2, epochs=6, smoke=False)
    config = ENERGY["configure"]("ptb-evnn-gru", options)
    assert (config.cell, config.epochs, config.save_every, config.test_batch) == ("gru", 8, 8, 64)
    assert (config.device, config.precision, config.graph, config.diagnose) == ("cuda", "bfloat16", True, False)


def test_ratio_compares_measured_joules_only(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"a": {"cuda:0": 100.0}, "b": {"cuda:0": 250.0, "package-0": 5.0}, "c": {}}
    recipes = {
        name: {"joules_per_epoch": joules, "seconds_per_epoch": 2.0, "missing": ["no counter"]}
        for name, joules in measured.items()
    }
    ENERGY["show"]({"recipes": recipes})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["c: 2.0 s per epoch, energy not measured: no counter", lines[3]]
    assert lines[3] == "cuda:0: b uses 2.50 times the energy of a"
