"""Named settings that benchmarks/smnist_screen.py trains: fields of a recipe that differ from :data:`BASE`."""

from typing import Any

from egru.events import Surrogate
from egru.layers import Threshold

BASE: dict[str, Any] = {
    "data": "smnist",
    "side": 14,
    "hidden": 96,
    "batch": 100,
    "learning_rate": 3e-3,
    "schedule": "one-cycle",
    "clip": 1.0,
    "trace": 200.0,
    "normalise": True,
    "uniform_gates": True,
    "reset": "none",
    "reset_gate": "before",
    "threshold": Threshold(mean=-4.0),
    "surrogate": Surrogate(width=0.3, height=0.5),
}
"""Based on the settings of examples/digits.py, without zoneout and label smoothing and with a lower learning rate."""

FAST: dict[str, Any] = {"learning_rate": 1e-2, "centre": True, "input_scale": 3.0}
"""The two best changes to the base: a higher learning rate, and pixels of mean 0 and standard deviation 1."""
HIGH_THRESHOLDS: dict[str, Any] = {**FAST, "threshold": Threshold(mean=-2.0)}
RATE_1: dict[str, Any] = {**FAST, "rate_loss": 1.0}
CORNN: dict[str, Any] = {
    "cell": "cornn",
    "hidden": 128,
    "oscillators": (0.168, 2.7, 4.7),
    "readout": "last",
    "normalise": False,
    "uniform_gates": False,
}
"""coRNN. Its time step is four times that of its authors, who use four times as many pixels."""

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "rate 0.1": {"rate_loss": 0.1},
    "rate 1": {"rate_loss": 1.0},
    "thresholds 0.12": {"threshold": Threshold(mean=-2.0)},
    "wide": {"surrogate": Surrogate(width=1.0, height=0.3)},
    "lr 1e-2": {"learning_rate": 1e-2},
    "log-gates": {"uniform_gates": False, "longest_memory": 196.0},
    "plain-gates": {"uniform_gates": False},
    "standardised": {"centre": True, "input_scale": 3.0},
    "input x3": {"input_scale": 3.0},
    "thresholds 0.5": {"threshold": Threshold(mean=0.0)},
    "thresholds 0.27": {"threshold": Threshold(mean=-1.0)},
    "centred": {"centre": True},
    "zoneout 0.1": {"zoneout": 0.1},
    "reset gate after": {"reset_gate": "after"},
    "label smoothing": {"label_smoothing": 0.1},
    "not normalised": {"normalise": False},
    "trace 40": {"trace": 40.0},
    "trace 1000": {"trace": 1000.0},
    "bounded": {"surrogate": Surrogate(width=0.3, height=1.0, bounded=True)},
    "memory 28": {"uniform_gates": False, "longest_memory": 28.0},
    "reset output": {"reset": "output"},
    "reset threshold": {"reset": "threshold"},
    "height 0.1": {"surrogate": Surrogate(width=0.3, height=0.1)},
    "height 1": {"surrogate": Surrogate(width=0.3, height=1.0)},
    "fast": FAST,
    "fast, rate 0.3": {**FAST, "rate_loss": 0.3},
    "fast, rate 0.3, permuted": {**FAST, "rate_loss": 0.3, "data": "psmnist"},
    **{
        f"fast, rate 0.3, {task}{name}": {**FAST, "rate_loss": 0.3, **data, **changes}
        for task, data in (("", {}), ("permuted, ", {"data": "psmnist"}))
        for name, changes in (
            ("zoneout 0.1", {"zoneout": 0.1}),
            ("dropconnect 0.2", {"dropconnect": 0.2}),
            ("label smoothing", {"label_smoothing": 0.1}),
            ("reset gate after", {"reset_gate": "after"}),
            ("squared", {"rate_loss": 10.0, "squared_rate": True}),
            ("width 1, height 0.3", {"surrogate": Surrogate(width=1.0, height=0.3)}),
            ("height 1", {"surrogate": Surrogate(width=0.3, height=1.0)}),
            ("width 0.1", {"surrogate": Surrogate(width=0.1, height=0.5)}),
            ("thresholds 0.002", {"threshold": Threshold(mean=-6.0)}),
            ("lr 2e-2", {"learning_rate": 2e-2}),
            ("lr 5e-3", {"learning_rate": 5e-3}),
            ("trace 40", {"trace": 40.0}),
        )
    },
    **{
        f"fast, rate 0.3, permuted, 256 units{name}": {
            **FAST,
            "rate_loss": 0.3,
            "data": "psmnist",
            "hidden": 256,
            "input_scale": 4.9,
            **changes,
        }
        for name, changes in (("", {}), (", reset gate after", {"reset_gate": "after"}))
    },
    "fast, rate 1": RATE_1,
    "fast, rate 3": {**FAST, "rate_loss": 3.0},
    "fast, thresholds 0.05": {**FAST, "threshold": Threshold(mean=-3.0)},
    "fast, permuted": {**FAST, "data": "psmnist"},
    "fast, rate 1, permuted": {**RATE_1, "data": "psmnist"},
    "fast, rate 1, permuted, memory 196": {
        **RATE_1,
        "data": "psmnist",
        "uniform_gates": False,
        "longest_memory": 196.0,
    },
    "fast, rate 1, 28 by 28": {**RATE_1, "side": 28, "trace": 800.0},
    "fast, rate 1, 256 units": {**RATE_1, "hidden": 256, "input_scale": 4.9},
    "fast, rate 1, 256 units, lr 4e-3": {**RATE_1, "hidden": 256, "input_scale": 4.9, "learning_rate": 4e-3},
    "fast, rate 1, 590 units": {**RATE_1, "hidden": 590, "input_scale": 7.5},
    "fast, rate 0.5, 590 units, lr 5e-3": {
        **FAST,
        "hidden": 590,
        "input_scale": 7.5,
        "learning_rate": 5e-3,
        "rate_loss": 0.5,
    },
    "fast, rate 1, not normalised": {**RATE_1, "normalise": False},
    "fast, rate 1, reset output": {**RATE_1, "reset": "output"},
    "fast, rate 1, reset output, bounded": {
        **RATE_1,
        "reset": "output",
        "surrogate": Surrogate(width=0.3, height=0.5, bounded=True),
    },
    "fast, rate 1, reset threshold": {**RATE_1, "reset": "threshold"},
    "fast, rate 1, zoneout 0.1": {**RATE_1, "zoneout": 0.1},
    "fast, rate 1, lr 2e-2": {**RATE_1, "learning_rate": 2e-2},
    "fast, rate 1, memory 196": {**RATE_1, "uniform_gates": False, "longest_memory": 196.0},
    "fast, thresholds 0.12": HIGH_THRESHOLDS,
    "fast, thresholds 0.27": {**FAST, "threshold": Threshold(mean=-1.0)},
    "fast, thresholds 0.12, rate 0.3": {**HIGH_THRESHOLDS, "rate_loss": 0.3},
    "fast, thresholds 0.12, lr 2e-2": {**HIGH_THRESHOLDS, "learning_rate": 2e-2},
    "fast, thresholds 0.12, memory 196": {**HIGH_THRESHOLDS, "uniform_gates": False, "longest_memory": 196.0},
    "fast, thresholds 0.12, wide": {**HIGH_THRESHOLDS, "surrogate": Surrogate(width=1.0, height=0.3)},
    "fast, thresholds 0.12, zoneout 0.1": {**HIGH_THRESHOLDS, "zoneout": 0.1},
    "fast, thresholds 0.12, label smoothing": {**HIGH_THRESHOLDS, "label_smoothing": 0.1},
    "fast, thresholds 0.12, reset gate after": {**HIGH_THRESHOLDS, "reset_gate": "after"},
    "fast, thresholds 0.12, reset output": {**HIGH_THRESHOLDS, "reset": "output"},
    "fast, thresholds 0.12, reset threshold": {**HIGH_THRESHOLDS, "reset": "threshold"},
    "fast, thresholds 0.12, mean": {**HIGH_THRESHOLDS, "readout": "mean"},
    "fast, thresholds 0.12, trace 40": {**HIGH_THRESHOLDS, "trace": 40.0},
    "fast, thresholds 0.12, permuted": {**HIGH_THRESHOLDS, "data": "psmnist"},
    "fast, thresholds 0.12, 28 by 28": {**HIGH_THRESHOLDS, "side": 28, "trace": 800.0},
    "fast, gru": {"cell": "gru", "uniform_gates": False, "learning_rate": 1e-2, "centre": True},
    "paper": {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "clip": 0.25,
        "trace": 10.0,
        "normalise": False,
        "uniform_gates": False,
        "reset": "output",
        "threshold": Threshold(mean=0.0),
        "surrogate": Surrogate(),
    },
    "gru": {"cell": "gru", "uniform_gates": False},
    "gru, fast settings": {"cell": "gru", **FAST, "input_scale": 7.3},
    "gru, fast settings, lr 3e-3": {"cell": "gru", **FAST, "input_scale": 7.3, "learning_rate": 3e-3},
    **{f"cornn, lr {rate}": {**CORNN, "learning_rate": float(rate)} for rate in ("2e-3", "5e-3", "1e-2", "2e-2")},
}
