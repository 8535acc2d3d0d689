"""The training loop."""

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from egru.activity import ActivityLoss, ActivityMonitor, ActivitySummary, measure_stability
from egru.compress.weights import WeightPruning
from egru.training import checkpoint, distributed
from egru.training.config import Training
from egru.training.energy import EnergyRecorder
from egru.training.graphs import Capture, GraphedStep, Step, StepOutput
from egru.training.optimise import (
    AveragedSGD,
    averaged,
    gradient_norm,
    learning_rate_factor,
    make_optimiser,
    make_scaler,
    set_learning_rate,
)
from egru.training.progress import NoProgress, Progress
from egru.training.records import EpochMetrics, LayerStability, ModelActivity, Result, Scores, Sparsity, layer_sparsity
from egru.training.run import Best, Paused, Run
from egru.training.statistics import EpochStatistics, explosion_warning
from egru.training.tasks import Batch, Task

MASK_UPDATES = 100
"""Smallest number of steps in which the weight sparsity of a run rises."""


def train(
    model: nn.Module,
    task: Task,
    training: Training,
    run: Run,
    progress: Progress | None = None,
    minutes: float | None = None,
) -> Result:
    """Train a model to the last epoch, then evaluate the best epoch on the test split.

    Training starts at the newest checkpoint of ``run``, so that an interrupted run continues with the same numbers.

    Args:
        model: Model to train, on the device ``training.device``. Afterwards it has the weights of the best epoch.
        task: Data and loss.
        training: Settings of the optimiser and the loop.
        run: Folder for checkpoints, metrics and the result.
        progress: Display of the progress. If None, nothing is displayed.
        minutes: Time limit. When it is exceeded, the run is saved at the end of the epoch. If None, there is no limit.

    Returns:
        Test scores and activity of the epoch with the best validation score.

    Raises:
        Paused: If ``minutes`` have passed before the last epoch.
        RunError: If the loss or a gradient is not finite, a checkpoint does not fit, or the disk is full.

    Example:
        >>> data, training = egru.data.digits(), egru.training.ClassifierTraining(epochs=2)
        >>> model = egru.models.SequenceClassifier(1, 64, data.classes)
        >>> task = egru.training.ClassifierTask(data, training)
        >>> result = egru.training.train(model, task, training, egru.training.Run.create("runs/first", {}))
        >>> print(f"test accuracy {result.test.accuracy:.1%}")
    """
    check_minutes(minutes)
    run = distributed.run_for_rank(run)
    with EnergyRecorder(run, training.device) as energy:
        return _train(model, task, training, run, progress or NoProgress(), minutes, energy)


def _train(
    model: nn.Module,
    task: Task,
    training: Training,
    run: Run,
    progress: Progress,
    minutes: float | None,
    energy: EnergyRecorder,
) -> Result:
    start = time.monotonic()
    deadline = math.inf if minutes is None else start + 60 * minutes
    device = torch.device(training.device)
    pruning = make_pruning(model, training)
    optimiser, scaler = make_optimiser(model, training), make_scaler(training)
    step = make_step(model, task, training, optimiser, scaler)
    is_rank_zero = distributed.rank() == 0
    with distributed.rank_zero_first():
        run.remove_temporary_files()
        if run.saved_epochs():
            epoch, best = run.restore(model, optimiser, device, scaler)
            if epoch and device.type == "cpu":
                run.check_threads()
        else:
            run.require_no_metrics()
            epoch, best = 0, Best(0, ())
            run.save(epoch, model, optimiser, device, best, scaler)
    saved_epoch, warned = epoch, False

    while epoch < training.epochs:
        epoch_start = time.perf_counter()
        energy.start_epoch()
        statistics = EpochStatistics(epoch + 1, saved_epoch, device, overflows=scaler.is_enabled())
        training_activity = train_epoch(
            epoch, model, task, training, step, optimiser, scaler, statistics, progress, pruning
        )
        epoch += 1
        train_metrics = statistics.summary()
        distributed.broadcast_buffers(model)
        with averaged(optimiser):
            scores, activity = score(model, task, "validation")
            diagnose = training.diagnose and is_rank_zero  # rank 0 has rows of every split
            stabilities = measure_stability(model, lambda: task.probe(model)) if diagnose else []
        if isinstance(optimiser, AveragedSGD):
            optimiser.epoch_done(scores.loss)
        merit = task.merit(scores)
        if pruning is not None:  # epochs with the final sparsity are better than those before
            merit = (pruning.goal(pruning_progress(epoch, training)), *merit)
        is_last = epoch == training.epochs
        is_late = distributed.from_rank_zero(lambda: time.monotonic() >= deadline)
        is_saved = epoch % training.save_every == 0 or is_last or is_late
        if is_saved and (not best.epoch or merit > best.merit):
            best = Best(epoch, merit)
        joules = energy.since_start()
        metrics = EpochMetrics(
            epoch,
            train_metrics,
            scores,
            ModelActivity.of_model(activity),
            layer_sparsity(activity),
            training_activity and Sparsity.of(training_activity),
            training_activity and layer_sparsity(training_activity),
            tuple(map(LayerStability.of, stabilities)),
            seconds=time.perf_counter() - epoch_start,
            elapsed=time.monotonic() - start,
        )
        if is_rank_zero and not warned and (warning := explosion_warning(epoch, stabilities, train_metrics)):
            run.log(warning)
            warned = True
        run.append_metrics(metrics)
        energy.write(epoch, joules)
        if is_saved:
            run.save(epoch, model, optimiser, device, best, scaler)
            saved_epoch = epoch
        progress.epoch(metrics)
        if is_late and not is_last:
            raise Paused(
                f"the time limit was reached; epoch {epoch} of {training.epochs} is saved: continue with "
                f"--resume {run.folder}"
            )

    distributed.barrier()
    if pruning is not None:
        pruning.remove()
    best_epoch = run.best_epoch()
    checkpoint.load_weights(run.checkpoint_path(best_epoch), model)
    scores, activity = score(model, task, "test")
    result = Result(best_epoch, scores, activity, sum(line.seconds for line in run.metrics()))
    run.write_result(result)
    return result


def make_pruning(model: nn.Module, training: Training) -> WeightPruning | None:
    """Add masks to the weights of a model if the config prunes them."""
    if not training.weight_sparsity:
        return None
    return WeightPruning(
        model,
        training.weight_sparsity,
        block=training.block,
        scope=training.pruning_scope,
        share=training.pruning_share,
    )


def mask_updates(training: Training) -> int:
    """Return how often the masks change per epoch: about :data:`MASK_UPDATES` times in all, at least once per epoch."""
    return max(1, math.ceil(MASK_UPDATES / max(1.0, training.epochs * training.pruning_share)))


def pruning_progress(epoch: int, training: Training, update: int = -1) -> float:
    """Return the progress of pruning after ``epoch`` epochs and, if not negative, ``update`` changes of the next one.

    It is 0 at the first change of the masks and 1 at the last one.
    """
    per_epoch = mask_updates(training)
    changes = epoch * per_epoch + update
    return changes / max(1, training.epochs * per_epoch - 1)


def train_epoch(
    epoch: int,
    model: nn.Module,
    task: Task,
    training: Training,
    step: Step,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    statistics: EpochStatistics,
    progress: Progress,
    pruning: WeightPruning | None = None,
) -> ActivitySummary | None:
    """Train on every batch once, after ``epoch`` epochs.

    Returns:
        The activity in the second step, the first one with a carried state. None if there is a single step.
    """
    eager_step = step.eager if isinstance(step, GraphedStep) else step
    parameters = [p for p in model.parameters() if p.requires_grad]
    monitor, state, masks = ActivityMonitor(model), None, -1
    model.train()
    distributed.reseed(training.seed, epoch)
    for batch in statistics.time_loading(task.batches()):
        set_learning_rate(optimiser, batch.rate_factor * learning_rate_factor(training, epoch + batch.epoch_fraction))
        if pruning is not None and (update := int(batch.epoch_fraction * mask_updates(training))) != masks:
            masks = update
            pruning.update(pruning_progress(epoch, training, update))
        if statistics.steps == 1:
            with monitor:
                loss, objective, state = eager_step(batch, state)
        else:
            loss, objective, state = step(batch, state)
        scaler.unscale_(optimiser)
        norm = gradient_norm(parameters, training.clip)
        statistics.add(loss, objective, norm, batch.targets)  # raises before a NaN reaches the weights
        scaler.step(optimiser)
        scaler.update()
        progress.step(epoch + batch.epoch_fraction)
    if pruning is not None:  # an epoch with few batches may have passed over its last change
        pruning.update(pruning_progress(epoch + 1, training))
    return monitor.summary() if statistics.steps > 1 else None


def make_step(
    model: nn.Module,
    task: Task,
    training: Training,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    capture: Capture | None = None,
) -> Step:
    """Return a function that computes loss, gradients and next state of a batch.

    Args:
        model: Model to differentiate.
        task: Provides the loss.
        training: Regularisers, and whether to replay the step as a CUDA graph.
        optimiser: Its gradients are reset before each step.
        scaler: Scales the objective in float16.
        capture: Records a graph. If None, a CUDA graph.
    """
    regulariser = activity_loss(model, training)

    def forward(batch: Batch, state: Any) -> StepOutput:
        with regulariser as activity:
            loss, extra, state = task.loss(model, batch, state)
            objective = loss + extra + activity.value
        return StepOutput(loss.detach(), objective if batch.weight == 1 else objective * batch.weight, state)

    forward = distributed.data_parallel(model, forward, training)

    def step(batch: Batch, state: Any) -> StepOutput:
        loss, objective, state = forward(batch, state)
        if not training.graph:
            optimiser.zero_grad()
        scaler.scale(objective).backward()
        return StepOutput(loss, objective.detach(), state)

    if not training.graph:
        return step
    return GraphedStep(step, [p for p in model.parameters() if p.requires_grad], capture)


def score(
    model: nn.Module, task: Task, split: str, progress: Callable[[float], None] | None = None
) -> tuple[Scores, ActivitySummary]:
    """Evaluate a model on a split and measure its activity there.

    Args:
        model: Model to evaluate.
        task: Data and scores.
        split: "train", "validation" or "test".
        progress: Called with the fraction of the split that is done. May be None.

    Returns:
        The scores and the activity, over all processes.

    Example:
        >>> scores, activity = egru.training.score(model, task, "validation")
        >>> print(f"{scores.accuracy:.1%} correct, {activity.activity_sparsity:.1%} of the outputs are zero")
    """
    with ActivityMonitor(model) as monitor:
        scores = task.evaluate(model, split, progress)
    for counts in distributed.gather_from_others(monitor.counts()):
        monitor.add(counts)
    return scores, monitor.summary()


def activity_loss(model: nn.Module, training: Training) -> contextlib.AbstractContextManager[Any]:
    """Return the regularisers of the config, or a context without overhead whose ``value`` is zero."""
    if not training.rate_loss and not training.state_loss:
        return contextlib.nullcontext(_ZeroLoss)
    return ActivityLoss(model, rate=training.rate_loss, state=training.state_loss, squared=training.squared_rate)


class _ZeroLoss:
    value = 0.0


def check_minutes(minutes: float | None) -> None:
    """Validate a time limit. Also called before a run folder is created."""
    if minutes is not None and not minutes > 0:
        raise ValueError(f"train: minutes must be positive, or None for no limit; got {minutes!r}")
