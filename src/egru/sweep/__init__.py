"""Sweeps: Optuna chooses a recipe's fields, every trial is a run in a process of its own.

Needs Optuna (``pip install 'egru[sweep]'``), imported when a sweep starts.
"""

from egru.sweep.outcome import table, write_outcome
from egru.sweep.settings import Goal, Sweep, goals, read_search
from egru.sweep.supervise import sweep

__all__ = ["Goal", "Sweep", "goals", "read_search", "sweep", "table", "write_outcome"]
