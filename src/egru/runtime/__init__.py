"""Trained models at work: streaming inference whose cost follows the events."""

from egru.runtime.agreement import Agreement, compare
from egru.runtime.engine import Activity, EventEngine
from egru.runtime.export import BadParts, load_parts, save_parts

__all__ = ["Activity", "Agreement", "BadParts", "EventEngine", "compare", "load_parts", "save_parts"]
