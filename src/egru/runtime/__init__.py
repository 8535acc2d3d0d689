"""Trained models at work: streaming inference whose cost follows the events."""

from egru.runtime.agreement import Agreement, compare
from egru.runtime.engine import Activity, EventEngine

__all__ = ["Activity", "Agreement", "EventEngine", "compare"]
