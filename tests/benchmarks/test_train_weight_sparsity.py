"""benchmarks/train_weight_sparsity.py: a quick run writes its record, and blocks are cleared by gate."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import train_weight_sparsity
from egru import compiled
from egru.kernels.cpu import kernel as cpu


@pytest.mark.usefixtures("defaults")
@pytest.mark.skipif(compiled.core is None, reason="requires the compiled core")
def test_quick_run_writes_its_record(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    limits, out = cpu.limits, tmp_path / "result.json"
    try:
        assert train_weight_sparsity.main(["--quick", "--repeats", "3", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    assert cpu.limits is limits
    dense, pruned = json.loads(out.read_text())["rows"]
    assert (dense["sparsity"], pruned["sparsity"]) == (0.0, 0.9)
    assert dense["zero_weights"] == {"ih": 0, "hh": 0}
    assert all(0.8 < share < 1 for share in pruned["zero_weights"].values())
    assert all(row["milliseconds"][name] > 0 for row in (dense, pruned) for name in ("dense", "auto"))


def test_blocks_are_cleared_by_gate() -> None:
    torch.manual_seed(0)
    weight = torch.ones(3 * 20, 50)
    train_weight_sparsity.clear_blocks(weight, 0.5)
    for gate in weight.chunk(3):
        for part in (gate[:16], gate[16:]):
            assert torch.equal(part, part[:1].expand_as(part))
    assert 0.35 < (weight == 0).float().mean() < 0.65
