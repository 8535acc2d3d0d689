"""Input of a report: the numbers of a run, and the events of one sequence. Values are validated here."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from egru import format
from egru.activity import ActivitySummary, LayerActivity
from egru.environment import Environment
from egru.records import OPTIONAL, JSONRecord
from egru.training.records import ThresholdTrial


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of training.

    Attributes:
        epoch: Number of the epoch.
        train_loss: Mean training loss.
        validation_accuracy: Accuracy as a fraction.
        activity_sparsity: Fraction of outputs without an event. None for a dense model.
        seconds: Duration of the epoch.
        validation_perplexity: Perplexity of a language model, None for other models.
        layer_sparsity: Activity sparsity per layer. Empty if it was not measured.

    Raises:
        ValueError: If a value is not finite or not a fraction.

    Example:
        >>> history = [egru.report.Epoch(1, 1.7, 0.61, 0.82, 2.1), egru.report.Epoch(2, 0.9, 0.78, 0.85, 2.0)]
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
class ThresholdSearch:
    """How a run was derived from a trained one by raising thresholds, without training.

    Attributes:
        source: Name of the run it was derived from.
        trials: Validation scores of the thresholds that were tried. The first trial is the run before.
        chosen: Index of the trial whose thresholds the run has.

    Raises:
        ValueError: If ``chosen`` is not the index of a trial.
    """

    source: str
    trials: tuple[ThresholdTrial, ...]
    chosen: int

    def __post_init__(self) -> None:
        if not 0 <= self.chosen < len(self.trials):
            raise ValueError(
                f"ThresholdSearch: chosen must be the index of one of the {len(self.trials)} trials, got {self.chosen}"
            )


@dataclasses.dataclass(frozen=True)
class StepTime(JSONRecord):
    """The measured time per step of a network that reads one sequence.

    Attributes:
        seconds: Seconds per step.
        method: What was timed, for example "EventEngine, float32, 1 thread".
        machine: The machine of the measurement.

    Raises:
        ValueError: If ``seconds`` is not positive and finite.

    Example:
        >>> time = egru.report.StepTime(3.1e-6, "EventEngine, float32, 1 thread", "AMD EPYC")
    """

    seconds: float
    method: str
    machine: str

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"StepTime: seconds must be positive and finite, got {self.seconds!r}")


class Score(NamedTuple):
    """Quality of a model: the name of the measure, its value, and the value as text."""

    name: Literal["accuracy", "perplexity", "loss"]
    value: float
    text: str


@dataclasses.dataclass(frozen=True)
class RunReport(JSONRecord):
    """The numbers of one model.

    Attributes:
        name: Name in figures and tables, such as "GRU". Unique among the runs of a report.
        history: One entry per epoch, in order. Empty if the run was derived from another one by a ``search``, or if its
            training was not recorded.
        accuracy: Accuracy on ``split``, as a fraction. None if only ``loss`` was measured.
        activity: Activity on ``split``, from :meth:`egru.ActivityMonitor.summary`.
        seconds: Duration of training, or of the ``search``. None if it is not known.
        seed: Seed of the run. None if it is not known.
        perplexity: Perplexity of a language model on ``split``, None for other models.
        split: The split that was scored: "validation" for a run whose test split was not scored.
        search: The search that the run was derived by. None for a run that was trained.
        step_time: Measured time per step, None if it was not measured.
        config: Settings of this run. Settings that all runs share are passed to :func:`write_report`.
        changed: Names of the settings that differ from the recipe. They are listed first.
        environment: Software and hardware of the run. If None, those of the process that writes the report are shown.
        command: Command that repeats the run.
        loss: Mean loss on ``split``. Required if there is no accuracy.

    Raises:
        ValueError: If a value is not accepted; the message names the run and the field.

    Example:
        >>> layer, x = egru.EGRU(4, 8), torch.randn(20, 2, 4)
        >>> with egru.ActivityMonitor(layer) as monitor:
        ...     layer(x)
        >>> history = (egru.report.Epoch(1, 1.7, 0.61, 0.82, 2.1), egru.report.Epoch(2, 0.9, 0.78, 0.85, 2.0))
        >>> run = egru.report.RunReport("EGRU", history, 0.79, monitor.summary(), seconds=4.1, seed=0)
    """

    name: str
    history: tuple[Epoch, ...]
    accuracy: float | None
    activity: ActivitySummary
    seconds: float | None
    seed: int | None
    perplexity: float | None = None
    split: Literal["test", "validation"] = "test"
    search: ThresholdSearch | None = None
    step_time: StepTime | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changed: tuple[str, ...] = ()
    environment: Environment | None = None
    command: str = ""
    loss: float | None = dataclasses.field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"RunReport: name must not be empty, got {self.name!r}")
        where = f"RunReport {self.name!r}"
        if self.history and self.search is not None:
            raise ValueError(f"{where}: history must be empty with a search, got {len(self.history)} epochs")
        epochs = [entry.epoch for entry in self.history]
        if any(b <= a for a, b in itertools.pairwise(epochs)):
            raise ValueError(f"{where}: the epochs of history must increase, got {epochs}")
        if self.accuracy is None and self.loss is None:
            raise ValueError(f"{where}: accuracy or loss is required, got None for both")
        if self.accuracy is not None:
            _fraction(where, "accuracy", self.accuracy)
        if self.loss is not None and not math.isfinite(self.loss):
            raise ValueError(f"{where}: loss must be finite, got {self.loss!r}")
        if self.perplexity is not None and not (math.isfinite(self.perplexity) and self.perplexity >= 1):
            raise ValueError(f"{where}: perplexity must be finite and at least 1, got {self.perplexity!r}")
        if self.seconds is not None:
            _duration(where, self.seconds)

    @property
    def score(self) -> Score:
        """The quality that the page compares: the perplexity, or else the accuracy, or else the loss."""
        if self.perplexity is not None:
            return Score("perplexity", self.perplexity, f"{self.perplexity:.1f}")
        if self.accuracy is not None:
            return Score("accuracy", self.accuracy, format.percent(self.accuracy))
        assert self.loss is not None
        return Score("loss", self.loss, f"{self.loss:.4g}")

    @property
    def task(self) -> tuple[str, str, str]:
        """Data set, split and name of the score. Only runs with the same task are compared."""
        return str(self.config.get("data", "")), self.split, self.score.name

    @property
    def event_layers(self) -> tuple[LayerActivity, ...]:
        """The layers that emit events; empty for a dense model."""
        return tuple(layer for layer in self.activity.layers if layer.backward_skippable is not None)

    @property
    def forward_saving(self) -> float:
        """Dense MACs of a forward step divided by the effective ones."""
        return self.activity.dense_forward_macs / self.activity.forward_macs

    @property
    def backward_saving(self) -> float:
        """Dense MACs of a backward step divided by the effective ones."""
        return self.activity.dense_backward_macs / self.activity.backward_macs

    def derived(self) -> dict[str, float | None]:
        """Return the numbers that follow from the measured ones, for readers of ``report.json``."""
        names = (
            "activity_sparsity",
            "backward_sparsity",
            "backward_skippable",
            "forward_macs",
            "dense_forward_macs",
            "backward_macs",
            "dense_backward_macs",
            "estimated_joules",
            "estimated_dense_joules",
        )
        return {name: getattr(self.activity, name) for name in names}


@dataclasses.dataclass(frozen=True, eq=False)
class Raster:
    """The events of one sequence.

    Attributes:
        title: Title of the figure.
        input: Input of shape (T, I).
        events: Emitted values of shape (T, H); zero where a unit emits no event.
        image: Image shown next to the input, of shape (rows, columns), or (T, rows, columns) for a sequence of frames.
            None if the input is not an image.
        label: Caption of the image.
        layers: Name and number of units of each layer, in the order of the columns of ``events``.
        words: Words of the input text, one per step. Empty if the input is not text.

    Raises:
        TypeError: If an array is not a numpy array.
        ValueError: If shapes do not fit or a value is not finite.

    Example:
        >>> layer, x = egru.EGRU(4, 8), torch.randn(20, 4)
        >>> events = layer(x)[0].detach().numpy()
        >>> raster = egru.report.Raster("first sequence", x.numpy(), events, image=None, label="")
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
            steps = f"{len(self.input)} and {len(self.events)}"
            raise ValueError(f"{where}: input and events must have the same number of steps, got {steps}")
        if self.image is not None and self.image.ndim == 3:
            _matrix(where, "image", self.image.reshape(len(self.image), -1), "(T, rows, columns)")
            if len(self.image) != len(self.events):
                raise ValueError(f"{where}: image must have one frame per step, got shape {self.image.shape}")
        elif self.image is not None:
            _matrix(where, "image", self.image, "(rows, columns) or (T, rows, columns)")
        if self.layers and sum(units for _, units in self.layers) != self.events.shape[1]:
            raise ValueError(f"{where}: layers must add up to {self.events.shape[1]} units, got {self.layers}")
        if self.words and len(self.words) != len(self.events):
            raise ValueError(
                f"{where}: words must have one entry per step, got {len(self.words)} for {len(self.events)} steps"
            )

    @property
    def activity_sparsity(self) -> float:
        """Fraction of units and steps without an event."""
        return float((self.events == 0).mean())


def check_runs(where: str, runs: Sequence[RunReport]) -> None:
    """Raise ValueError unless there is at least one run and all names are distinct."""
    if not runs:
        raise ValueError(f"{where}: runs must contain at least one RunReport, got none")
    names = [run.name for run in runs]
    if len(set(names)) != len(names):
        raise ValueError(f"{where}: the runs must have distinct names, got {', '.join(map(repr, names))}")


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
        raise ValueError(f"{where}: {field} must have shape {shape} without empty dimensions, got {value.shape}")
    if not np.isfinite(value).all():
        raise ValueError(f"{where}: {field} must be finite, got NaN or infinity")
