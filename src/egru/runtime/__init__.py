"""Trained models at work: streaming inference whose cost follows the events."""

from egru.runtime.agreement import Agreement, compare
from egru.runtime.engine import Activity, EventEngine
from egru.runtime.shards import ShardError, load_shards, save_shards

__all__ = ["Activity", "Agreement", "EventEngine", "ShardError", "compare", "load_shards", "save_shards"]
