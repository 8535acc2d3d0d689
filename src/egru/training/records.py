"""Schema of the files in a run folder: one line of metrics per epoch, the result, and where a kept run comes from.

``config.json`` holds the fields of the experiment's configuration, ``environment.json`` an
:class:`egru.environment.Environment`. Every file carries the format number :data:`egru.records.FORMAT`.
"""

import dataclasses
import math
import statistics

from egru import format
from egru.activity import ActivitySummary, LayerActivity, Stability
from egru.records import OPTIONAL, JSONRecord


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores on one split.

    Attributes:
        loss: Mean cross-entropy per sequence or word, in nats.
        accuracy: Fraction of sequences, or of next words, that were predicted correctly.
        perplexity: ``exp(loss)`` for language models, None for classifiers.
    """

    loss: float
    accuracy: float
    perplexity: float | None = None


@dataclasses.dataclass(frozen=True)
class TrainingMetrics:
    """Training statistics of one epoch.

    Attributes:
        loss: Mean loss per target.
        gradient_norm: Median gradient norm, before clipping.
        gradient_norm_p99: 99th percentile of the gradient norm. None in runs that did not measure it.
        gradient_norm_max: Largest gradient norm.
        steps: Number of optimiser steps.
        waited: Seconds spent waiting for data.
        skipped: Number of steps left out because a float16 gradient overflowed. None for other precisions.
    """

    loss: float
    gradient_norm: float
    gradient_norm_p99: float | None
    gradient_norm_max: float
    steps: int
    waited: float
    skipped: int | None = None


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Sparsity of a model or of one layer, as fractions. The backward sparsities are None for dense layers.

    Attributes:
        activity_sparsity: Fraction of outputs without an event.
        backward_sparsity: Fraction of states outside the surrogate's window, as counted in the paper.
        backward_skippable: Fraction of states with a zero surrogate gradient, which a kernel can skip.
    """

    activity_sparsity: float
    backward_sparsity: float | None
    backward_skippable: float | None

    @classmethod
    def of(cls, activity: ActivitySummary | LayerActivity) -> "Sparsity":
        """Return the sparsity of a summary or of one of its layers."""
        return cls(activity.activity_sparsity, activity.backward_sparsity, activity.backward_skippable)


def layer_sparsity(activity: ActivitySummary) -> dict[str, Sparsity]:
    """Return the sparsity of each layer by name."""
    return {layer.name: Sparsity.of(layer) for layer in activity.layers}


@dataclasses.dataclass(frozen=True)
class ModelActivity(Sparsity):
    """Sparsity and cost of a model.

    Attributes:
        forward_macs: Effective multiply-accumulates per forward step.
        backward_macs: Effective multiply-accumulates per backward step.
        weight_sparsity: Fraction of weights that are zero. None if there are none.
    """

    forward_macs: float
    backward_macs: float
    weight_sparsity: float | None = dataclasses.field(default=None, metadata=OPTIONAL)

    @classmethod
    def of_model(cls, activity: ActivitySummary) -> "ModelActivity":
        """Return the stored numbers of a summary."""
        return cls(
            **dataclasses.asdict(Sparsity.of(activity)),
            forward_macs=activity.forward_macs,
            backward_macs=activity.backward_macs,
            weight_sparsity=activity.weight_sparsity or None,
        )


@dataclasses.dataclass(frozen=True)
class LayerStability:
    """Growth of gradients in one layer, from :func:`egru.activity.measure_stability`. None means not finite."""

    layer: str
    diagonal_above_one: float
    adjoint_growth: float | None
    adjoint_peak: float | None

    @classmethod
    def of(cls, stability: Stability) -> "LayerStability":
        """Return the stored fields of a measurement."""
        growth, peak = stability.adjoint_growth, stability.adjoint_peak
        return cls(
            stability.name,
            stability.diagonal_above_one,
            growth if math.isfinite(growth) else None,
            peak if math.isfinite(peak) else None,
        )


@dataclasses.dataclass(frozen=True)
class EpochMetrics(JSONRecord):
    """One epoch: a line of ``metrics.jsonl``.

    Attributes:
        epoch: Number of the epoch, from 1.
        train: Loss and gradient norms in training.
        validation: Scores on the validation split.
        activity: Sparsity and cost on the validation split, over all layers.
        layers: Sparsity on the validation split, per layer. Empty in runs that did not measure it.
        training_activity: Sparsity in one training step. None if the epoch had a single step.
        training_layers: Sparsity in one training step, per layer. None if the epoch had a single step.
        stability: Growth of gradients per layer; empty unless ``diagnose`` is on.
        seconds: Duration of training and validation.
        elapsed: Seconds since the process started to train. None in runs that did not measure it.
    """

    epoch: int
    train: TrainingMetrics
    validation: Scores
    activity: ModelActivity
    layers: dict[str, Sparsity]
    training_activity: Sparsity | None
    training_layers: dict[str, Sparsity] | None
    stability: tuple[LayerStability, ...]
    seconds: float
    elapsed: float | None


@dataclasses.dataclass(frozen=True)
class EpochEnergy:
    """Measured energy of one epoch.

    Attributes:
        epoch: Number of the epoch, from 1.
        joules: Joules of training and validation by counter. Counters include other processes.
    """

    epoch: int
    joules: dict[str, float]


@dataclasses.dataclass(frozen=True)
class RunEnergy(JSONRecord):
    """Measured energy of a run: ``energy.json``.

    Attributes:
        counters: Where each counter is read, by name, from :attr:`egru.energy.EnergyMeter.sources`. Empty if the
            machine has no counter.
        missing: Why counters are missing, from :attr:`egru.energy.EnergyMeter.missing`.
        epochs: The epochs whose energy was measured, in order.
    """

    counters: dict[str, str]
    missing: tuple[str, ...]
    epochs: tuple[EpochEnergy, ...]

    def __str__(self) -> str:
        """Return the median energy per epoch by counter, or why nothing was measured."""
        values = {name: [e.joules[name] for e in self.epochs if name in e.joules] for name in self.counters}
        parts = [
            f"{name} {format.joules(statistics.median(joules))} ({self.counters[name]})"
            for name, joules in values.items()
            if joules
        ]
        if not parts:
            return f"energy per epoch not measured: {'; '.join(self.missing) or 'no epoch was trained'}"
        return "; ".join([f"measured energy per epoch, median: {', '.join(parts)}", *self.missing])


@dataclasses.dataclass(frozen=True)
class ThresholdTrial:
    """Validation scores of a network whose thresholds were raised to at least ``floor``.

    Attributes:
        floor: Smallest threshold, one per layer.
        validation: Scores on the validation split.
        activity_sparsity: Fraction of outputs without an event.
        forward_macs: Effective multiply-accumulates per step.
    """

    floor: tuple[float, ...]
    validation: Scores
    activity_sparsity: float
    forward_macs: float

    @property
    def loss(self) -> float:
        """Loss on the validation split."""
        return self.validation.loss

    def __str__(self) -> str:
        scores = self.validation
        quality = f"accuracy {format.percent(scores.accuracy, 2)}"
        if scores.perplexity is not None:
            quality = f"perplexity {scores.perplexity:.2f}"
        floors = " ".join(f"{value:g}" for value in self.floor)
        return (
            f"floors {floors}: loss {scores.loss:.4f}, {quality}, activity sparsity "
            f"{format.percent(self.activity_sparsity)}, {format.count(self.forward_macs)} MACs per step"
        )


@dataclasses.dataclass(frozen=True)
class Derivation:
    """How a run was derived from another one without training.

    Attributes:
        source: The run it was derived from, which holds the training metrics: a path, the name of a folder next to
            this run, or the name of a pretrained model.
        command: Command that repeats the derivation.
        validation: Scores of the derived network on the validation split.
        trials: Thresholds that were tried.
    """

    source: str
    command: str
    validation: Scores
    trials: tuple[ThresholdTrial, ...]


@dataclasses.dataclass(frozen=True)
class Result(JSONRecord):
    """Result of a run: ``result.json``.

    Attributes:
        best_epoch: Epoch with the best validation score, whose weights were tested.
        test: Scores on the test split.
        activity: Activity on the test split.
        seconds: Duration of training.
        derivation: How the run was derived from another one. None for a run that was trained.
    """

    best_epoch: int
    test: Scores
    activity: ActivitySummary
    seconds: float
    derivation: Derivation | None = None


@dataclasses.dataclass(frozen=True)
class KeptRecord(JSONRecord):
    """Origin of a run kept in the repository: ``record.json``.

    Attributes:
        command: Command that repeats the run.
        date: Day on which the run finished, as YYYY-MM-DD.
        note: Remark for the tables, such as the precision of the weights that the run started from. May be empty.
    """

    command: str
    date: str
    note: str
