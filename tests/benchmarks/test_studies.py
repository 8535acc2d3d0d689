"""benchmarks/studies.py: initial thresholds, the width of the surrogate, and pruned weights."""

import dataclasses

import pytest

from benchmarks import studies
from egru.experiments.results import KeptResult

RUN = KeptResult(
    run="run", recipe="smnist14-threshold-2-1", data="smnist", seed=0, command="", note="", date="2026-11-19",
    machine="", accuracy=0.9, perplexity=None, validation=0.9, validation_one_column=None, activity_sparsity=0.8,
    backward_sparsity=0.4, parameters=1, forward_macs=1.0,
)  # fmt: skip
RESULTS = [
    RUN,
    dataclasses.replace(RUN, seed=1, accuracy=0.92),
    dataclasses.replace(RUN, recipe="smnist14-threshold0-2-fixed", accuracy=0.5, activity_sparsity=0.99),
    dataclasses.replace(RUN, recipe="smnist14-epsilon-0.45", accuracy=0.94, backward_sparsity=0.25),
    dataclasses.replace(RUN, recipe="smnist14-ablation-full"),
    dataclasses.replace(RUN, recipe="smnist14-ablation-none", accuracy=0.98, forward_macs=12000.0),
    dataclasses.replace(RUN, recipe="smnist14-zeros-0.9-blocks", accuracy=0.75, forward_macs=2000.0),
]


def test_threshold_table_shows_mean_and_spread_of_the_seeds() -> None:
    head, _, *rows = studies.threshold_table(studies.threshold_cells(RESULTS)).splitlines()
    assert head == "| mean | thresholds | std 0 | std 1 | std 2 |"
    assert len(rows) == 6
    assert "| -2 | trained | -, - | 91.0 % ± 1.4 %, 80.0 % ± 0.0 % | -, - |" in rows
    assert "| 0 | fixed | -, - | -, - | 50.0 %, 99.0 % |" in rows


def test_width_table_has_a_row_per_width() -> None:
    _, _, *rows = studies.width_table(studies.width_runs(RESULTS)).splitlines()
    assert [row.split(" |")[0] for row in rows] == [f"| {width:g}" for width in studies.WIDTHS]
    assert "| 0.45 | 94.0 % | 80.0 % | 25.0 % |" in rows


def test_zeros_table_has_the_dense_network_once() -> None:
    _, _, *rows = studies.zeros_table(studies.zeros_runs(RESULTS)).splitlines()
    assert len(rows) == 1 + 2 * len(studies.ZEROS)
    assert rows[0] == "| 0 % | - | 98.0 % | 80.0 % | 12K |"
    assert "| 90 % | blocks of 16 | 75.0 % | 80.0 % | 2K |" in rows
    assert "| 90 % | single weights | - | - | - |" in rows


@pytest.mark.parametrize("results", [RESULTS, []], ids=["results", "no results"])
def test_figures_are_written(tmp_path, results) -> None:
    pytest.importorskip("matplotlib", reason="figures require matplotlib")
    studies.main(["--images", str(tmp_path)], lambda: results)
    assert {path.name for path in tmp_path.iterdir()} == {
        "study-thresholds.png",
        "study-widths.png",
        "study-zeros.png",
    }
