"""Training settings: frozen dataclasses that are validated when they are created. Each field is a CLI option."""

import dataclasses
import typing
from typing import Any, Literal

import torch

_PRUNING_OPTIONS = ("block", "pruning_scope", "pruning_share")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Settings that all training runs share.

    Raises:
        ValueError: If a value is not accepted; the message names the field and the accepted values.

    Use :class:`ClassifierTraining` or :class:`LanguageTraining`.

    Example:
        >>> training = egru.training.ClassifierTraining(epochs=20, optimiser="adamw", schedule="cosine", clip=1.0)
    """

    epochs: int = 100
    """Number of passes over the training split."""
    batch: int = 100
    """Sequences per step, in each process."""
    evaluation_batch: int = 500
    """Sequences evaluated in parallel on the validation and test split."""
    optimiser: Literal["adam", "adamw", "ntavsgd"] = "adam"
    """ntavsgd: SGD that starts to average the weights when validation stops improving."""
    learning_rate: float = 1e-3
    """Initial learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the moment estimates (adam, adamw)."""
    weight_decay: float = 0.0
    """Weight decay of all parameters but the thresholds: decoupled in adamw, L2 in the others."""
    patience: int = 5
    """Start averaging after this many epochs without improvement (ntavsgd)."""
    clip: float | None = None
    """Maximum norm of the gradient. If None, gradients are not clipped."""
    schedule: Literal["constant", "cosine", "step", "one-cycle"] = "constant"
    """Schedule of the learning rate."""
    constant_share: float = 0.5
    """Fraction of the epochs before the learning rate starts to fall (cosine)."""
    final_factor: float = 0.1
    """Final learning rate as a fraction of the initial one (cosine)."""
    step_epochs: int = 100
    """Epochs between two reductions of the learning rate (step)."""
    step_factor: float = 0.8
    """Factor of each reduction (step)."""
    threshold_learning_rate: float | None = None
    """Learning rate of the thresholds. If None, that of the other parameters."""
    freeze_thresholds: bool = False
    """Do not train the thresholds."""
    rate_loss: float = 0.0
    """Weight of the loss on event rates above 5 % (w_reg in the paper)."""
    state_loss: float = 0.0
    """Weight of the loss that pulls states below their thresholds (w_v in the paper)."""
    squared_rate: bool = False
    """Square the rate loss, as EvNN does."""
    weight_sparsity: float = 0.0
    """Set this fraction of the weights to zero, those with the smallest magnitudes, more of them from epoch to epoch
    (event cells)."""
    block: int = 1
    """Number of consecutive outputs whose weights are set to zero together; 8 and 16 match the engine's vectors."""
    pruning_scope: Literal["global", "layer"] = "global"
    """Whether the weights of the whole network that are smallest relative to their matrix are set to zero, or the same
    fraction of every matrix."""
    pruning_share: float = 0.75
    """Fraction of the epochs after which the final weight sparsity is reached."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of matrix products under autocast; weights and states stay in float32. float16 requires cuda, scales
    the loss and skips steps whose gradient overflows."""
    graph: bool = False
    """Record forward and backward pass of each batch shape as a CUDA graph, which removes launch overhead."""
    exchange: Literal["float32", "bfloat16"] = "float32"
    """Precision in which processes (torchrun) exchange gradients. bfloat16 halves the traffic."""
    device: str = "cpu"
    """Device to train on, such as cpu or cuda."""
    seed: int = 0
    """Seed of the random generators."""
    save_every: int = 1
    """Epochs between two checkpoints. Validation chooses among the saved epochs."""
    diagnose: bool = True
    """Measure the growth of gradients over time after every epoch, and warn if they explode (egru)."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard into the run folder."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "evaluation_batch", "patience", "step_epochs", "save_every", "block"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "learning_rate", self.learning_rate > 0, "positive")
        _require(self, "weight_decay", self.weight_decay >= 0, "zero or more")
        _require(self, "clip", self.clip is None or self.clip > 0, "positive, or none")
        _require(self, "weight_sparsity", 0 <= self.weight_sparsity < 1, "in [0, 1)")
        for field in (field for field in dataclasses.fields(self) if field.name in _PRUNING_OPTIONS):
            is_used = self.weight_sparsity > 0 or getattr(self, field.name) == field.default
            _require(self, field.name, is_used, f"{field.default} unless weight_sparsity is positive")
        for name in ("constant_share", "final_factor", "step_factor", "pruning_share"):
            _require(self, name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("optimiser", "schedule", "pruning_scope", "precision", "exchange"):
            choices = typing.get_args(typing.get_type_hints(type(self))[name])
            _require(self, name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        _require(self, "device", _is_device(self.device), "a device of torch, such as cpu or cuda")
        on_cuda = self.device.startswith("cuda")
        accepted = f"float32 or bfloat16 on device {self.device} (float16 requires cuda)"
        _require(self, "precision", self.precision != "float16" or on_cuda, accepted)
        accepted = f"off on device {self.device} in {self.precision} (graphs require cuda, and not float16)"
        _require(self, "graph", not self.graph or (on_cuda and self.precision != "float16"), accepted)
        rate = self.threshold_learning_rate
        _require(self, "threshold_learning_rate", rate is None or rate > 0, "positive, or none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierTraining(Training):
    """Settings for labelled sequences, which are shuffled in every epoch.

    Example:
        >>> training = egru.training.ClassifierTraining(epochs=20, optimiser="adamw", learning_rate=1e-3, clip=1.0)
    """

    label_smoothing: float = 0.0
    """Fraction of the target probability that is spread over all classes."""
    augment: bool = False
    """Crop, shift and rotate the frames of each training batch at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "label_smoothing", 0 <= self.label_smoothing <= 1, "between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageTraining(Training):
    """Settings for a text that is read in parallel columns, one segment per step.

    Example:
        >>> training = egru.training.LanguageTraining(epochs=20, batch=64, optimiser="ntavsgd", learning_rate=30)
    """

    evaluation_batch: int = 10
    """Columns of the validation split."""
    test_batch: int = 1
    """Columns of the test split. With one, every word is predicted from all words before it."""
    bptt: int = 70
    """Steps per segment, which is also the length of back-propagation."""
    vary_bptt: bool = True
    """Draw the length of each segment from N(bptt, 5), with half the mean in 5 % of cases; scale the learning rate
    with it."""
    activity_decay: float = 0.0
    """Weight of the mean square of the last layer's output, for dense baselines (AR)."""
    temporal_decay: float = 0.0
    """Weight of the mean square of the output's change per step, for dense baselines (TAR)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bptt", "test_batch"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def _require(config: Any, name: str, is_valid: bool, accepted: str) -> None:
    if not is_valid:
        raise ValueError(f"{type(config).__name__}: {name} must be {accepted}, got {getattr(config, name)!r}")
