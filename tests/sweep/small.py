"""Sweeps that take seconds: the digits recipe with a few units and sequences."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from egru import experiments
from egru.sweep import Sweep
from egru.sweep.worker import work

SPACE = """
def search(trial):
    return {
        "hidden": trial.suggest_int("hidden", 2, 6),
        "threshold.mean": trial.suggest_float("threshold", -4.0, 0.0),
        "epochs": 1_000_000 if trial.number == ENDLESS else 2,
    }
"""


def settings(folder: Path, space: str = SPACE, endless: int = -1, **changes) -> Sweep:
    """Return the settings of a small sweep. The trial number ``endless`` never finishes."""
    folder.mkdir(exist_ok=True)
    (folder / "space.py").write_text(f"ENDLESS = {endless}\n{space}")
    config = dataclasses.replace(
        experiments.find("digits").make(), epochs=2, limit=30, hidden=4, batch=30, evaluation_batch=30
    )
    options = {"storage": str(folder / "journal.log"), "study": "small", **changes}
    return Sweep(recipe="digits", config=config, search=folder / "space.py", folder=folder, **options)


def die_before_trial(sweep: Sweep, device: str | None, environment: dict[str, str], connection: Any) -> None:
    """A worker that exits at once while there are files ``dead-*``, and removes one of them."""
    for mark in sweep.folder.glob("dead-*"):
        mark.unlink()
        os._exit(9)
    work(sweep, device, environment, connection)
