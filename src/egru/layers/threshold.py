"""Parametrisation and initialisation of thresholds."""

import dataclasses
import math

import torch
from torch import Tensor

from egru.types import THRESHOLD_KINDS, ThresholdKind

_DEFAULT_MEAN = {"sigmoid": 0.0, "abs": 0.0, "clamp": 0.5, "identity": 0.0}
_DEFAULT_STD = {"sigmoid": 1.0, "abs": 1.0, "clamp": 0.0, "identity": 0.0}
BELOW_ALL_STATES = -1e4
"""A threshold that states exceed from any sensible initial state; representable in float16."""


@dataclasses.dataclass(frozen=True)
class Threshold:
    r"""Parametrisation and initialisation of a layer's thresholds.

    A layer trains an unconstrained parameter ``tau``, and ``kind`` maps it to the threshold ``theta``. The parameter
    is initialised from ``N(mean, std * sqrt(2))``, where the second argument is the standard deviation, or for
    ``"clamp"`` from a Beta distribution with the given mean.

    ========== =================== ============ =========== ============================
    kind       threshold           default mean default std used by
    ========== =================== ============ =========== ============================
    sigmoid    ``1/(1+exp(-tau))`` 0            1           the paper: sMNIST, language
    abs        ``|tau|``           0            1           the paper: DVS gestures
    clamp      ``tau`` in [0, 1]   0.5          fixed       EvNN
    identity   ``tau``             0            0           fixed thresholds, limits, tests
    ========== =================== ============ =========== ============================

    Thresholds usually train best in a separate optimiser group without weight decay.

    Args:
        kind: Mapping from the trained parameter to the threshold.
        mean: Mean of the initial distribution. If None, the default of ``kind``. With ``"clamp"`` it lies in (0, 1),
            and thresholds are drawn from ``Beta(3 * mean / (1 - mean), 3)``.
        std: Spread of the initial distribution. If None, the default of ``kind``. Not accepted with ``"clamp"``.
        per_unit: Whether every unit has a separate threshold. If False, the units of a layer share one (the paper's
            "scalar" ablation).
        trainable: Whether thresholds are trained.

    Raises:
        ValueError: If ``kind`` is unknown, or ``mean`` or ``std`` do not fit it.

    Example:
        >>> import egru
        >>> layer = egru.EGRU(4, 8, threshold=egru.Threshold("abs", mean=1.0, std=0.1))
        >>> layer.thresholds()["l0"].shape
        torch.Size([8])
        >>> egru.EGRU(4, 2, threshold=egru.Threshold.constant(0.25)).thresholds()["l0"].tolist()
        [0.25, 0.25]
    """

    kind: ThresholdKind = "sigmoid"
    mean: float | None = None
    std: float | None = None
    per_unit: bool = True
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.kind not in THRESHOLD_KINDS:
            raise ValueError(f"Threshold: kind must be one of {', '.join(THRESHOLD_KINDS)}; got {self.kind!r}")
        for field in ("mean", "std"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise ValueError(f"Threshold: {field} must be a finite number or None, got {value!r}")
        if self.std is not None and self.std < 0:
            raise ValueError(f"Threshold: std must not be negative, got {self.std!r}")
        if self.kind == "clamp":
            if self.std is not None:
                raise ValueError(f"Threshold: std is not supported with kind='clamp', got {self.std!r}")
            if self.mean is not None and not 0 < self.mean < 1:
                raise ValueError(f"Threshold: kind='clamp' requires 0 < mean < 1, got {self.mean!r}")

    @classmethod
    def constant(cls, value: float, *, trainable: bool = False) -> "Threshold":
        """Return a configuration in which all thresholds start at ``value``.

        Args:
            value: The threshold.
            trainable: Whether it is trained. Default: False.
        """
        return cls("identity", mean=value, std=0.0, trainable=trainable)

    def size(self, hidden_size: int) -> int:
        """Return the number of threshold parameters of a layer with ``hidden_size`` units."""
        return hidden_size if self.per_unit else 1

    @torch.no_grad()
    def initialise_(self, parameter: Tensor) -> None:
        """Fill ``parameter`` with new initial values, in place."""
        mean = _DEFAULT_MEAN[self.kind] if self.mean is None else self.mean
        if self.kind == "clamp":
            beta = torch.distributions.Beta(3 * mean / (1 - mean), 3.0, validate_args=False)
            parameter.copy_(beta.sample(parameter.shape))
        else:
            std = _DEFAULT_STD[self.kind] if self.std is None else self.std
            parameter.normal_(mean, std * math.sqrt(2))

    def initial_value(self) -> float | None:
        """Return the value that all thresholds of ``"identity"`` or ``"abs"`` start at, or None if they are drawn."""
        std = _DEFAULT_STD[self.kind] if self.std is None else self.std
        if std or self.kind not in ("identity", "abs"):
            return None
        mean = self.mean or 0.0
        return abs(mean) if self.kind == "abs" else mean

    def check_floor(self, floor: float) -> None:
        """Check that a threshold of this kind can take the value ``floor``.

        Raises:
            ValueError: If it cannot.
        """
        fits, limits = {
            "sigmoid": (0 <= floor < 1, "at least 0 and below 1"),
            "abs": (0 <= floor < math.inf, "at least 0"),
            "clamp": (0 <= floor <= 1, "at least 0 and at most 1"),
            "identity": (math.isfinite(floor), "finite"),
        }[self.kind]
        if not fits:
            raise ValueError(f"Threshold: floor must be {limits} with kind={self.kind!r}, got {floor!r}")

    @torch.no_grad()
    def raise_(self, parameter: Tensor, floor: float | Tensor) -> None:
        """Raise thresholds below ``floor`` to it, in place; the others do not change.

        Args:
            parameter: Unconstrained parameter.
            floor: Smallest threshold afterwards: one number, or one per element of ``parameter``.

        Raises:
            ValueError: If a threshold of this kind cannot take the value ``floor``.
        """
        floor = torch.as_tensor(floor, dtype=parameter.dtype, device=parameter.device)
        for value in (floor.min().item(), floor.max().item()):
            self.check_floor(value)
        match self.kind:
            case "sigmoid":
                parameter.clamp_(min=torch.logit(floor))
            case "abs":
                parameter.copy_(torch.copysign(parameter.abs().clamp_(min=floor), parameter))
            case _:
                parameter.clamp_(min=floor)

    @torch.no_grad()
    def assign_(self, parameter: Tensor, theta: Tensor) -> None:
        """Set thresholds to ``theta``, in place, or to the closest values that this kind can take.

        Args:
            parameter: Unconstrained parameter.
            theta: Thresholds, one per unit. With ``per_unit=False`` their mean is used.
        """
        theta = theta if self.per_unit else theta.mean().expand_as(parameter)
        match self.kind:
            case "sigmoid":
                parameter.copy_(torch.logit(theta, eps=1e-6))
            case "abs":
                parameter.copy_(theta.clamp(min=0))
            case "clamp":
                parameter.copy_(theta.clamp(0, 1))
            case _:
                parameter.copy_(theta)

    def constrain(self, parameter: Tensor, hidden_size: int) -> Tensor:
        """Return the thresholds, ``(hidden_size,)``, as a differentiable function of the parameter."""
        match self.kind:
            case "sigmoid":
                theta = torch.sigmoid(parameter)
            case "abs":
                theta = parameter.abs()
            case "clamp":
                theta = parameter.clamp(0, 1)
            case _:
                theta = parameter
        return theta if self.per_unit else theta.expand(hidden_size)
