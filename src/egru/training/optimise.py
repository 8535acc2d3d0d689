"""Optimisers, parameter groups and learning-rate schedules."""

# pyright: reportPrivateImportUsage=false
# torch._foreach_*: one launch for a list of tensors, as in torch.optim; they have no public name.

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from egru.layers import event_layers
from egru.training.config import Training


def learning_rate_factor(training: Training, progress: float) -> float:
    """Return the factor on the learning rate after a number of epochs.

    Args:
        training: Settings of the schedule.
        progress: Number of epochs done, including fractions.

    Returns:
        The factor, 1 at the start of every schedule except ``"one-cycle"``.

    Example:
        >>> training = egru.training.ClassifierTraining(epochs=10, schedule="step", step_epochs=5, step_factor=0.1)
        >>> [egru.training.learning_rate_factor(training, epoch) for epoch in (0, 5)]
        [1.0, 0.1]
    """
    match training.schedule:
        case "cosine":
            start = training.constant_share * training.epochs
            if progress <= start:
                return 1.0
            fall = 0.5 * (1 + math.cos(math.pi * (progress - start) / (training.epochs - start)))
            return training.final_factor + (1 - training.final_factor) * fall
        case "step":
            return training.step_factor ** int(progress // training.step_epochs)
        case "one-cycle":  # rises in the first tenth, then falls to almost zero
            share = progress / training.epochs
            low, high = (1 / 25, 1.0) if share < 0.1 else (1 / 25e4, 1.0)
            phase = 1 - share / 0.1 if share < 0.1 else (share - 0.1) / 0.9
            return low + (high - low) * 0.5 * (1 + math.cos(math.pi * phase))
        case _:
            return 1.0


def parameter_groups(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """Return the optimiser's parameter groups: thresholds are separate, without weight decay.

    Frozen thresholds are left out and no longer require a gradient.
    """
    thresholds: dict[int, nn.Parameter] = {}
    for _, layer in event_layers(model):
        thresholds |= {id(parameter): parameter for parameter in layer.threshold_parameters().values()}
    if training.freeze_thresholds:
        for parameter in thresholds.values():
            parameter.requires_grad_(False)
    rate = training.learning_rate
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in thresholds]
    groups: list[dict[str, Any]] = [{"params": others, "base_lr": rate, "weight_decay": training.weight_decay}]
    trainable = [p for p in thresholds.values() if p.requires_grad]
    if trainable:
        threshold_rate = training.threshold_learning_rate or rate
        groups.append({"params": trainable, "base_lr": threshold_rate, "weight_decay": 0.0})
    return groups


def make_optimiser(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """Return the optimiser of the config, fused so that the host does not wait for the device.

    Args:
        model: Model whose parameters are trained. Thresholds form a separate group.
        training: Optimiser, learning rates and weight decay.

    Returns:
        The optimiser.

    Example:
        >>> model = egru.models.SequenceClassifier(1, 64, 10)
        >>> optimiser = egru.training.make_optimiser(model, egru.training.ClassifierTraining(learning_rate=3e-3))
    """
    groups = parameter_groups(model, training)
    match training.optimiser:
        case "adam":
            return torch.optim.Adam(groups, training.learning_rate, training.betas, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, training.learning_rate, training.betas, fused=True)
        case _:
            return AveragedSGD(groups, training.learning_rate, patience=training.patience)


def make_scaler(training: Training) -> torch.amp.GradScaler:
    """Return a gradient scaler for float16, which keeps small gradients above zero; disabled for other precisions."""
    return torch.amp.GradScaler(torch.device(training.device).type, enabled=training.precision == "float16")


def set_learning_rate(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each group to ``factor`` times its base rate."""
    for group in optimiser.param_groups:
        group["lr"] = group["base_lr"] * factor


class AveragedSGD(torch.optim.Optimizer):
    """SGD that starts to average its iterates when validation stops improving (NT-AvSGD; Merity et al., 2018).

    Averaging starts when the validation loss exceeds the best loss from more than ``patience`` epochs before.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        weight_decay: L2 weight decay.
        patience: Epochs without improvement before averaging starts.

    Example:
        >>> optimiser = egru.training.AveragedSGD(model.parameters(), lr=30.0)
        >>> scores = task.evaluate(model, "validation")
        >>> optimiser.epoch_done(scores.loss)  # after each epoch
        >>> with optimiser.averaged():
        ...     scores = task.evaluate(model, "validation")
    """

    def __init__(self, params: Any, lr: float, *, weight_decay: float = 0.0, patience: int = 5) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "averaging": False})
        self.param_groups[0] |= {"patience": patience, "losses": []}

    @property
    def averaging(self) -> bool:
        """Whether averaging has started."""
        return self.param_groups[0]["averaging"]

    def epoch_done(self, validation_loss: float) -> None:
        """Record the validation loss of an epoch, and start averaging if it has stopped improving."""
        first = self.param_groups[0]
        earlier = first["losses"][: -first["patience"]]
        if not self.averaging and earlier and validation_loss > min(earlier):
            for group in self.param_groups:
                group["averaging"] = True
        first["losses"] = [*first["losses"], validation_loss]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if closure is not None:
            raise TypeError("AveragedSGD.step: closure is not supported; compute the loss before the step")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-group["lr"])
            if group["averaging"]:
                states = [self.state[p] for p in parameters]
                for parameter, state in zip(parameters, states, strict=True):
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("average", torch.zeros_like(parameter))
                averages = [state["average"] for state in states]
                steps = torch._foreach_sub(parameters, averages)
                torch._foreach_mul_(steps, [1 / state["count"] for state in states])
                torch._foreach_add_(averages, steps)

    def averages(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return pairs of a parameter and the average of its iterates; empty before averaging starts."""
        return [
            (p, self.state[p]["average"]) for g in self.param_groups for p in g["params"] if "average" in self.state[p]
        ]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights by their averages while the context is active."""
        pairs = self.averages()
        weights = [parameter.detach().clone() for parameter, _ in pairs]
        with torch.no_grad():
            for parameter, average in pairs:
                parameter.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for (parameter, _), value in zip(pairs, weights, strict=True):
                    parameter.copy_(value)


def averaged(optimiser: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Return a context with the weights to evaluate: the averages if the optimiser keeps them."""
    return optimiser.averaged() if isinstance(optimiser, AveragedSGD) else contextlib.nullcontext()


def gradient_norm(parameters: list[nn.Parameter], clip: float | None) -> Tensor:
    """Return the norm of the gradient over all parameters, then clip the gradient in place to ``clip``."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return norm
