"""How a model is trained: dataclasses that go to JSON and back, checked when they are made."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What every training run has."""

    epochs: int = 100
    batch: int = 100
    """Sequences in a step; where several processes train together, of each."""
    evaluation_batch: int = 500
    """Sequences side by side when validation and test are scored."""
    optimiser: Literal["adam", "adamw", "ntavsgd"] = "adam"
    """ntavsgd: SGD that starts averaging the weights once validation stops improving."""
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    """Of adam and adamw."""
    weight_decay: float = 0.0
    """On everything but thresholds: decoupled in adamw, L2 in the others."""
    patience: int = 5
    """Of ntavsgd: averaging starts when validation is worse than it was before the last so many epochs."""
    clip: float | None = None
    """Largest norm of the whole gradient."""
    schedule: Literal["constant", "cosine", "step", "one-cycle"] = "constant"
    constant_share: float = 0.5
    """cosine: the share of the epochs before the learning rate starts to fall."""
    final_factor: float = 0.1
    """cosine: what is left of the learning rate at the end."""
    step_epochs: int = 100
    """step: epochs between two cuts of the learning rate."""
    step_factor: float = 0.8
    """step: what a cut leaves."""
    threshold_learning_rate: float | None = None
    """Of the thresholds; none: as everything else."""
    freeze_thresholds: bool = False
    """Keep the thresholds as they start."""
    rate_loss: float = 0.0
    """Weight of the loss on the events' rate above 5 % (the paper's w_reg)."""
    state_loss: float = 0.0
    """Weight of the loss that pulls states below their thresholds (the paper's w_v)."""
    squared_rate: bool = False
    """Square the loss on the rate, as EvNN does."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of products: the short ones run under autocast, with float32 weights and states. float16 needs cuda; the loss is
    scaled, and a step whose gradient overflows is left out."""
    graph: bool = False
    """Record forward and backward pass of each shape as a CUDA graph and replay it: for GPUs that wait for Python."""
    exchange: Literal["float32", "bfloat16"] = "float32"
    """What processes that train together (torchrun) send each other of their gradients: bfloat16 is half the bytes."""
    device: str = "cpu"
    seed: int = 0
    save_every: int = 1
    """Epochs between two checkpoints: what a kill may cost. Validation chooses among the epochs that were saved."""
    diagnose: bool = True
    """After every epoch, measure on one validation batch how gradients grow or fade over time, and warn (egru)."""
    tensorboard: bool = False
    """Also write the metrics where TensorBoard finds them, in the run's folder."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "evaluation_batch", "patience", "step_epochs", "save_every"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "learning_rate", self.learning_rate > 0, "positive")
        _require(self, "weight_decay", self.weight_decay >= 0, "zero or more")
        _require(self, "clip", self.clip is None or self.clip > 0, "positive, or none")
        for name in ("constant_share", "final_factor", "step_factor"):
            _require(self, name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("optimiser", "schedule", "precision", "exchange"):
            choices = typing.get_args(typing.get_type_hints(type(self))[name])
            _require(self, name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        fine = self.precision != "float16" or self.device.startswith("cuda")
        _require(self, "precision", fine, f"float32 or bfloat16 on device {self.device} (float16 needs cuda)")
        fine = not self.graph or (self.device.startswith("cuda") and self.precision != "float16")
        _require(self, "graph", fine, f"off on device {self.device} in {self.precision}: CUDA only, and not in float16")
        rate = self.threshold_learning_rate
        _require(self, "threshold_learning_rate", rate is None or rate > 0, "positive, or none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierTraining(Training):
    """Labelled sequences, shuffled every epoch."""

    label_smoothing: float = 0.0
    """Share of the target that goes to all classes alike."""
    augment: bool = False
    """Crop, shift and rotate the frames of every training batch at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "label_smoothing", 0 <= self.label_smoothing <= 1, "between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageTraining(Training):
    """One long text, read in parallel columns, a stretch at a time."""

    evaluation_batch: int = 10
    test_batch: int = 1
    """Columns the test split is read in: one, so that every word is judged by all that came before it."""
    bptt: int = 70
    """Steps in a stretch, and so of back-propagation."""
    vary_bptt: bool = True
    """Draw the length of each stretch from N(bptt, 5), half as long in 5 % of cases; the learning rate follows."""
    activity_decay: float = 0.0
    """Weight of the mean square of the last layer's output, for dense baselines (AR)."""
    temporal_decay: float = 0.0
    """Weight of the mean square of its change from step to step (TAR)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bptt", "test_batch"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")


def _require(config: Any, name: str, fine: bool, accepted: str) -> None:
    if not fine:
        raise ValueError(f"{type(config).__name__}: {name} must be {accepted}, got {getattr(config, name)!r}")


def to_plain(config: Any) -> dict[str, Any]:
    """A config as JSON can hold it: dicts, lists, numbers, strings."""
    return dataclasses.asdict(config)


def from_plain(kind: type[T], plain: Mapping[str, Any]) -> T:
    """The config of type ``kind`` that :func:`to_plain` wrote down, through JSON or not."""
    hints = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    strangers = sorted(set(plain) - fields)
    if strangers:
        raise ValueError(f"{kind.__name__}: unknown field {strangers[0]!r}; known: {', '.join(sorted(fields))}")
    return kind(**{name: _value(hints[name], value) for name, value in plain.items()})


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value)
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return float(value) if hint is float else value
