"""Budgets for the activity of a model, and a schedule that raises thresholds during training until one is met."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from egru.activity import ActivityMonitor, ActivitySummary
from egru.compress.batches import check_number
from egru.compress.ranges import Ranges
from egru.layers import Record, event_directions, event_layers, record

LOWEST_LEVEL = -3.0
"""Level at which units with positive events are active at nearly every step."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a sparse model may cost. Exactly one of the first three arguments is given.

    Args:
        activity: Fraction of units and steps with an event, in (0, 1).
        macs: Multiply-accumulates as a fraction of those of the dense model, in (0, 1).
        within: Accepted loss of ``metric``, in its unit: as few events as possible are kept.
        metric: Function of a model that returns a number to keep high, such as the accuracy in percent.

    Raises:
        TypeError: If a limit is not a number, or the metric is not a function.
        ValueError: If the arguments are out of range or do not fit together.

    Example:
        >>> from egru.compress import Budget
        >>> Budget(macs=0.1)
        Budget(activity=None, macs=0.1, within=None, metric=None)
    """

    activity: float | None = None
    macs: float | None = None
    within: float | None = None
    metric: Callable[[nn.Module], float] | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("activity", "macs", "within")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"Budget: exactly one of activity, macs and within is required, got {given or 'none'}")
        for name, value in given.items():
            check_number(value, name, "Budget")
        check_metric(self.metric, "Budget")
        for name in given.keys() & {"activity", "macs"}:
            if not 0 < given[name] < 1:
                raise ValueError(f"Budget: {name} must be in (0, 1), got {given[name]!r}")
        if self.within is not None and not self.within >= 0:
            raise ValueError(f"Budget: within must not be negative, got {self.within!r}")
        if self.within is not None and self.metric is None:
            raise ValueError("Budget: within requires a metric, a function of the model that returns a number")

    def measure(self, summary: ActivitySummary) -> float:
        """Return the quantity that the budget limits."""
        if self.macs is not None:
            return summary.forward_macs / summary.dense_forward_macs
        return 1 - summary.activity_sparsity

    @property
    def limit(self) -> float | None:
        """Largest accepted value of :meth:`measure`, or None with ``within``."""
        return self.activity if self.macs is None else self.macs


def check_metric(metric: Any, owner: str) -> None:
    """Raise an error if a metric is neither a function nor None."""
    if metric is not None and not callable(metric):
        raise TypeError(
            f"{owner}: metric must be a function of the model that returns a number, got {type(metric).__name__}"
        )


class ThresholdSchedule:
    """Raises the thresholds of a model during training, so that its activity follows a schedule.

    The activity falls from its value at the first step to the target along a geometric curve during the first part of
    training and stays there. After every step, all thresholds are moved by a common multiple of the range of their
    units, in proportion to the deviation from the schedule. Thresholds may be trained at the same time. If the activity
    is at or below the target from the start, thresholds are raised only when it exceeds the target. The context may be
    left for evaluation and entered again.

    Ranges are measured on the first batch. If it is small, or some layers do not run or some states do not change in
    it, the following batches are added until they do.

    Args:
        model: Model with at least one event layer, for example a result of :func:`egru.convert`.
        target: Final activity, or a :class:`Budget` of activity or MACs.
        steps: Number of training steps.
        ramp: Fraction of the steps during which the activity falls. Default: 0.7.
        gain: Relative change of the thresholds per relative deviation. Default: 0.3.

    Raises:
        ValueError: If an argument is out of range, or the model has no event layer.

    Example:
        >>> import torch, egru
        >>> model = egru.convert(torch.nn.GRU(4, 32))
        >>> with egru.compress.ThresholdSchedule(model, target=0.2, steps=100) as schedule:
        ...     for _ in range(100):
        ...         y, _ = model(torch.randn(20, 8, 4))
        ...         # loss.backward() and the optimiser's step go here
        ...         schedule.step()
        >>> bool(schedule.measured < 0.3)
        True
    """

    def __init__(
        self, model: nn.Module, target: float | Budget, steps: int, *, ramp: float = 0.7, gain: float = 0.3
    ) -> None:
        self.budget = target if isinstance(target, Budget) else Budget(activity=target)
        if self.budget.limit is None:
            raise ValueError("ThresholdSchedule: target must be a budget of activity or MACs, got one of a metric")
        if not steps >= 1:
            raise ValueError(f"ThresholdSchedule: steps must be at least 1, got {steps!r}")
        if not 0 <= ramp <= 1:
            raise ValueError(f"ThresholdSchedule: ramp must be in [0, 1], got {ramp!r}")
        if not gain > 0:
            raise ValueError(f"ThresholdSchedule: gain must be positive, got {gain!r}")
        if not any(True for _ in event_layers(model)):
            raise ValueError(
                f"ThresholdSchedule: the model must have an event layer, got {type(model).__name__}; "
                "egru.convert(model) adds them"
            )
        self.model, self.steps, self.ramp, self.gain = model, steps, ramp, gain
        self.done = 0
        self.measured = self.goal = math.nan
        self._start = math.nan
        self._raised = math.inf  # how far thresholds may be lowered again
        self._monitor = ActivityMonitor(model)
        self._ranges = Ranges(model)
        self._context: contextlib.ExitStack | None = None
        self._records: list[Record] = []

    def __enter__(self) -> Self:
        if self._context is not None:
            raise RuntimeError("ThresholdSchedule: already active; leave the context before entering it again")
        self._context = contextlib.ExitStack()
        self._context.enter_context(self._monitor)
        if not self._ranges.complete:
            self._records = self._context.enter_context(record(self.model))
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._context is not None
        self._context.close()
        self._context = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the thresholds, given the activity of the forward passes since the last call.

        Raises:
            RuntimeError: If the model did not run inside the context.
        """
        if self._context is None:
            raise RuntimeError("ThresholdSchedule: step() must be called inside the context: with schedule: ...")
        summary = self._monitor.summary()
        self._monitor.reset()
        self.measured = self.budget.measure(summary)
        limit = self.budget.limit
        assert limit is not None
        if not self.done:
            self._start = min(0.999, max(self.measured, limit))
            self._raised = 0.0 if self.measured <= limit else math.inf
        if not self._ranges.complete:
            self._measure_ranges()
        self.done += 1
        fraction = min(1.0, self.done / max(1.0, self.ramp * self.steps))
        self.goal = min(self._start, math.exp((1 - fraction) * math.log(self._start) + fraction * math.log(limit)))
        deviation = math.log(max(self.measured, 1e-4) / self.goal)
        amount = max(-0.1, min(0.1, self.gain * deviation), -self._raised)
        self._raised += amount
        self.shift(amount)

    def shift(self, relative: float) -> None:
        """Move all thresholds by ``relative`` times their mean level, in units of the range of each unit."""
        for label, layer, direction in event_directions(self.model):
            values = self._ranges.scales(label)
            if values is None:  # this layer has not run yet
                continue
            theta, positive = layer.weights(direction).theta, layer.events == "positive"
            level = (theta / values.clamp(min=1e-6)).clamp(min=LOWEST_LEVEL).mean().item()
            # Levels of positive events start below 0. They move by a tenth of a range per step at most.
            amount = relative * (1.0 if positive else max(level, 0.1))
            lowest = LOWEST_LEVEL * values if positive else torch.zeros_like(values)
            theta = torch.maximum(theta, lowest) + amount * values
            layer.threshold_config.assign_(layer.threshold_parameters()[direction.name], torch.maximum(theta, lowest))

    def _measure_ranges(self) -> None:
        """Add the forward passes since the last step to the ranges."""
        self._ranges.add(self._records)
        self._records.clear()
        if self._ranges.complete:
            assert self._context is not None
            self._context.close()  # stop recording states, keep counting
            self._context = contextlib.ExitStack()
            self._context.enter_context(self._monitor)
