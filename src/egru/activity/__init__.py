"""Activity sparsity, operation counts, energy estimates, activity regularisers and gradient stability."""

from egru.activity.monitor import ActivityMonitor
from egru.activity.operations import EnergyModel, LayerCost, count_parameters, macs_per_step
from egru.activity.regularise import ActivityLoss, rate_loss, state_loss
from egru.activity.stability import Stability, measure_stability
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
    "measure_stability",
    "rate_loss",
    "state_loss",
]
