"""Fine-tuning of a model with event layers to a budget of activity."""

import contextlib
import copy
import dataclasses
import itertools
import math
import numbers
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from egru.activity import ActivityLoss
from egru.compress.batches import (
    Loss,
    Measurement,
    check_batches,
    check_loss,
    check_number,
    evaluation,
    loss_value,
    measure,
)
from egru.compress.distillation import Distillation
from egru.compress.schedule import Budget, ThresholdSchedule, check_metric
from egru.compress.thresholds import raise_thresholds, restored_thresholds
from egru.layers import event_layers

PASSES = 50
"""Largest number of passes over the data that look for thresholds which meet the budget after training."""
EVEN_PASSES = 20
"""After these, thresholds are raised twice as fast in every pass."""
STAGE_FACTOR = 0.75
"""Reduction of the activity from one stage to the next in the search for the sparsest model within a metric."""


@dataclasses.dataclass(frozen=True)
class Sparsification:
    """Result of :func:`sparsify`.

    Attributes:
        before: Loss and activity on the data before.
        after: Loss and activity on the data with the returned parameters.
        metric_before: Metric of the teacher, or of the model before if there is none; None without a metric.
        metric_after: Metric with the returned parameters, or None.
        epochs: Number of epochs that were trained.
        seconds: Duration.
    """

    before: Measurement
    after: Measurement
    metric_before: float | None
    metric_after: float | None
    epochs: int
    seconds: float

    def __str__(self) -> str:
        metrics = ("", "") if self.metric_before is None else (f"{self.metric_before:.2f}", f"{self.metric_after:.2f}")
        rows = [
            ("", "loss", "metric", "activity", "MACs of dense"),
            ("before", f"{self.before.loss:.4f}", metrics[0], f"{self.before.events:.3f}", f"{self.before.macs:.3f}"),
            ("after", f"{self.after.loss:.4f}", metrics[1], f"{self.after.events:.3f}", f"{self.after.macs:.3f}"),
        ]
        lines = ["  ".join([row[0].ljust(6), *(cell.rjust(13) for cell in row[1:])]) for row in rows]
        return "\n".join([*lines, f"{self.epochs} epochs, {self.seconds:.0f} s"])


def sparsify(
    model: nn.Module,
    data: Iterable[Any],
    loss: Loss,
    target: float | Budget,
    *,
    teacher: nn.Module | None = None,
    epochs: int = 100,
    lr: float = 4e-3,
    ramp: float = 0.7,
    rate: float = 4.0,
    distillation: Distillation | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    patience: int | None = None,
    optimiser: torch.optim.Optimizer | None = None,
    clip: float | None = 1.0,
    log: Callable[[str], None] = print,
) -> Sparsification:
    """Fine-tune a model until its activity meets a budget, in place. If this fails, the model does not change.

    A :class:`ThresholdSchedule` lowers the activity to the target during the first part of training; weights and
    thresholds are trained throughout. The loss contains the event rate, so that the network learns to do without events
    instead of losing them. Afterwards thresholds are adjusted until the budget holds in evaluation mode on
    ``data``. With a metric, the parameters of the best epoch that meets the budget are kept.

    With ``Budget(within=..., metric=...)``, the activity is lowered by a quarter per stage of ``epochs`` epochs. The
    parameters of the last stage whose metric is within the limit are kept.

    Args:
        model: Model with event layers, for example a result of :func:`egru.convert`.
        data: Batches for ``loss``, iterated once per epoch: a ``DataLoader`` or a list.
        loss: Function of model and batch that runs the model and returns the loss.
        target: Largest final activity as a number, or a :class:`Budget` of activity, MACs or a metric.
        teacher: The dense original, for distillation of its outputs as scores of classes in the last dimension. For
            other outputs, pass a ``distillation`` with ``compare="values"`` or ``dim``. If None, no distillation.
        epochs: Number of epochs, or of epochs per stage. Default: 100.
        lr: Peak learning rate of Adam, in a one-cycle schedule. Ignored with ``optimiser``. Default: 4e-3.
        ramp: Fraction of training during which the activity falls. Default: 0.7.
        rate: Weight of the event rate in the loss, see :class:`egru.ActivityLoss`. The default suits a cross-entropy in
            nats; scale it like the loss. Default: 4.
        distillation: Distillation with other options, instead of ``teacher``.
        metric: Function of the model that returns a number, called in evaluation mode after every epoch; higher is
            better.
        patience: Stop after this many epochs without improvement since the budget was met first. Requires ``metric``.
            If None, train all epochs.
        optimiser: Optimiser of the model's parameters, with a constant learning rate. If None, Adam.
        clip: Largest norm of the gradient. If None, no limit. Default: 1.
        log: Called with one line per epoch.

    Returns:
        Loss and activity before and after; ``print`` shows a table.

    Raises:
        TypeError: If ``loss`` is not a function of model and batch that returns one number, or another argument has
            the wrong type.
        ValueError: If the model has no event layer, there is no data, arguments do not fit together, a budget cannot
            be met, the metric is not finite, or the loss does not depend on the model's parameters.
        RuntimeError: If training diverges.

    Example:
        >>> import torch, egru
        >>> gru = torch.nn.GRU(4, 32)
        >>> data = [torch.randn(20, 8, 4) for _ in range(5)]
        >>> model = egru.convert(gru)
        >>> loss = lambda model, x: (model(x)[0] - gru(x)[0]).square().mean()
        >>> result = egru.sparsify(model, data, loss, target=0.3, epochs=4, log=lambda line: None)
        >>> result.after.events <= 0.3
        True
    """
    budget = target if isinstance(target, Budget) else Budget(activity=target)
    metric = budget.metric if metric is None else metric
    _check(model, data, loss, epochs, rate, patience, metric, teacher, distillation, optimiser)
    if teacher is not None:
        distillation = Distillation(model, teacher)
    start = time.monotonic()
    before = measure(model, data, loss, "sparsify")
    if budget.macs is not None:
        _check_macs(model, data, loss, budget.macs)
    reference = None if metric is None else _score(metric, distillation.teacher if distillation is not None else model)
    log(f"before: {before}" + ("" if reference is None else f", metric {reference:.2f}"))
    if budget.limit is not None and budget.measure(before.activity) <= budget.limit:
        log("the model meets the target already: thresholds rise only if training would exceed it")
    training = _Training(model, data, loss, distillation, rate, lr, ramp, metric, patience, optimiser, clip, log)
    with _restored_on_error(model):
        if budget.limit is not None:
            after, score = training.run(budget, epochs)
        else:
            assert reference is not None
            assert budget.within is not None
            after, score = _run_stages(training, before, epochs, reference - budget.within, log)
    return Sparsification(before, after, reference, score, training.epochs, time.monotonic() - start)


@contextlib.contextmanager
def _restored_on_error(model: nn.Module) -> Generator[None, None, None]:
    """Restore the modes of all modules at the end of the context, after an exception also everything else."""
    modes = [(module, module.training) for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    configs = [(layer, layer.threshold_config) for _, layer in event_layers(model)]
    parameters = [(p, p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    try:
        yield
    except Exception:
        model.load_state_dict(state)
        for layer, config in configs:
            layer.threshold_config = config
        for parameter, trained, gradient in parameters:
            parameter.requires_grad_(trained)
            parameter.grad = gradient
        raise
    finally:
        for module, training in modes:
            module.training = training


def _score(metric: Callable[[nn.Module], float], model: nn.Module) -> float:
    """Return the metric of a model in evaluation mode.

    Raises:
        ValueError: If it is not a finite number.
    """
    with evaluation(model):
        value = metric(model)
    if not isinstance(value, SupportsFloat) or not math.isfinite(float(value)):
        raise ValueError(f"sparsify: metric must return a finite number, got {value!r}")
    return float(value)


def _check_macs(model: nn.Module, data: Any, loss: Loss, limit: float) -> None:
    """Raise an error if a model exceeds a budget of MACs even without events."""
    with restored_thresholds(model):
        try:
            raise_thresholds(model, 1e6)
        except ValueError:  # thresholds such as those of a sigmoid are bounded
            return
        least = measure(model, data, loss, "sparsify").macs
    if least > limit:
        raise ValueError(
            f"sparsify: without any event the model takes {least:.3f} of the dense MACs, because inputs and other "
            f"layers count too; the budget is {limit}"
        )


def _check(
    model: nn.Module,
    data: Any,
    loss: Any,
    epochs: Any,
    rate: Any,
    patience: Any,
    metric: Any,
    teacher: Any,
    distillation: Distillation | None,
    optimiser: torch.optim.Optimizer | None,
) -> None:
    if not any(True for _ in event_layers(model)):
        raise ValueError(
            f"sparsify: the model must have an event layer, got {type(model).__name__}; egru.convert(model) adds them"
        )
    check_batches(data, "data", "sparsify")
    try:
        batches = len(data)
    except TypeError:
        raise ValueError(
            f"sparsify: data must be a list or a loader with a length, got {type(data).__name__}"
        ) from None
    if not batches:
        raise ValueError("sparsify: data must contain at least one batch, got none")
    check_loss(loss, "sparsify")
    if not isinstance(epochs, numbers.Integral):
        raise TypeError(f"sparsify: epochs must be an integer, got {epochs!r}")
    if int(epochs) < 1:
        raise ValueError(f"sparsify: epochs must be at least 1, got {epochs!r}")
    check_number(rate, "rate", "sparsify")
    if not rate >= 0:
        raise ValueError(f"sparsify: rate must not be negative, got {rate!r}")
    check_metric(metric, "sparsify")
    if patience is not None and metric is None:
        raise ValueError(f"sparsify: patience={patience!r} requires a metric")
    if teacher is not None and distillation is not None:
        raise ValueError("sparsify: teacher and distillation exclude each other; the distillation contains its teacher")
    if distillation is not None and distillation.model is not model:
        raise ValueError("sparsify: distillation must be made for the model that is fine-tuned, got another one")
    if optimiser is not None:
        trained = {id(p) for group in optimiser.param_groups for p in group["params"]}
        if not any(id(p) in trained for p in model.parameters() if p.requires_grad):
            raise ValueError("sparsify: optimiser has none of the model's parameters; build it from model.parameters()")


@dataclasses.dataclass
class _Training:
    """The parts of a fine-tuning run that its stages share."""

    model: nn.Module
    data: Any
    loss: Loss
    distillation: Distillation | None
    rate: float
    lr: float
    ramp: float
    metric: Callable[[nn.Module], float] | None
    patience: int | None
    optimiser: torch.optim.Optimizer | None
    clip: float | None
    log: Callable[[str], None]
    epochs: int = 0

    def run(self, budget: Budget, epochs: int) -> tuple[Measurement, float | None]:
        """Train to a budget and return the measurement and the metric of the parameters that are kept."""
        steps, metric = epochs * len(self.data), self.metric
        for _, layer in event_layers(self.model):
            layer.threshold_config = dataclasses.replace(layer.threshold_config, trainable=True)
            for parameter in layer.threshold_parameters().values():
                parameter.requires_grad_(True)
        optimiser, rates = self._optimiser(steps)
        best: tuple[float, int, dict[str, Any]] | None = None
        schedule = ThresholdSchedule(self.model, budget, steps, ramp=self.ramp)
        for epoch in range(epochs):
            with schedule:
                mean = self._epoch(optimiser, rates, schedule, budget)
            self.epochs += 1
            activity = f"activity {schedule.measured:.3f} (goal {schedule.goal:.3f})"
            line = f"epoch {epoch + 1:3}: loss {mean:.4f}, {activity}"
            if metric is not None:
                score = _score(metric, self.model)
                line += f", metric {score:.2f}"
                met = budget.limit is not None and schedule.measured <= 1.05 * budget.limit
                if met and (best is None or score > best[0]):
                    best = (score, epoch, copy.deepcopy(self.model.state_dict()))
            self.log(line)
            if best is not None and self.patience is not None and epoch - best[1] >= self.patience:
                break
        if best is not None:
            self.model.load_state_dict(best[2])
        after = self._settle(budget, schedule)
        score = None if metric is None else _score(metric, self.model)
        self.log(f"after: {after}" + ("" if score is None else f", metric {score:.2f}"))
        return after, score

    def _optimiser(self, steps: int) -> tuple[torch.optim.Optimizer, Any]:
        if self.optimiser is not None:
            return self.optimiser, None
        optimiser = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], self.lr)
        return optimiser, torch.optim.lr_scheduler.OneCycleLR(optimiser, self.lr, total_steps=steps)

    def _epoch(self, optimiser: Any, rates: Any, schedule: ThresholdSchedule, budget: Budget) -> float:
        total = 0.0
        frozen = [m for m in self.model.modules() if not m.training] if self.model.training else []
        self.model.train()
        for module in frozen:  # such as batch normalisations with fixed statistics
            module.training = False
        for batch in itertools.islice(self.data, len(self.data)):  # an iterable data set may yield more
            with contextlib.ExitStack() as contexts:
                terms: list[Distillation | ActivityLoss] = []
                if self.rate:
                    goal = budget.activity or 0.0
                    activity = ActivityLoss(self.model, rate=self.rate, state=0.0, target=goal)
                    terms.append(contexts.enter_context(activity))
                if self.distillation is not None:
                    terms.append(contexts.enter_context(self.distillation))
                task = self.loss(self.model, batch)
                number = loss_value(task, "sparsify")
                if not isinstance(task, Tensor) or not task.requires_grad:
                    raise ValueError(
                        "sparsify: the loss does not depend on the model's parameters; it must call the model it "
                        "receives, without detach() or item()"
                    )
                value: Tensor = task + sum(term.value for term in terms)
            optimiser.zero_grad()
            value.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            if not math.isfinite(number):
                raise RuntimeError(f"sparsify: the loss became {number}; reduce lr")
            optimiser.step()
            if rates is not None:
                rates.step()
            schedule.step()
            total += number
        return total / len(self.data)

    def _settle(self, budget: Budget, schedule: ThresholdSchedule) -> Measurement:
        """Raise the thresholds until the budget holds in evaluation mode."""
        assert budget.limit is not None
        measured = math.inf
        for count in range(PASSES):
            after = measure(self.model, self.data, self.loss, "sparsify")
            measured = budget.measure(after.activity)
            if measured <= budget.limit:
                return after
            if after.events == 0:  # with bounded thresholds this is not known before
                raise ValueError(
                    f"sparsify: without any event the model takes {measured:.3f} of the dense MACs, the budget is "
                    f"{budget.limit}; inputs and other layers count too"
                )
            amount = min(0.1, max(0.005, 0.5 * (measured / budget.limit - 1)))
            schedule.shift(amount * 2 ** max(0, count - EVEN_PASSES))
        name = "activity" if budget.macs is None else "fraction of the dense MACs"
        raise ValueError(
            f"sparsify: the {name} is still {measured:.3f} after thresholds were raised {PASSES} times, the budget is "
            f"{budget.limit}; pass a larger budget, or use a threshold without an upper bound"
        )


def _run_stages(
    training: _Training, before: Measurement, epochs: int, lowest: float, log: Callable[[str], None]
) -> tuple[Measurement, float | None]:
    """Lower the activity stage by stage while the metric is at least ``lowest``, and keep the last such stage."""
    assert training.metric is not None
    activity, kept = min(before.events, 0.8), copy.deepcopy(training.model.state_dict())
    after, score = before, _score(training.metric, training.model)
    while activity > 0.01:
        activity *= STAGE_FACTOR
        log(f"stage: activity {activity:.3f}")
        trial, value = training.run(Budget(activity=activity), epochs)
        assert value is not None
        if value < lowest:
            log(f"metric {value:.2f} is below {lowest:.2f}: keep activity {after.events:.3f}")
            break
        after, score, kept = trial, value, copy.deepcopy(training.model.state_dict())
    training.model.load_state_dict(kept)
    return after, score
