"""Statistics of one epoch of training: losses, gradient norms, waiting time, and checks that they are finite."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from egru.activity import Stability
from egru.training import distributed
from egru.training.records import TrainingMetrics
from egru.training.run import RunError

EXPLODED = 1e3
"""Gradient norm above which a warning is logged; only recurrent gradients reach it."""

T = TypeVar("T")


class EpochStatistics:
    """Collects the statistics of one epoch, and stops training if the loss or a gradient is not finite.

    Values stay on the device. They are checked after every step on the CPU and every 50 steps on a GPU, where reading
    them makes the host wait.

    Args:
        epoch: Number of the epoch, for error messages.
        saved_epoch: Epoch of the last checkpoint, for error messages.
        device: Device of the model.
        overflows: Whether gradients may overflow because the loss is scaled (float16). The scaler skips such
            steps, and only :attr:`patience` of them in a row raise an error.
    """

    patience = 30
    """Consecutive overflows that stop training. By then the scale has fallen from 2^16 to 2^-14."""

    def __init__(self, epoch: int, saved_epoch: int, device: torch.device, overflows: bool = False) -> None:
        self.epoch, self.saved_epoch, self.overflows = epoch, saved_epoch, overflows
        self.check_every = 1 if device.type == "cpu" else 50
        self.losses: list[Tensor] = []
        self.objectives: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.targets: list[int] = []
        self.checked, self.waited = 0, 0.0

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return len(self.losses)

    def time_loading(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, and add the time they take to load to :attr:`waited`."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def add(self, loss: Tensor, objective: Tensor, norm: Tensor, targets: int) -> None:
        """Add a step: its loss, its differentiated objective, its gradient norm and its number of targets."""
        self.losses.append(loss)
        self.objectives.append(objective)
        self.norms.append(norm)
        self.targets.append(targets)
        if len(self.losses) % self.check_every == 0:
            self.check()

    def check(self) -> None:
        """Raise :class:`RunError` if a value since the last check is not finite."""
        checked = {"loss": self.objectives} | ({} if self.overflows else {"gradient norm": self.norms})
        new = [value for values in checked.values() for value in values[self.checked :]]
        if new and not torch.isfinite(torch.stack(new)).all():  # the only place where the host waits for the device
            for name, values in checked.items():
                for step, value in enumerate(values[self.checked :], self.checked + 1):
                    if not torch.isfinite(value):
                        self._stop(name, value, step)
        last = self.norms[-self.patience :]
        if self.overflows and len(last) == self.patience and not torch.isfinite(torch.stack(last)).any():
            self._stop(f"gradient norm (for {self.patience} steps)", last[-1], len(self.norms))
        self.checked = len(self.losses)

    def _stop(self, name: str, value: Tensor, step: int) -> NoReturn:
        raise RunError(
            f"{name} is {value.item()} in epoch {self.epoch}, step {step}: training stopped, "
            f"the checkpoint of epoch {self.saved_epoch} is the last good state"
        )

    def summary(self) -> TrainingMetrics:
        """Return the statistics of the epoch. The loss is the mean over all processes.

        Raises:
            RunError: If a value is not finite.
        """
        self.check()
        losses, norms = torch.stack(self.losses).double().cpu(), torch.stack(self.norms).double().cpu()
        targets = torch.tensor(self.targets, dtype=torch.float64)
        weighted, targets = distributed.all_sum(losses * targets), distributed.all_sum(targets)
        finite = norms.isfinite()
        norms = norms[finite] if finite.any() else norms.new_zeros(1)
        return TrainingMetrics(
            loss=(weighted.sum() / targets.sum()).item(),
            gradient_norm=norms.median().item(),
            gradient_norm_p99=norms.quantile(0.99).item(),
            gradient_norm_max=norms.max().item(),
            steps=len(self.losses),
            waited=self.waited,
            skipped=int((~finite).sum()) if self.overflows else None,
        )


def explosion_warning(epoch: int, stabilities: Sequence[Stability], metrics: TrainingMetrics) -> str:
    """Return a warning with advice if gradients explode over time, or an empty string."""
    worst = max(stabilities, key=lambda layer: layer.adjoint_peak, default=None)
    p99 = metrics.gradient_norm_p99 or 0.0
    if not (p99 > EXPLODED or (worst is not None and worst.explodes)):
        return ""
    warning = (
        f"warning: gradients explode in epoch {epoch}: their norm has a median of {metrics.gradient_norm:.2g} and a "
        f"99th percentile of {p99:.2g}. "
    )
    if worst is None:
        return f"{warning}Try a smaller clip or a lower learning rate"
    growth = f"e^{worst.adjoint_peak:.1f}-fold" if math.isfinite(worst.adjoint_peak) else "beyond float32"
    return (
        f"{warning}In {worst.name} a gradient grows {growth} on its way back through time; "
        f"{100 * worst.diagonal_above_one:.1f} % of the factors between successive states of a unit are above 1. "
        "Try reset none, surrogate.height 0.3 or less, surrogate.bounded, or a lower learning rate "
        "(docs/results/smnist-study.md)"
    )
