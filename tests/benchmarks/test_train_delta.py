"""benchmarks/train_delta.py: a quick run writes its record, and a layer that differs is not timed."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import egru
from benchmarks import train_delta
from egru import compiled


@pytest.mark.usefixtures("defaults")
@pytest.mark.skipif(compiled.core is None, reason="requires the compiled core")
def test_quick_run_writes_its_record(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    out = tmp_path / "result.json"
    assert train_delta.main(["--quick", "--threads", "1", "--repeats", "3", "--out", str(out)]) == 0
    dense, sparse = json.loads(out.read_text())["rows"]
    assert dense["activity"] == 1
    assert 0.05 < sparse["activity"] < 0.2
    for row in (dense, sparse):
        for name in ("inference", "training"):
            assert row[name]["ratio"] == row[name]["torch.nn.GRU"] / row[name]["delta"]


def test_a_layer_with_another_output_is_not_timed() -> None:
    gru = nn.GRU(2, 8)
    layer = egru.convert(gru)
    x = torch.randn(5, 4, 2)
    train_delta.check(layer, gru, x)
    changed = copy.deepcopy(layer)
    with torch.no_grad():
        changed.get_parameter("weight_hh_l0").mul_(1.01)
    with pytest.raises(SystemExit, match="nothing was timed"):
        train_delta.check(changed, gru, x)
