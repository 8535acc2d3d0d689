"""What there is to report: one run's numbers, and one sequence's events. Checked here, so that nothing later has to."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from egru.activity import ActivitySummary, EnergyModel, LayerActivity, LayerCost, LinearActivity


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One pass over the training set. Accuracy and sparsity are fractions; sparsity is None for a dense model.

    ``validation_perplexity`` is for language models; ``layer_sparsity`` by name of layer, empty where nobody counted.
    """

    epoch: int
    train_loss: float
    validation_accuracy: float
    activity_sparsity: float | None
    seconds: float
    validation_perplexity: float | None = None
    layer_sparsity: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"Epoch {self.epoch}"
        if not math.isfinite(self.train_loss):
            raise ValueError(f"{where}: train_loss must be finite, got {self.train_loss!r}; did the run diverge?")
        _fraction(where, "validation_accuracy", self.validation_accuracy)
        if self.activity_sparsity is not None:
            _fraction(where, "activity_sparsity", self.activity_sparsity)
        for name, value in self.layer_sparsity.items():
            _fraction(where, f"layer_sparsity of {name}", value)
        _duration(where, self.seconds)


@dataclasses.dataclass(frozen=True)
class RunReport:
    """One trained model: how training went, what it scored on the test set and what a monitor saw there.

    Args:
        name: what the figures call it, such as "GRU"; distinct among the runs of one report.
        history: one entry per epoch, in order.
        test_accuracy: as a fraction.
        activity: from :meth:`egru.ActivityMonitor.summary`.
        seconds: of training, wall clock.
        seed: that the run can be repeated with.
        test_perplexity: of a language model, whose accuracy counts next words guessed right; None for all others.
        config: of this run alone, as plain values; what all runs of a report share is given to ``write_report``.
        environment: what the run's numbers depend on beside its config.
        command: that makes this run again.
    """

    name: str
    history: tuple[Epoch, ...]
    test_accuracy: float
    activity: ActivitySummary
    seconds: float
    seed: int
    test_perplexity: float | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"RunReport: name must not be empty, got {self.name!r}")
        where = f"RunReport {self.name!r}"
        if not self.history:
            raise ValueError(f"{where}: history is empty; report a run after at least one epoch")
        epochs = [entry.epoch for entry in self.history]
        if any(b <= a for a, b in itertools.pairwise(epochs)):
            raise ValueError(f"{where}: the epochs of history must increase, got {epochs}")
        _fraction(where, "test_accuracy", self.test_accuracy)
        if self.test_perplexity is not None and not (math.isfinite(self.test_perplexity) and self.test_perplexity >= 1):
            raise ValueError(f"{where}: test_perplexity must be finite and at least 1, got {self.test_perplexity!r}")
        _duration(where, self.seconds)

    @property
    def event_layers(self) -> tuple[LayerActivity, ...]:
        """The layers that emit events; none for a dense model."""
        return tuple(layer for layer in self.activity.layers if layer.backward_skippable is not None)

    @property
    def forward_saving(self) -> float:
        """How many times fewer MACs a forward step takes than the same network with nothing skipped."""
        return self.activity.dense_forward_macs / self.activity.forward_macs

    @property
    def backward_saving(self) -> float:
        return self.activity.dense_backward_macs / self.activity.backward_macs

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; :meth:`from_dict` takes them back."""
        plain = dataclasses.asdict(self)
        plain["history"] = list(plain["history"])
        activity = plain["activity"]
        activity["layers"] = [dict(layer, unit_activity=list(layer["unit_activity"])) for layer in activity["layers"]]
        activity["linears"] = list(activity["linears"])
        activity["overall"] = self.activity.to_dict()["overall"]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "RunReport":
        """The run that :meth:`to_dict` wrote down. ``overall`` is computed anew."""
        activity = plain["activity"]
        layers = tuple(
            LayerActivity(
                **layer | {"cost": LayerCost(**layer["cost"]), "unit_activity": tuple(layer["unit_activity"])}
            )
            for layer in activity["layers"]
        )
        linears = tuple(LinearActivity(**linear) for linear in activity["linears"])
        summary = ActivitySummary(layers, linears, activity["parameters"], EnergyModel(**activity["energy"]))
        history = tuple(Epoch(**entry) for entry in plain["history"])
        return cls(**dict(plain) | {"history": history, "activity": summary})


@dataclasses.dataclass(frozen=True, eq=False)
class Raster:
    """One sequence and the events it caused: ``input`` of shape (T, I), ``events`` (T, H) with zeros where silent.

    ``image`` is shown beside the input, with ``label`` under it; None for sequences that are no picture, and of shape
    (T, rows, columns) for those that are a film. ``layers`` names the layers whose units ``events`` holds side by side,
    each with how many; ``words`` are what was read, one a step.
    """

    title: str
    input: np.ndarray
    events: np.ndarray
    image: np.ndarray | None
    label: str
    layers: tuple[tuple[str, int], ...] = ()
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"Raster {self.title!r}"
        _matrix(where, "input", self.input, "(T, I)")
        _matrix(where, "events", self.events, "(T, H)")
        if len(self.input) != len(self.events):
            raise ValueError(
                f"{where}: input and events must have as many steps, got {len(self.input)} and {len(self.events)}"
            )
        if self.image is not None and self.image.ndim == 3:
            _matrix(where, "image", self.image.reshape(len(self.image), -1), "(T, rows, columns)")
            if len(self.image) != len(self.events):
                raise ValueError(f"{where}: image must have as many frames as there are steps, got {self.image.shape}")
        elif self.image is not None:
            _matrix(where, "image", self.image, "(rows, columns) or (T, rows, columns)")
        if self.layers and sum(units for _, units in self.layers) != self.events.shape[1]:
            raise ValueError(f"{where}: layers must add up to {self.events.shape[1]} units, got {self.layers}")
        if self.words and len(self.words) != len(self.events):
            raise ValueError(f"{where}: words must be one a step, got {len(self.words)} for {len(self.events)}")

    @property
    def silent(self) -> float:
        """The fraction of units and steps without an event."""
        return float((self.events == 0).mean())


def check_runs(where: str, runs: Sequence[RunReport]) -> None:
    """At least one run, and no two of one name."""
    if not runs:
        raise ValueError(f"{where}: runs is empty; give at least one RunReport")
    names = [run.name for run in runs]
    if len(set(names)) != len(names):
        raise ValueError(f"{where}: the runs need distinct names, got {', '.join(map(repr, names))}")


def _fraction(where: str, field: str, value: float) -> None:
    if not 0 <= value <= 1:  # NaN is not
        raise ValueError(f"{where}: {field} must be a fraction between 0 and 1, got {value!r}")


def _duration(where: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where}: seconds must be finite and not negative, got {value!r}")


def _matrix(where: str, field: str, value: np.ndarray, shape: str) -> None:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{where}: {field} must be a numpy array of shape {shape}, got {type(value).__name__}")
    if value.ndim != 2 or 0 in value.shape:
        raise ValueError(f"{where}: {field} must have shape {shape} with nothing empty, got {value.shape}")
    if not np.isfinite(value).all():
        raise ValueError(f"{where}: {field} must be finite, got NaN or infinity")
