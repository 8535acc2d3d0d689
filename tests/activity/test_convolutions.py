"""Operation counts of convolutions against torch's own counter and against the paper."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import egru
from egru.models.gesture import ConvolutionalHead
from tests.helpers import lively


def operations(model: nn.Module, *inputs: torch.Tensor) -> float:
    """Return the multiply-accumulates that torch's dispatcher counts, half its floating-point operations."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv1d(4, 6, 3, padding=1), (5, 4, 9)),
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=1, groups=2), (5, 4, 9, 8)),
        (nn.Conv2d(3, 4, 3, dilation=2), (2, 3, 9, 8)),
        (nn.Conv2d(4, 6, 3), (4, 9, 8)),  # without a batch dimension
        (nn.Conv3d(2, 3, 2), (2, 2, 5, 4, 3)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (5, 4, 5, 6)),
    ],
    ids=["1d", "grouped and strided", "dilated", "unbatched", "3d", "transposed"],
)
def test_convolutions_are_counted_like_torch_counts_them(convolution, shape):
    convolution = convolution.double()
    model = nn.ModuleList([convolution, lively(egru.EGRU(3, 6))])
    x = torch.randn(shape).relu()  # half of the entries are zero, and none is skipped
    with egru.ActivityMonitor(model) as activity:
        convolution(x)
        convolution(x)
        model[1](torch.randn(7, 2, 3))
    summary = activity.summary()
    (row,) = summary.linears
    assert row.macs == row.dense_macs == 2 * operations(convolution, x)
    assert row.in_features * row.out_features == convolution.weight.numel()
    (layer,) = summary.layers
    assert summary.steps == 14
    assert summary.forward_macs == pytest.approx(layer.cost.forward + row.macs / 14)
    assert summary.dense_forward_macs == pytest.approx(layer.cost.dense.forward + row.macs / 14)


def test_counts_of_the_gesture_network_are_those_of_torch_and_of_the_paper():
    """The paper: 79M operations of the convolutional head, 80.6M of CNN + EGRU 795."""
    torch.set_default_dtype(torch.float32)
    head = ConvolutionalHead()
    frames = torch.rand(3, 2, 128, 128)
    expected = operations(head, frames) / 3
    assert round(expected / 1e6) == 79
    model = egru.models.gesture_network(795, frame=(2, 128, 128), num_layers=1, convolutional=True)
    with torch.no_grad(), egru.ActivityMonitor(model) as activity:
        model(frames[None])
    summary = activity.summary()
    head_rows = [row for row in summary.linears if row.name.startswith("head")]
    assert [row.out_features for row in head_rows] == [64, 192, 384, 256, 256, 512]
    assert sum(row.dense_macs for row in head_rows) / summary.steps == expected
    convolutions = sum(row.macs for row in head_rows[:-1]) / summary.steps
    assert round((convolutions + 512 * 256) / 1e6) == 79
    layer = egru.activity.LayerCost(512, 795, activity=1 - 0.764)  # the paper's sparsity, dense features
    assert round((expected + egru.activity.macs_per_step([layer], 11)) / 1e6, 1) == 80.6
