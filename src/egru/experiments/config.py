"""The config of a recipe: one flat dataclass with the data set, the network and its training.

Every field is an option of `egru train`, and its docstring is the help text.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from egru.data import Classification, Text
from egru.events import Surrogate
from egru.experiments.custom import (
    Custom,
    CustomClassifier,
    CustomLanguageModel,
    class_path,
    find_class,
    identify_data,
)
from egru.layers import Threshold
from egru.training import ClassifierTraining, LanguageTraining, from_plain, to_plain
from egru.types import (
    EVENT_CELLS,
    Cell,
    Compare,
    DropoutMode,
    Events,
    LabelledData,
    Readout,
    Reset,
    ResetGate,
    TextData,
)

_POOLS = (1, 2, 4, 8, 16)
_SIDES = {"smnist": (28, 14), "psmnist": (28, 14), "dvs-raw": (32, 128)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """The recurrent layers of a network."""

    hidden: int = 128
    """Units per layer. For a densely connected IndRNN, units added per layer."""
    layers: int = 1
    """Number of recurrent layers."""
    cell: Cell = "egru"
    """The recurrent layer."""
    dropout: float = 0.0
    """Dropout on the outputs of all layers but the last, with one mask per sequence."""
    output_dropout: float = 0.0
    """Dropout on the outputs of the last layer."""
    dropconnect: float = 0.0
    """DropConnect on the recurrent weights (event cells, gru, lstm)."""
    zoneout: float = 0.0
    """Zoneout on the states (event cells)."""
    recurrent_clip: float | None = None
    """Bound on each element of the gradient from a state to the one before (event cells; slow). If None, unbounded."""
    events: Events = "positive"
    """What an event is: a state above the threshold, one of large magnitude, or a change (event cells)."""
    compare: Compare = "cell"
    """What is compared with the threshold: the memory cell or the output (elstm)."""
    reset: Reset = "output"
    """How an event resets the state (event cells)."""
    reset_gate: ResetGate = "before"
    """Whether the reset gate acts before or after the recurrent product (egru)."""
    threshold: Threshold = dataclasses.field(default_factory=Threshold)
    """Initial thresholds (event cells)."""
    surrogate: Surrogate = dataclasses.field(default_factory=Surrogate)
    """Surrogate derivative of an event (event cells)."""
    oscillators: tuple[float, float, float] = (0.042, 2.7, 4.7)
    """Time step, stiffness and damping (cornn)."""
    start_from: str | None = None
    """Initialise the weights from this run or export folder, or pretrained model. If None, initialise at random."""
    threshold_floor: tuple[float, ...] = ()
    """Raise lower initial thresholds to this value: one for all layers, or one per layer. If empty, raise none."""

    @property
    def label(self) -> str:
        """Name of the network in reports."""
        return f"{self.cell.upper()} {self.hidden}"

    def layer_options(self) -> dict[str, Any]:
        """Return the keyword arguments of a layer, other than its sizes.

        Raises:
            ValueError: If an option is set that the cell does not support.
        """
        if self.dropout and self.layers == 1:
            raise ValueError(f"dropout acts between layers and must be 0 with one layer, got {self.dropout}")
        if self.cell in EVENT_CELLS:
            options: dict[str, Any] = {
                "dropconnect": self.dropconnect,
                "zoneout": self.zoneout,
                "recurrent_clip": self.recurrent_clip,
                "events": self.events,
                "reset": self.reset,
                "threshold": self.threshold,
                "surrogate": self.surrogate,
            }
            if self.cell == "elstm":
                return options | {"compare": self.compare}
            return options | ({"reset_gate": self.reset_gate} if self.cell == "egru" else {})
        self._refuse("zoneout", "recurrent_clip", *(() if self.cell in ("gru", "lstm") else ("dropconnect",)))
        if self.cell in ("gru", "lstm"):
            return {"dropconnect": self.dropconnect}
        return dict(zip(("dt", "gamma", "epsilon"), self.oscillators, strict=True)) if self.cell == "cornn" else {}

    def _refuse(self, *names: str) -> None:
        for name in names:
            if value := getattr(self, name):
                raise ValueError(f"{name} is not supported with cell {self.cell}, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Network, ClassifierTraining):
    """A classifier of sequences: its data set, network and training.

    The fields are also options of ``egru train``. A dot selects a field of a threshold or a surrogate there:
    ``--threshold.mean -3``.

    Example:
        >>> config = egru.experiments.ClassifierConfig(data="digits", hidden=64, epochs=20, learning_rate=3e-3)
        >>> data = egru.experiments.load_data(config)
        >>> model, task = egru.experiments.build(config, data)
    """

    data: LabelledData = "digits"
    """The data set."""
    root: str | None = None
    """Folder of the data sets. If None, the value of EGRU_DATA."""
    side: int | None = None
    """Height and width of an image in pixels: 28 or 14 (smnist, psmnist), 32 or 128 (dvs-raw). If None, the first, but
    128 with convolutional."""
    limit: int | None = None
    """Use only this many sequences of each split. If None, all."""
    readout: Readout = "trace"
    """Outputs that the classifier reads: exponential trace, mean, last, or every one with a loss per step."""
    smooth: bool = False
    """Replace every pixel by the mean of its 3 by 3 neighbourhood (dvs)."""
    pool: int = 1
    """Replace squares of this many pixels per side by their mean, after smoothing: 1, 2, 4, 8 or 16 (dvs)."""
    shift: float = 0.0
    """Maximum random translation of each training sequence in pixels, in each direction, before smoothing and pooling
    (dvs)."""
    time_crop: float = 1.0
    """Minimum length of a random part of each training sequence that is stretched to its whole length, as a fraction
    (dvs)."""
    roll: bool = False
    """Start each training sequence at a random frame and continue at its beginning after its end (dvs)."""
    centre: bool = False
    """Subtract the mean training frame from every frame."""
    input_dropout: float = 0.0
    """Dropout on the inputs of the first layer, pixels or convolutional features, with one mask per sequence."""
    trace: float = 10.0
    """Time constant of the trace, in steps."""
    normalise: bool = False
    """Apply batch normalisation before the readout, and make the trace a weighted mean."""
    uniform_gates: bool = False
    """Initialise update gates uniformly over (0, 1), which spreads the time constants (egru, gru)."""
    longest_memory: float | None = None
    """Initialise update gates to 1/t, with t log-uniform from 1 to this many steps (egru, gru). If None, off."""
    input_scale: float = 1.0
    """Factor on the initial input weights of the first layer (egru, gru)."""
    convolutional: bool = False
    """Use the paper's convolutional network before the recurrent layers (dvs)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_limit(self.limit)
        if not 0 < self.trace <= 1e15:
            raise ValueError(f"trace must be positive and at most 1e15 steps, got {self.trace}")
        if self.hidden < 2 and (self.uniform_gates or self.longest_memory is not None):
            raise ValueError(f"hidden must be at least 2 with uniform_gates or longest_memory, got {self.hidden}")
        sides = _SIDES.get(self.data, ())
        if self.side is not None and self.side not in sides:
            accepted = " or ".join(map(str, sides)) or "None"
            raise ValueError(f"side must be {accepted} with data {self.data}, got {self.side}")
        if self.uniform_gates and self.longest_memory is not None:
            raise ValueError("uniform_gates and longest_memory both set the update gates; choose one")
        if self.longest_memory is not None and not self.longest_memory > 1:
            raise ValueError(f"longest_memory must be greater than 1 step, or None; got {self.longest_memory}")
        if not self.input_scale > 0:
            raise ValueError(f"input_scale must be positive, got {self.input_scale}")
        if self.centre and self.convolutional:
            raise ValueError("centre is not supported with convolutional, where the layers do not read the frames")
        if self.pool not in _POOLS:
            raise ValueError(f"pool must be one of {', '.join(map(str, _POOLS))}, got {self.pool}")
        if not (self.shift >= 0 and math.isfinite(self.shift)):
            raise ValueError(f"shift must be finite and not negative, got {self.shift}")
        if not 0 < self.time_crop <= 1:
            raise ValueError(f"time_crop must be a fraction, 0 < time_crop <= 1; got {self.time_crop}")
        prepares = self.smooth or self.pool > 1 or self.shift or self.time_crop < 1 or self.roll
        needs_frames = self.convolutional or self.augment or prepares
        if needs_frames and not self.data.startswith("dvs"):
            names = "convolutional, augment, smooth, pool, shift, time_crop and roll"
            raise ValueError(f"{names} require frames (data dvs or dvs-raw), got data {self.data}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(Network, LanguageTraining):
    """A word-level language model: its data set, network and training.

    Example:
        >>> config = egru.experiments.LanguageConfig(data="ptb", hidden=200, embedding=100, epochs=20)
        >>> data = egru.experiments.load_data(config)  # doctest: +SKIP
    """

    data: TextData = "ptb"
    """The data set."""
    root: str | None = None
    """Folder of the data sets. If None, the value of EGRU_DATA."""
    limit: int | None = None
    """Use only this many words of each split. If None, all."""
    embedding: int = 400
    """Size of the word vectors and of the last layer."""
    word_dropout: float = 0.0
    """Dropout of whole words."""
    embedding_dropout: float = 0.0
    """Dropout on the word vectors."""
    dropout_mode: DropoutMode = "variational"
    """One dropout mask per sequence (variational) or per step (plain). Does not apply to word_dropout."""
    layers: int = 3
    """Number of recurrent layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_limit(self.limit)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None; got {limit}")


RecipeConfig = ClassifierConfig | LanguageConfig
Config = RecipeConfig | CustomClassifier | CustomLanguageModel
C = TypeVar("C", bound=Config)


def with_fields(config: C, fields: Mapping[str, Any]) -> C:
    """Return a copy of ``config`` with some fields changed.

    Args:
        config: The config to copy.
        fields: New values by field name. A dot selects a field of a field: ``"threshold.mean"``.

    Raises:
        ValueError: If there is no such field, or the values are not valid.

    Example:
        >>> config = egru.experiments.find("digits").make()
        >>> config = egru.experiments.with_fields(config, {"hidden": 64, "threshold.mean": -3.0})
    """
    values = to_plain(config)
    for name, value in fields.items():
        *parents, last = name.split(".")
        target = values
        for parent in parents:
            target = target.get(parent) if isinstance(target, dict) else None
        if not isinstance(target, dict) or last not in target:
            similar = difflib.get_close_matches(name, _field_names(to_plain(config)), 3)
            hint = f"; did you mean {', '.join(similar)}?" if similar else ""
            raise ValueError(f"{type(config).__name__}: unknown field {name!r}{hint}")
        target[last] = value
    return from_plain(type(config), values)


def _field_names(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    nested = [n for key, value in values.items() if isinstance(value, dict) for n in _field_names(value, f"{key}.")]
    return [prefix + name for name in (*values, *nested)]


def config_record(recipe: str, config: Config, data: Classification | Text) -> dict[str, Any]:
    """Return the content of a run's ``config.json``.

    The fields of a custom config do not name its data set, so that the record does.

    Raises:
        TypeError: If the class of a custom config is not a dataclass, so that its fields would be lost, or if JSON
            cannot store a field.
    """
    cls = type(config)
    if "__dataclass_fields__" not in cls.__dict__:
        raise TypeError(f"{cls.__name__} must be decorated with @dataclasses.dataclass(frozen=True, kw_only=True)")
    record = {"recipe": recipe, "kind": cls.__name__, "config": to_plain(config)}
    if isinstance(config, Custom):
        _check_stored_fields(config)
        record |= {"kind": class_path(cls), "data": identify_data(data)}
    return record


def _check_stored_fields(config: Custom) -> None:
    """Raise unless reading the stored fields of ``config`` returns the same values."""
    name = type(config).__name__
    try:
        stored = from_plain(type(config), json.loads(json.dumps(to_plain(config))))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} cannot be stored as JSON: {error}") from error
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if getattr(stored, field.name) != value:
            raise TypeError(
                f"{name}: {field.name} must be a number, string, bool, tuple or dataclass of its annotated type, so "
                f"that JSON can store it; got {value!r}"
            )


def read_config(record: Mapping[str, Any], source: str | Path = "config.json") -> tuple[str, Config]:
    """Return the name of the recipe and the config that :func:`config_record` stored.

    Args:
        record: The content of ``config.json``.
        source: Path of the file, for error messages.

    Raises:
        ValueError: If the record is damaged, or was not written by :func:`egru.runs.train`. The message names
            ``source``.
    """
    recipe, kind, fields = (record.get(name) for name in ("recipe", "kind", "config"))
    if not (isinstance(recipe, str) and isinstance(kind, str) and isinstance(fields, dict)):
        raise ValueError(
            f"{source}: recipe, kind or config is missing; only runs made by egru.runs.train or `egru train` can be "
            "evaluated, reported or exported"
        )
    classes: dict[str, Any] = {cls.__name__: cls for cls in (ClassifierConfig, LanguageConfig)}
    if kind not in classes and ":" not in kind:
        raise ValueError(f"{source}: kind must be {', '.join(classes)} or module:Class, got {kind!r}")
    cls = classes[kind] if kind in classes else find_class(kind, source)
    try:
        return recipe, from_plain(cls, fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error
