"""benchmarks/weight_sparsity.py: a quick run writes its record, and the fit is that of a line."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import weight_sparsity


@pytest.mark.usefixtures("defaults")
def test_quick_run_writes_its_record(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    out = tmp_path / "result.json"
    assert weight_sparsity.main(["--quick", "--turns", "2", "--turn", "8", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {row["weights"] for row in result["rows"]} == {"float32", "bfloat16", "int8"}
    assert {row["sparsity"] for row in result["rows"]} == {0.0, 0.9}
    assert all(row[packing] > 0 for row in result["rows"] for packing in ("auto", "dense", "sparse"))
    dense, pruned = (next(row for row in result["rows"] if row["sparsity"] == s) for s in (0.0, 0.9))
    assert dense["auto_is_sparse"] == [False, False]
    assert pruned["effective_macs"] < 0.3 * dense["effective_macs"]


def test_fit() -> None:
    x = [1.0, 2.0, 4.0]
    r2, (intercept, slope) = weight_sparsity.fit([x], [5.0, 7.0, 11.0])
    assert (r2, intercept, slope) == pytest.approx((1, 3, 2))
    assert weight_sparsity.fit([x], [5.0, 9.0, 4.0])[0] < 0.5
