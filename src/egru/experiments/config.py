"""What a recipe returns: one flat dataclass with the data, the network and its training. A field is an option."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal

from egru.events import Surrogate
from egru.layers import Threshold
from egru.training import ClassifierTraining, LanguageTraining, from_plain, to_plain
from egru.types import LabelledData, TextData

EVENT_CELLS = ("egru", "elstm", "ernn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """The recurrent layers."""

    hidden: int = 128
    """Units in a layer; of a densely connected IndRNN, its growth."""
    layers: int = 1
    cell: Literal["egru", "elstm", "ernn", "gru", "lstm", "cornn", "indrnn", "dense_indrnn"] = "egru"
    dropout: float = 0.0
    """On what layers but the last put out; one mask a sequence."""
    output_dropout: float = 0.0
    """On what the last layer puts out."""
    dropconnect: float = 0.0
    """On recurrent weights (event cells, gru, lstm)."""
    zoneout: float = 0.0
    """On states (event cells)."""
    recurrent_clip: float | None = None
    """Bound on every element of the gradient from a step to the state before it (event cells; slow: no kernel)."""
    reset: Literal["output", "threshold", "hard", "none"] = "output"
    """How an event clears a state (event cells)."""
    reset_gate: Literal["before", "after"] = "before"
    """Before or after the recurrent product (egru)."""
    threshold: Threshold = dataclasses.field(default_factory=Threshold)
    surrogate: Surrogate = dataclasses.field(default_factory=Surrogate)
    oscillators: tuple[float, float, float] = (0.042, 2.7, 4.7)
    """Time step, stiffness and damping (cornn)."""
    start_from: str | None = None
    """Folder of a run or an export, or a pretrained model's name, whose weights are the start; none: random ones."""
    threshold_floor: tuple[float, ...] = ()
    """Lift thresholds below it at the start: one number, or one a layer (with reset threshold slow on a GPU)."""

    def layer_options(self) -> dict[str, Any]:
        """What every layer is called with, beside its sizes."""
        if self.dropout and self.layers == 1:
            raise ValueError(f"dropout must be left out with one layer: the last has none; got {self.dropout}")
        if self.cell in EVENT_CELLS:
            options: dict[str, Any] = {
                "dropconnect": self.dropconnect,
                "zoneout": self.zoneout,
                "recurrent_clip": self.recurrent_clip,
                "reset": self.reset,
                "threshold": self.threshold,
                "surrogate": self.surrogate,
            }
            return options | ({"reset_gate": self.reset_gate} if self.cell == "egru" else {})
        self._refuse("zoneout", "recurrent_clip", *(() if self.cell in ("gru", "lstm") else ("dropconnect",)))
        if self.cell in ("gru", "lstm"):
            return {"dropconnect": self.dropconnect}
        return dict(zip(("dt", "gamma", "epsilon"), self.oscillators, strict=True)) if self.cell == "cornn" else {}

    def _refuse(self, *names: str) -> None:
        for name in names:
            if getattr(self, name):
                raise ValueError(
                    f"{name} must be left out with cell {self.cell}, which has none; got {getattr(self, name)!r}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Network, ClassifierTraining):
    """A classifier of sequences, its data and its training."""

    data: LabelledData = "digits"
    root: str | None = None
    """Where the data lie; none: EGRU_DATA says."""
    side: int | None = None
    """Pixels along an image's side: 28 or 14 (smnist, psmnist), 32 or 128 (dvs-raw); none: the first."""
    limit: int | None = None
    """Use only the first so many sequences of each split."""
    readout: Literal["trace", "mean", "last", "every"] = "trace"
    """every: a loss at every step in training, the mean of the steps' probabilities in evaluation."""
    smooth: bool = False
    """Take every pixel together with its eight neighbours (dvs)."""
    centre: bool = False
    """Subtract the mean of the training frames from every frame."""
    input_dropout: float = 0.0
    """On what the first layer reads: pixels, or the convolutional head's features; one mask a sequence."""
    trace: float = 10.0
    """Time constant of the trace, in steps."""
    normalise: bool = False
    """Batch normalisation of what the readout sees; the trace is then a weighted mean."""
    uniform_gates: bool = False
    """Start with update gates spread over (0, 1): memories of every length (egru, gru)."""
    longest_memory: float | None = None
    """Start with update gates 1/t, t spread evenly in its logarithm from 1 to so many steps (egru, gru)."""
    input_scale: float = 1.0
    """Multiplies the first layer's input weights at the start (egru, gru)."""
    convolutional: bool = False
    """Put the paper's convolutional head before the layers (dvs)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_limit(self.limit)
        if not 0 < self.trace <= 1e15:
            raise ValueError(f"trace must be positive and at most 1e15 steps, got {self.trace}")
        if self.hidden < 2 and (self.uniform_gates or self.longest_memory is not None):
            raise ValueError(f"hidden must be at least 2 to spread update gates over, got {self.hidden}")
        sides = {"smnist": (28, 14), "psmnist": (28, 14), "dvs-raw": (32, 128)}.get(self.data, ())
        if self.side is not None and self.side not in sides:
            accepted = " or ".join(map(str, sides)) or "left out"
            raise ValueError(f"side must be {accepted} with data {self.data}, got {self.side}")
        if self.uniform_gates and self.longest_memory is not None:
            raise ValueError("uniform_gates and longest_memory both set the update gates: leave one out")
        if self.longest_memory is not None and not self.longest_memory > 1:
            raise ValueError(f"longest_memory must be above 1 step, or none; got {self.longest_memory}")
        if not self.input_scale > 0:
            raise ValueError(f"input_scale must be positive, got {self.input_scale}")
        if self.centre and self.convolutional:
            raise ValueError("centre is for layers that read the frames themselves: leave it out with convolutional")
        if (self.convolutional or self.augment or self.smooth) and not self.data.startswith("dvs"):
            names = "convolutional, augment and smooth"
            raise ValueError(f"{names} are for frames (data dvs or dvs-raw), got data {self.data}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(Network, LanguageTraining):
    """A word-level language model, its text and its training."""

    data: TextData = "ptb"
    root: str | None = None
    """Where the data lie; none: EGRU_DATA says."""
    limit: int | None = None
    """Use only the first so many words of each split."""
    embedding: int = 400
    """Size of a word's vector, and of the last layer."""
    word_dropout: float = 0.0
    """On whole words."""
    embedding_dropout: float = 0.0
    """On the words' vectors."""
    dropout_mode: Literal["variational", "plain"] = "variational"
    """Of all dropout but that on words: one mask a sequence, or anew at every step."""
    layers: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_limit(self.limit)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or none; got {limit}")


Config = ClassifierConfig | LanguageConfig


def with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """``config`` with some fields changed, by name; a dot leads into a field that has fields: ``threshold.mean``."""
    plain = to_plain(config)
    for name, value in fields.items():
        *path, last = name.split(".")
        inner = plain
        for part in path:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last not in inner:
            near = difflib.get_close_matches(name, _names(to_plain(config)), 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"{type(config).__name__}: unknown field {name!r}{hint}")
        inner[last] = value
    return from_plain(type(config), plain)


def _names(plain: Mapping[str, Any], before: str = "") -> list[str]:
    inner = [name for key, value in plain.items() if isinstance(value, dict) for name in _names(value, f"{key}.")]
    return [before + name for name in (*plain, *inner)]


def config_record(recipe: str, config: Config) -> dict[str, Any]:
    """What a run's config.json holds."""
    return {"recipe": recipe, "kind": type(config).__name__, "config": to_plain(config)}


def read_config(plain: dict[str, Any]) -> tuple[str, Config]:
    """The recipe's name and the config that :func:`config_record` wrote down."""
    kinds = {kind.__name__: kind for kind in (ClassifierConfig, LanguageConfig)}
    return plain["recipe"], from_plain(kinds[plain["kind"]], plain["config"])
