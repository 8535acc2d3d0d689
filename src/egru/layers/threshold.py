"""Thresholds: how an unconstrained parameter becomes one, and how it starts."""

import dataclasses
import math

import torch
from torch import Tensor

KINDS = ("sigmoid", "abs", "clamp", "identity")
_DEFAULT_MEAN = {"sigmoid": 0.0, "abs": 0.0, "clamp": 0.5, "identity": 0.0}
_DEFAULT_STD = {"sigmoid": 1.0, "abs": 1.0, "clamp": 0.0, "identity": 0.0}


@dataclasses.dataclass(frozen=True)
class Threshold:
    r"""How a layer's thresholds are parametrised and initialised.

    ========== ==================== ===================================== =============================
    kind       threshold            the parameter starts as               used by
    ========== ==================== ===================================== =============================
    sigmoid    ``1/(1+exp(-tau))``  ``N(mean, std*sqrt(2))``, 0 and 1      the paper: sMNIST, language
    abs        ``|tau|``            ``N(mean, std*sqrt(2))``, 0 and 1      the paper: DVS gestures
    clamp      ``tau`` in [0, 1]    ``Beta(3m/(1-m), 3)``, mean m, 0.5     EvNN
    identity   ``tau``              ``N(mean, std*sqrt(2))``, 0 and 0      fixed values, limits, tests
    ========== ==================== ===================================== =============================

    Args:
        kind: one of the four.
        mean, std: of the initial distribution; None takes the defaults above. ``clamp`` has no ``std``.
        per_unit: one threshold per unit, or one for the whole layer (the paper's ablation "scalar").
        trainable: whether the parameter learns. Give thresholds their own optimiser group without weight decay.
    """

    kind: str = "sigmoid"
    mean: float | None = None
    std: float | None = None
    per_unit: bool = True
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Threshold: kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        for field in ("mean", "std"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise ValueError(f"Threshold: {field} must be a finite number or None, got {value!r}")
        if self.std is not None and self.std < 0:
            raise ValueError(f"Threshold: std must not be negative, got {self.std!r}")
        if self.kind == "clamp":
            if self.std is not None:
                raise ValueError(f"Threshold: kind='clamp' takes no std (its Beta has one shape), got {self.std!r}")
            if self.mean is not None and not 0 < self.mean < 1:
                raise ValueError(f"Threshold: kind='clamp' needs 0 < mean < 1, got {self.mean!r}")

    @classmethod
    def constant(cls, value: float, *, trainable: bool = False) -> "Threshold":
        """The same threshold for every unit, fixed unless ``trainable``."""
        return cls("identity", mean=value, std=0.0, trainable=trainable)

    def size(self, hidden_size: int) -> int:
        """Number of parameters for a layer of ``hidden_size`` units."""
        return hidden_size if self.per_unit else 1

    @torch.no_grad()
    def initialise_(self, parameter: Tensor) -> None:
        """Fill ``parameter`` with fresh unconstrained values."""
        mean = _DEFAULT_MEAN[self.kind] if self.mean is None else self.mean
        if self.kind == "clamp":
            beta = torch.distributions.Beta(3 * mean / (1 - mean), 3.0, validate_args=False)
            parameter.copy_(beta.sample(parameter.shape))
        else:
            std = _DEFAULT_STD[self.kind] if self.std is None else self.std
            parameter.normal_(mean, std * math.sqrt(2))

    def check_floor(self, floor: float) -> None:
        """Refuse what no threshold of this kind can be."""
        highest = {"sigmoid": "below 1", "clamp": "at most 1"}.get(self.kind)
        fits = 0 <= floor < math.inf and (highest is None or floor < 1 or (floor == 1 and self.kind == "clamp"))
        if not fits:
            limits = f"at least 0{' and ' + highest if highest else ''}"
            raise ValueError(f"Threshold: floor must be {limits} with kind={self.kind!r}, got {floor!r}")

    @torch.no_grad()
    def raise_(self, parameter: Tensor, floor: float) -> None:
        """Lift thresholds below ``floor`` to it; the others stay."""
        self.check_floor(floor)
        match self.kind:
            case "sigmoid":
                parameter.clamp_(min=math.log(floor / (1 - floor)) if floor else -math.inf)
            case "abs":
                parameter.copy_(torch.copysign(parameter.abs().clamp_(min=floor), parameter))
            case _:
                parameter.clamp_(min=floor)

    def constrain(self, parameter: Tensor, hidden_size: int) -> Tensor:
        """The thresholds themselves, ``(hidden_size,)``, differentiable."""
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
