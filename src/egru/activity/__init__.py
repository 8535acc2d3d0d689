"""Sparsity, operation counts and energy: watching a model from the side."""

from egru.activity.adjoint import Stability, stability
from egru.activity.monitor import ActivityMonitor
from egru.activity.operations import EnergyModel, LayerCost, count_parameters, macs_per_step
from egru.activity.regularise import ActivityLoss, rate_loss, state_loss
from egru.activity.summary import ActivitySummary, LayerActivity, LinearActivity

__all__ = [
    "ActivityLoss",
    "ActivityMonitor",
    "ActivitySummary",
    "EnergyModel",
    "LayerActivity",
    "LayerCost",
    "LinearActivity",
    "Stability",
    "count_parameters",
    "macs_per_step",
    "rate_loss",
    "stability",
    "state_loss",
]
