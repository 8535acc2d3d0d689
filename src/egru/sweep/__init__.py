"""Hyper-parameter search: Optuna chooses fields of a recipe, and every trial is a run in a separate process.

Requires Optuna (``pip install 'egru[sweep]'``), which is imported when a sweep starts.
"""

from egru.sweep.outcome import table, write_outcome
from egru.sweep.report import is_sweep, report
from egru.sweep.settings import Goal, Sweep, goals, read_search
from egru.sweep.supervise import sweep

__all__ = ["Goal", "Sweep", "goals", "is_sweep", "read_search", "report", "sweep", "table", "write_outcome"]
