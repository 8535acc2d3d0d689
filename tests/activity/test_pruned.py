"""Operation counts of networks with pruned weights, against brute force over all products."""

import json

import pytest
import torch
from torch import nn

import egru
from egru.activity import ActivitySummary
from egru.compress import WeightPruning, prune_weights
from egru.layers import record
from egru.models import SequenceClassifier


class Network(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = egru.EGRU(6, 10, **options)
        self.second = egru.EGRU(10, 8, **options)
        self.readout = nn.Linear(8, 4)

    def forward(self, x):
        return self.readout(self.second(self.first(x)[0])[0])


def products(weight, x):
    """Count non-zero products of every row of ``x`` with the matrix, one by one."""
    return int(((weight != 0)[None] & (x.flatten(0, -2) != 0)[:, None]).sum())


def test_macs_are_products_of_nonzero_weights_and_inputs():
    model = Network(threshold=egru.Threshold(mean=-1.0))
    prune_weights(model, 0.6)
    x = torch.randn(9, 3, 6) * (torch.rand(9, 3, 6) < 0.4)
    with egru.ActivityMonitor(model) as monitor, record(model) as records:
        model(x)
    summary = monitor.summary()
    for layer, call in zip(summary.layers, records, strict=True):
        weights = call.layer.weights(call.direction)
        rows = 3 * call.layer.hidden_size
        expected = products(weights.ih, call.input) + products(weights.hh, call.y) + 27 * rows
        assert 27 * layer.cost.forward == pytest.approx(expected, rel=1e-12)
    assert summary.linears[0].macs == products(model.readout.weight, records[1].y)
    zeros = sum(int((p == 0).sum()) for name, p in model.named_parameters() if "weight" in name)
    total = sum(p.numel() for name, p in model.named_parameters() if "weight" in name)
    assert summary.weight_sparsity == pytest.approx(zeros / total)
    assert summary.dense_forward_macs == 30 * 16 + 30 + 24 * 18 + 24 + 32
    assert ActivitySummary.from_dict(json.loads(summary.to_json())) == summary


def test_masked_and_pruned_models_count_the_same():
    model = SequenceClassifier(3, 16, 4, threshold=egru.Threshold(mean=-1.0))
    pruning = WeightPruning(model, 0.7)
    pruning.update(1.0)
    summaries = []
    for _ in range(2):
        with egru.ActivityMonitor(model) as monitor:
            model(torch.ones(2, 5, 3))
        summaries.append(monitor.summary().to_dict())
        if len(summaries) == 1:
            pruning.remove()
    assert summaries[0] == summaries[1]


def test_records_without_zeros_are_as_before():
    with egru.ActivityMonitor(model := SequenceClassifier(3, 16, 4)) as monitor:
        model(torch.ones(2, 5, 3))
    summary = monitor.summary()
    assert summary.weight_sparsity == 0
    assert "pruned" not in summary.to_json()
    assert "weights" in str(summary)


def test_layer_with_changes_counts_the_events_of_each_unit():
    model = Network(events="delta", threshold=egru.Threshold.constant(0.05), reset="none", reset_gate="after")
    prune_weights(model, 0.6)
    x = torch.randn(9, 1, 6)
    with egru.ActivityMonitor(model) as monitor, record(model) as records:
        model(x)
    layer = monitor.summary().layers[1]
    y = records[0].y
    changes = torch.diff(y, dim=0, prepend=torch.zeros_like(y[:1]))
    assert layer.input_pruned is not None
    assert layer.input_pruned.macs == products(records[1].layer.weights(records[1].direction).ih, changes)
