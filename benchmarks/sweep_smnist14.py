"""Search space of a sweep on small images: size of the layer, reset, surrogate, and how strongly events are limited.

    egru sweep smnist14-egru-128 --search benchmarks/sweep_smnist14.py --objectives quality,macs --pruner none \
        --trials 60 --workers 2 --epochs 5

`egru report` draws accuracy against multiply-accumulates with the Pareto front (docs/guides/sweeps.md).
"""

from typing import Any


def search(trial: Any) -> dict[str, Any]:
    return {
        "hidden": trial.suggest_int("hidden", 48, 192, step=16),
        "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1.5e-2, log=True),
        "rate_loss": trial.suggest_float("rate_loss", 0.03, 3.0, log=True),
        "reset": trial.suggest_categorical("reset", ["output", "threshold", "hard", "none"]),
        "surrogate.width": trial.suggest_float("surrogate_width", 0.15, 1.0, log=True),
        "surrogate.height": trial.suggest_float("surrogate_height", 0.1, 1.0, log=True),
    }
