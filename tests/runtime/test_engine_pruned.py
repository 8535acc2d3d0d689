"""Engines of networks with pruned weights: same bits with and without zero blocks, counts, and the choice of layout."""

from typing import Any

import pytest
import torch
from torch import nn

import egru
from egru import EventEngine
from egru.compress import prune_weights
from egru.types import ResetGate, WeightFormat
from tests.runtime.test_engine import divided, level  # noqa: F401

pytestmark = pytest.mark.usefixtures("float32")
FORMATS: list[WeightFormat] = ["float32", "bfloat16", "int8"]


class Network(nn.Module):
    """Two layers and a readout; the sizes are not multiples of any vector."""

    def __init__(self, sparsity: float, reset_gate: ResetGate = "before", block: int = 1, events: Any = "positive"):
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"threshold": egru.Threshold.constant(0.03), "reset_gate": reset_gate}
        if events == "delta":
            options |= {"events": "delta", "reset": "none"}
        self.first, self.second = egru.EGRU(20, 48, **options), egru.EGRU(48, 80, **options)
        self.readout = nn.Linear(80, 96)
        if sparsity:
            prune_weights(self, sparsity, block=block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(self.second(self.first(x)[0])[0])


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(
    "options", [{"reset_gate": "before"}, {"reset_gate": "after"}, {"reset_gate": "after", "events": "delta"}]
)
def test_layouts_compute_the_same_bits(level: str, weights: WeightFormat, options: dict[str, Any]) -> None:  # noqa: F811
    x = torch.randn(70, 20)
    for sparsity, block in ((0.0, 1), (0.7, 1), (0.8, 16)):
        model = Network(sparsity, block=block, **options)
        outputs = []
        for packing, threads, streams in (("dense", 1, 1), ("sparse", 1, 1), ("sparse", 2, 1), ("sparse", 1, 3)):
            engine = divided(model, weights, threads, streams, packing=packing)
            y = engine.run(x if streams == 1 else x[:, None].expand(-1, 3, -1).contiguous())
            outputs.append(y if streams == 1 else y[:, 1])
        assert outputs[0].any()
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("weights", FORMATS)
def test_layouts_compute_the_same_bits_for_hundreds_of_active_inputs(weights: WeightFormat) -> None:
    torch.manual_seed(0)
    layer = egru.EGRU(300, 32, threshold=egru.Threshold.constant(0.03))
    prune_weights(layer, 0.7, block=16)
    x = torch.randn(8, 300)
    dense, sparse = (EventEngine(layer, weights=weights, packing=packing).run(x) for packing in ("dense", "sparse"))
    assert dense.any()
    assert torch.equal(dense, sparse)


@pytest.mark.parametrize("packing", ["dense", "sparse"])
def test_engine_counts_what_the_monitor_counts(packing: Any) -> None:
    model: Any = Network(0.7, "after")
    x = torch.randn(40, 20)
    engine = EventEngine(model, packing=packing)
    engine.run(x)
    with torch.no_grad(), egru.ActivityMonitor(model) as monitor:
        model(x[:, None])
    summary = monitor.summary()
    # The monitor counts the recurrent product of the last events, which the engine computes with the next step.
    last = sum(
        int(layer.weight_hh_l0[:, y[-1, 0] != 0].count_nonzero())
        for layer, y in zip((model.first, model.second), _outputs(model, x), strict=True)
    )
    assert engine.activity.macs == pytest.approx(40 * summary.forward_macs - last, rel=1e-9)


def _outputs(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        first = model.first(x[:, None])[0]
        return [first, model.second(first)[0]]


def test_matrices_without_zero_blocks_stay_dense() -> None:
    core = EventEngine(Network(0.0))._core
    assert core is not None
    assert core.sparse_matrices() == [False] * 5
    dense, sparse = (EventEngine(Network(0.9, block=16), packing=packing)._core for packing in ("dense", "sparse"))
    assert dense is not None
    assert sparse is not None
    assert dense.sparse_matrices() == [False] * 5
    assert sparse.sparse_matrices() == [True] * 5
    assert sparse.weight_bytes < 0.3 * dense.weight_bytes


def test_packing_is_kept_in_files_and_checked(tmp_path: Any) -> None:
    engine = EventEngine(Network(0.9, block=16), packing="sparse")
    engine.save(tmp_path / "engine.safetensors")
    loaded = EventEngine.load(tmp_path / "engine.safetensors")
    assert loaded._core is not None
    assert loaded._core.sparse_matrices() == [True] * 5
    with pytest.raises(ValueError, match="packing must be"):
        EventEngine(Network(0.0), packing="packed")  # pyright: ignore[reportArgumentType]
