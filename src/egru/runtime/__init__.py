"""Streaming inference with trained models: the engine, quantised weights, and weight files."""

from egru.runtime.agreement import Agreement, compare
from egru.runtime.c import export_c
from egru.runtime.counters import Activity
from egru.runtime.engine import EventEngine
from egru.runtime.gap import Gap
from egru.runtime.onnx_export import export_onnx
from egru.runtime.prediction import Prediction, Top
from egru.runtime.shards import ShardError, load_shards, save_shards

__all__ = [
    "Activity",
    "Agreement",
    "EventEngine",
    "Gap",
    "Prediction",
    "ShardError",
    "Top",
    "compare",
    "export_c",
    "export_onnx",
    "load_shards",
    "save_shards",
]
