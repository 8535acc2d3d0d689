"""Conversion and compression of networks: event layers, thresholds, fine-tuning, pruning of units and weights."""

from egru.compress.batches import Measurement
from egru.compress.calibrate import Calibration, calibrate
from egru.compress.convert import convert
from egru.compress.distillation import Distillation
from egru.compress.drop_in import ConvertedGRU, ConvertedGRUCell, ConvertedLSTM, ConvertedLSTMCell, HiddenState
from egru.compress.prune import prune
from egru.compress.quieten import MeasuredFloor, Quietening, quieten
from egru.compress.schedule import Budget, ThresholdSchedule
from egru.compress.sparsify import Sparsification, sparsify
from egru.compress.thresholds import raise_thresholds
from egru.compress.weights import WeightPruning, prune_weights

__all__ = [
    "Budget",
    "Calibration",
    "ConvertedGRU",
    "ConvertedGRUCell",
    "ConvertedLSTM",
    "ConvertedLSTMCell",
    "Distillation",
    "HiddenState",
    "MeasuredFloor",
    "Measurement",
    "Quietening",
    "Sparsification",
    "ThresholdSchedule",
    "WeightPruning",
    "calibrate",
    "convert",
    "prune",
    "prune_weights",
    "quieten",
    "raise_thresholds",
    "sparsify",
]
