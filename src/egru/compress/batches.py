"""Running a model over batches: the loss function of the user, the measurement of loss and activity, modes."""

import contextlib
import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from egru import format
from egru.activity import ActivityMonitor, ActivitySummary

Loss = Callable[[nn.Module, Any], Tensor]
"""A function of model and batch that runs the model and returns the loss to minimise, a mean over the batch."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Loss and activity of a model on some batches.

    Attributes:
        loss: Mean loss over the batches.
        activity: Events and operations.
    """

    loss: float
    activity: ActivitySummary

    @property
    def events(self) -> float:
        """Fraction of units and steps with an event."""
        return 1 - self.activity.activity_sparsity

    @property
    def macs(self) -> float:
        """Multiply-accumulates as a fraction of those of the dense model."""
        return self.activity.forward_macs / self.activity.dense_forward_macs

    def __str__(self) -> str:
        macs, dense = format.count(self.activity.forward_macs), format.count(self.activity.dense_forward_macs)
        sparsity = format.percent(1 - self.events)
        return f"loss {self.loss:.4f}, activity sparsity {sparsity}, {macs} of {dense} MACs per step"


def call(model: nn.Module, batch: Any, owner: str) -> Any:
    """Call a model with a batch: a tensor or packed sequence, or a tuple or list of arguments.

    Raises:
        TypeError: If ``forward`` takes another number of arguments.
    """
    if not isinstance(batch, tuple | list) or isinstance(batch, PackedSequence):
        return model(batch)
    try:
        inspect.signature(model.forward).bind(*batch)
    except ValueError:
        pass  # a scripted module has no signature
    except TypeError as error:
        raise TypeError(
            f"{owner}: {type(model).__name__}.forward cannot be called with the {len(batch)} values of a batch "
            f"({error}); pass the arguments of forward alone, or a loss that unpacks the batch"
        ) from None
    return model(*batch)


def check_batches(batches: Any, name: str, owner: str) -> None:
    """Raise an error if a tensor is passed instead of an iterable of batches."""
    if isinstance(batches, Tensor):
        raise TypeError(f"{owner}: {name} must be an iterable of batches, got a tensor; pass [tensor]")


def check_number(value: Any, name: str, owner: str) -> None:
    """Raise an error if a value is not a real number."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")


def check_loss(loss: Any, owner: str) -> None:
    """Raise an error if a loss is not a function of a model and a batch."""
    if isinstance(loss, nn.Module) or str(getattr(loss, "__module__", "")).startswith("torch."):
        name = type(loss).__name__ if isinstance(loss, nn.Module) else loss.__name__
        raise TypeError(
            f"{owner}: loss must be a function of a model and a batch, such as lambda model, batch: "
            f"{name}(model(batch[0]), batch[1]); got {name} itself"
        )
    if not callable(loss):
        raise TypeError(f"{owner}: loss must be a function of a model and a batch, got {type(loss).__name__}")


def loss_value(value: Any, owner: str) -> float:
    """Return a loss as a number.

    Raises:
        TypeError: If it is not a number or a tensor with one element.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, int | float):
        return float(value)
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"{owner}: loss must return one number, the mean over the batch; got {got}")


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Generator[None, None, None]:
    """Run a model in evaluation mode and without gradients inside the context."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def measure(model: nn.Module, batches: Iterable[Any], loss: Loss, owner: str) -> Measurement:
    """Return loss and activity of a model in evaluation mode.

    Args:
        model: Model with at least one event layer.
        batches: Batches for ``loss``. An iterator is used up.
        loss: Function of model and batch.
        owner: Name of the caller, for errors.

    Raises:
        TypeError: If the loss is not a function of model and batch that returns a number.
        ValueError: If there are no batches, or the loss is not finite.
    """
    check_loss(loss, owner)
    losses: list[float] = []
    with evaluation(model), ActivityMonitor(model) as monitor:
        for batch in batches:
            losses.append(loss_value(loss(model, batch), owner))
    if not losses:
        raise ValueError(
            f"{owner}: there are no batches; pass a list or a loader, not an iterator that was used before"
        )
    mean = sum(losses) / len(losses)
    if not math.isfinite(mean):
        raise ValueError(f"{owner}: the loss must be finite, got {mean}")
    return Measurement(mean, monitor.summary())
