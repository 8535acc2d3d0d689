"""The training loop."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from egru.activity import ActivityLoss, ActivityMonitor, ActivitySummary, LayerActivity, Stability, stability
from egru.training import checkpoint, distributed
from egru.training.config import Training
from egru.training.graphs import Capture, Found, Graphs, Step
from egru.training.optimise import (
    AveragedSGD,
    averaged,
    gradient_norm,
    learning_rate_factor,
    make_optimiser,
    make_scaler,
    set_learning_rate,
)
from egru.training.progress import Progress
from egru.training.run import Paused, Run, RunError
from egru.training.tasks import Batch, Scores, Task

EXPLODED = 1e3
"""A norm of the gradient that only recurrent gradients reach."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to: the test scores of the epoch that validation chose, and its activity there."""

    best_epoch: int
    test: Scores
    activity: ActivitySummary
    seconds: float


def check_minutes(minutes: float | None) -> None:
    """Also of whoever makes a folder for the run, before it is there."""
    if minutes is not None and not minutes > 0:
        raise ValueError(f"train: minutes must be positive, or None for no limit; got {minutes!r}")


def train(
    model: nn.Module, task: Task, training: Training, run: Run, progress: Progress, minutes: float | None = None
) -> Result:
    """Train from where ``run`` stands to the last epoch; then score the best epoch on the test split, once.

    After ``minutes`` it saves at the end of the epoch and raises :class:`Paused`: the run goes on another time.
    """
    check_minutes(minutes)
    begun = time.monotonic()
    limit = math.inf if minutes is None else begun + 60 * minutes
    device = torch.device(training.device)
    optimiser, scaler = make_optimiser(model, training), make_scaler(training)
    gradients = make_step(model, task, training, optimiser, scaler)
    run = distributed.seat(run)
    with distributed.first_goes_first():
        run.sweep()
        if run.epochs():
            epoch, best = run.restore(model, optimiser, device, scaler)
        else:
            run.must_be_new()
            epoch, best = 0, 0
            run.save(epoch, model, optimiser, device, best, scaler)
    kept, warned = epoch, False
    merits = {line["epoch"]: task.merit(Scores(**line["validation"])) for line in run.metrics()}
    if best and best not in merits:
        run.say(f"the metrics of epoch {best}, the best so far, are lost: the next one that is saved takes its place")

    while epoch < training.epochs:
        start = time.perf_counter()
        watch = Watch(epoch + 1, kept, device, overflows=scaler.is_enabled())
        training_activity = one_epoch(epoch, model, task, training, gradients, optimiser, scaler, watch, progress)
        epoch += 1
        trained = watch.summary()
        distributed.same_buffers(model)
        with averaged(optimiser):
            scores, activity = score(model, task, "validation")
            first = distributed.rank() == 0  # which has rows of every split, and writes
            found = stability(model, lambda: task.probe(model)) if training.diagnose and first else []
        if isinstance(optimiser, AveragedSGD):
            optimiser.epoch_done(scores.loss)
        merits[epoch] = task.merit(scores)
        last, late = epoch == training.epochs, distributed.agreed(lambda: time.monotonic() >= limit)
        saved = epoch % training.save_every == 0 or last or late
        best = epoch if saved and (best not in merits or merits[epoch] > merits[best]) else best
        seconds, elapsed = time.perf_counter() - start, time.monotonic() - begun
        line = metrics_line(epoch, trained, scores, activity, training_activity, found, seconds, elapsed)
        if first and not warned and (advice := explosion(epoch, found, trained)):
            run.say(advice)
            warned = True
        run.record(line)
        if saved:
            run.save(epoch, model, optimiser, device, best, scaler)
            kept = epoch
        progress.epoch(line)
        if late and not last:
            raise Paused(f"time is up after epoch {epoch} of {training.epochs}, which is saved: --resume {run.folder}")

    distributed.wait()
    best = run.best()
    checkpoint.load_weights(run.at(best), model)
    scores, activity = score(model, task, "test")
    result = Result(best, scores, activity, sum(line["seconds"] for line in run.metrics()))
    run.finish({**dataclasses.asdict(result), "activity": activity.to_dict()})
    return result


def one_epoch(
    epoch: int,
    model: nn.Module,
    task: Task,
    training: Training,
    gradients: Step,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    watch: "Watch",
    progress: Progress,
) -> ActivitySummary | None:
    """Every batch once, after ``epoch`` epochs; how busy ``model`` was in the second step, whose state is carried."""
    eager = gradients.eager if isinstance(gradients, Graphs) else gradients
    parameters = [p for p in model.parameters() if p.requires_grad]
    busy, state = ActivityMonitor(model), None
    model.train()
    distributed.reseed(training.seed, epoch)
    for batch in watch.loading(task.batches()):
        set_learning_rate(optimiser, batch.scale * learning_rate_factor(training, epoch + batch.done))
        if watch.steps == 1:
            with busy:
                loss, objective, state = eager(batch, state)
        else:
            loss, objective, state = gradients(batch, state)
        scaler.unscale_(optimiser)
        norm = gradient_norm(parameters, training.clip)
        watch.step(loss, objective, norm, batch.targets)  # stops here before NaN reaches a weight
        scaler.step(optimiser)
        scaler.update()
        progress.step(epoch + batch.done)
    return busy.summary() if watch.steps > 1 else None


def make_step(
    model: nn.Module,
    task: Task,
    training: Training,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    capture: Capture | None = None,
) -> Step:
    """From a batch and a state to losses, gradients and the next state."""
    regulariser = activity_loss(model, training)

    def forward(batch: Batch, state: Any) -> Found:
        with regulariser as sparsity:
            loss, extra, state = task.loss(model, batch, state)
            objective = loss + extra + sparsity.value
        return Found(loss.detach(), objective if batch.weight == 1 else objective * batch.weight, state)

    forward = distributed.parallel(model, forward, training)

    def step(batch: Batch, state: Any) -> Found:
        loss, objective, state = forward(batch, state)
        if not training.graph:
            optimiser.zero_grad()
        scaler.scale(objective).backward()
        return Found(loss, objective.detach(), state)

    if not training.graph:
        return step
    return Graphs(step, [p for p in model.parameters() if p.requires_grad], capture)


def score(model: nn.Module, task: Task, split: str) -> tuple[Scores, ActivitySummary]:
    """How ``model`` does on a split, and how busy it is there."""
    with ActivityMonitor(model) as activity:
        scores = task.evaluate(model, split)
    for counts in distributed.others(activity.counts()):
        activity.add(counts)
    return scores, activity.summary()


def activity_loss(model: nn.Module, training: Training) -> contextlib.AbstractContextManager[Any]:
    """The regularisers the config asks for; adds nothing, and costs nothing, where it asks for none."""
    if not training.rate_loss and not training.state_loss:
        return contextlib.nullcontext(_Nothing)
    return ActivityLoss(model, rate=training.rate_loss, state=training.state_loss, squared=training.squared_rate)


def explosion(epoch: int, found: list[Stability], trained: dict[str, float]) -> str:
    """What to tell a person about gradients that explode over time, if they do."""
    worst = max(found, key=lambda layer: layer.adjoint_peak, default=None)
    if not (trained["gradient_norm_p99"] > EXPLODED or (worst is not None and worst.explodes)):
        return ""
    said = (
        f"warning: gradients explode in epoch {epoch}: their norm has a median of {trained['gradient_norm']:.2g} and a "
        f"99th percentile of {trained['gradient_norm_p99']:.2g}. "
    )
    if worst is None:
        return f"{said}What helps: a smaller clip; a lower learning rate"
    peak = f"e^{worst.adjoint_peak:.1f}-fold" if math.isfinite(worst.adjoint_peak) else "beyond float32"
    return (
        f"{said}On its way back through {worst.name} a gradient grows "
        f"{peak}; {100 * worst.diagonal_above_one:.1f} % of the factors from a unit's state to its next are above 1. "
        "What helps: reset none; surrogate.height 0.3 or less, or surrogate.bounded; a lower learning rate "
        "(docs/smnist-study.md)"
    )


class _Nothing:
    value = 0.0


class Watch:
    """What one epoch of training shows: losses, gradient norms, time spent waiting for data; stops where it diverges.

    Kept on the device. Read every step on the CPU, where reading is free, and now and then elsewhere. Where gradients
    may overflow (float16), steps with such a gradient are left out by the scaler; only many in a row are an error.
    """

    patience = 30
    """Overflows in a row that are one too many: by then the scale has fallen from 2^16 to 2^-14."""

    def __init__(self, epoch: int, kept: int, device: torch.device, overflows: bool = False) -> None:
        self.epoch, self.kept, self.every, self.overflows = epoch, kept, 1 if device.type == "cpu" else 50, overflows
        self.losses: list[Tensor] = []
        self.objectives: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.counts: list[int] = []
        self.checked, self.waited = 0, 0.0

    @property
    def steps(self) -> int:
        return len(self.losses)

    def loading(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def step(self, loss: Tensor, objective: Tensor, norm: Tensor, count: int) -> None:
        self.losses.append(loss)
        self.objectives.append(objective)
        self.norms.append(norm)
        self.counts.append(count)
        if len(self.losses) % self.every == 0:
            self.check()

    def check(self) -> None:
        watched = {"loss": self.objectives} | ({} if self.overflows else {"gradient norm": self.norms})
        new = [value for values in watched.values() for value in values[self.checked :]]
        if new and not torch.isfinite(torch.stack(new)).all():  # the only place where the host waits for the device
            for name, values in watched.items():
                for step, value in enumerate(values[self.checked :], self.checked + 1):
                    if not torch.isfinite(value):
                        self.stop(name, value, step)
        last = self.norms[-self.patience :]
        if self.overflows and len(last) == self.patience and not torch.isfinite(torch.stack(last)).any():
            self.stop(f"gradient norm (for {self.patience} steps)", last[-1], len(self.norms))
        self.checked = len(self.losses)

    def stop(self, name: str, value: Tensor, step: int) -> NoReturn:
        raise RunError(
            f"{name} is {value.item()} in epoch {self.epoch}, step {step}: training stopped, "
            f"the checkpoint of epoch {self.kept} is the last good state"
        )

    def summary(self) -> dict[str, float]:
        self.check()
        losses, norms = torch.stack(self.losses).double().cpu(), torch.stack(self.norms).double().cpu()
        counts = torch.tensor(self.counts, dtype=torch.float64)
        weighted, counts = distributed.total(losses * counts), distributed.total(counts)
        taken = norms.isfinite()
        norms = norms[taken] if taken.any() else norms.new_zeros(1)
        skipped = {"skipped": int((~taken).sum())} if self.overflows else {}
        return {
            "loss": (weighted.sum() / counts.sum()).item(),
            "gradient_norm": norms.median().item(),
            "gradient_norm_p99": norms.quantile(0.99).item(),
            "gradient_norm_max": norms.max().item(),
            "steps": len(self.losses),
            "waited": self.waited,
            **skipped,
        }


_SPARSITIES = ("activity_sparsity", "backward_sparsity", "backward_skippable")


def metrics_line(
    epoch: int,
    trained: dict[str, float],
    scores: Scores,
    activity: ActivitySummary,
    training_activity: ActivitySummary | None,
    found: list[Stability],
    seconds: float,
    elapsed: float,
) -> dict[str, Any]:
    """One epoch as a line of metrics.jsonl."""
    macs = {"forward_macs": activity.forward_macs, "backward_macs": activity.backward_macs}
    return {
        "epoch": epoch,
        "train": trained,
        "validation": dataclasses.asdict(scores),
        "activity": sparsities(activity) | macs,
        "layers": {layer.name: sparsities(layer) for layer in activity.layers},
        "training_activity": training_activity and sparsities(training_activity),
        "training_layers": training_activity and {x.name: sparsities(x) for x in training_activity.layers},
        "stability": [
            {
                "layer": layer.name,
                "diagonal_above_one": layer.diagonal_above_one,
                "adjoint_growth": layer.adjoint_growth if math.isfinite(layer.adjoint_growth) else None,
                "adjoint_peak": layer.adjoint_peak if math.isfinite(layer.adjoint_peak) else None,
            }
            for layer in found
        ],
        "seconds": seconds,
        "elapsed": elapsed,
    }


def sparsities(of: ActivitySummary | LayerActivity) -> dict[str, float | None]:
    return {name: getattr(of, name) for name in _SPARSITIES}
