"""Check F of docs/concepts/continuous.md: the adjoint in the paper's scaling, and with the formulas as printed."""

import importlib.util
import sys
from pathlib import Path

import pytest

from egru.continuous import engines
from tests.continuous.figures import reached
from tests.continuous.networks import cotangents, density, network


@pytest.fixture(scope="module")
def errata():
    path = Path(__file__).parents[2] / "benchmarks" / "continuous_errata.py"
    spec = importlib.util.spec_from_file_location("continuous_errata", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [30, 31])
def test_paper_scaling_has_the_same_gradient(errata, seed):
    problem = network(seed, batch=1, hidden=4, horizon=4.0, inputs=5, drive=0.8)
    engine = engines.get("reference")
    events = engine.forward(problem, density)
    assert len(events.times) > 3
    weights = cotangents(events)
    weights.o_read.zero_()
    weights.amplitudes.zero_()
    weights.a_last = None
    gradients = engine.backward(problem, events, weights, density)
    for name, value in errata.gradient(problem, events, weights, density).items():
        exact = getattr(gradients, name).numpy()
        assert reached("F", "reference", abs(value - exact).max() / max(1, abs(exact).max())) < 1e-10, name


def test_every_printed_formula_changes_the_gradient(errata, capsys):
    rows = errata.measure(range(1), step=0.05)
    assert [row.name for row in rows] == list(errata.PRINTED)
    assert all(row.error > 1e-3 for row in rows)
