"""Train an event-based GRU in continuous time, with exact gradients, on one CPU core in a few minutes.

    python examples/continuous.py yinyang                    # the class is the output unit that emits first
    python examples/continuous.py yinyang --output membrane  # the class is the output unit with the largest state
    python examples/continuous.py order                      # in which order did three events arrive?
    python examples/continuous.py intervals                  # which of two intervals was longer?
    python examples/continuous.py match --output membrane    # were two intervals both short or both long?
    python examples/continuous.py yinyang --freeze           # control: train only the output units

All data are generated. The validation set selects the epoch, and the test set is used once, at the end. The results and
a raster plot of one test sample are written to --folder.

Read it from top to bottom: the tasks, the model, the training loop, the plot.
"""

import argparse
import copy
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from egru import Threshold
from egru.continuous import (
    ContinuousEGRU,
    ContinuousOutput,
    ContinuousStack,
    InputEvents,
    first_time_loss,
    membrane_loss,
    rate_penalty,
    silence_penalty,
)
from egru.data import EventSamples, event_order, interval_comparison, interval_match, yin_yang


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: its data, its duration, and defaults of the settings in :class:`Config`."""

    draw: Callable[[int, int], EventSamples]
    classes: tuple[str, ...]
    channels: int
    horizon: float
    hidden: int
    samples: int
    epochs: int
    learning_rate: float = 1e-2
    tau_m: float = 2.0
    max_rate: float = 0.5


TASKS = {
    "yinyang": Task(yin_yang, ("yin", "yang", "dot"), 5, 4.0, 60, 5000, 30, 5e-3, 1.0, math.inf),
    "order": Task(event_order, ("ABC", "ACB", "BAC", "BCA", "CAB", "CBA"), 3, 5.0, 24, 5000, 10, max_rate=1.0),
    "intervals": Task(interval_comparison, ("shorter", "longer"), 3, 6.5, hidden=60, samples=20_000, epochs=20),
    "match": Task(interval_match, ("different", "same"), 3, 6.5, hidden=60, samples=20_000, epochs=20),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run. Every field is a command-line option. Of numbers that are None, the task has the default.

    Attributes:
        output: What the output units are judged by: their first event ("first") or their final state ("membrane").
        hidden: The number of hidden units.
        samples: The number of training samples.
        epochs: The number of epochs.
        learning_rate: The peak learning rate of the recurrent layer; that of the output units is twice as large.
        clip: The maximum norm of the gradient.
        silence: The weight of the penalty on output units without events.
        max_rate: Events per unit and time above which the recurrent layer is penalised. Without a limit, the number
            of events can grow until an epoch takes minutes.
        recurrent: A factor on the initial recurrent weights.
        tau_m: The time constant of the states of the recurrent layer.
        trainable_tau: Train the time constants of both layers.
        freeze: Train only the output units.
        folder: Where the results are written.
    """

    output: str = "first"
    hidden: int | None = None
    samples: int | None = None
    epochs: int | None = None
    batch: int = 50
    learning_rate: float | None = None
    clip: float = 1.0
    silence: float = 20.0
    max_rate: float | None = None
    recurrent: float = 0.3
    tau_m: float | None = None
    trainable_tau: bool = False
    seed: int = 0
    freeze: bool = False
    folder: str = "report/continuous"

    def resolve(self, task: Task) -> Any:
        """Return the settings with the defaults of ``task`` where they are None."""
        names = ("hidden", "samples", "epochs", "learning_rate", "max_rate", "tau_m")
        return dataclasses.replace(self, **{n: getattr(task, n) for n in names if getattr(self, n) is None})


class Classifier(nn.Module):
    """A recurrent layer that emits events, and one output unit per class.

    The exact gradient does not account for events that appear or vanish. Two choices help. The biases of the recurrent
    layer let its units emit events also without input. Output units either have thresholds out of reach, so that their
    states are continuous ("membrane"), or are kept from falling silent by a penalty ("first").
    """

    def __init__(self, task: Task, config: Config) -> None:
        super().__init__()
        self.horizon, self.config = task.horizon, config.resolve(task)
        classes, hidden = len(task.classes), self.config.hidden
        self.layer = ContinuousEGRU(
            task.channels,
            hidden,
            tau_m=self.config.tau_m,
            trainable_tau=config.trainable_tau,
            threshold=Threshold(mean=-1.0, std=0.25),
        )
        reach = Threshold.constant(1.5) if config.output == "membrane" else Threshold(mean=-1.0, std=0.0)
        unconnected = torch.zeros(classes, classes, dtype=torch.bool)
        self.output = ContinuousEGRU(
            hidden, classes, mask=unconnected, threshold=reach, trainable_tau=config.trainable_tau
        )
        with torch.no_grad():
            self.layer.V.mul_(config.recurrent)
            self.layer.b[0], self.layer.b[2] = 0.5, 0.3  # gates u and z
            self.output.U.mul_(0.5)
            self.output.b[0], self.output.b[2] = 0.5, 0.2 if config.output == "first" else 0.0
        self.layer.requires_grad_(not config.freeze)
        self.stack = ContinuousStack(self.layer, self.output)

    def forward(self, samples: EventSamples) -> tuple[ContinuousOutput, ContinuousOutput]:
        """Return the outputs of the recurrent layer and of the output units."""
        values = torch.full_like(samples.times, 3.0)
        events = InputEvents.from_padded(samples.times, samples.channels, values)
        first, last = self.stack(events, self.horizon, [0.75 * self.horizon])
        return first, last

    def loss(self, layer: ContinuousOutput, output: ContinuousOutput, labels: Tensor) -> Tensor:
        penalty = 10 * rate_penalty(layer, high=self.config.max_rate)
        if self.config.output == "membrane":
            return membrane_loss(output, labels) + penalty
        penalty = penalty + self.config.silence * silence_penalty(output, self.output.thresholds())
        return first_time_loss(output, labels) + penalty

    def predict(self, output: ContinuousOutput) -> Tensor:
        return output.state.c.argmax(1) if self.config.output == "membrane" else output.first_times().argmin(1)


@torch.no_grad()
def evaluate(model: Classifier, samples: EventSamples) -> tuple[float, float]:
    """Return the accuracy and the events per sample of the recurrent layer."""
    correct, events = 0, 0
    for rows in torch.arange(len(samples.labels)).split(200):
        layer, output = model(samples.select(rows))
        correct += int((model.predict(output) == samples.labels[rows]).sum())
        events += len(layer.times)
    return correct / len(samples.labels), events / len(samples.labels)


def train(
    model: Classifier,
    data: EventSamples,
    validation: EventSamples,
    epochs: int,
    report: Callable[[float], None] = lambda accuracy: None,
) -> list[dict[str, float]]:
    """Train with Adam and a one-cycle schedule, then restore the epoch with the best validation accuracy.

    ``report`` is called after every epoch, with the validation accuracy.
    """
    config = model.config
    batches = -(-len(data.labels) // config.batch)
    rates = [config.learning_rate, 2 * config.learning_rate]
    groups = [{"params": model.layer.parameters()}, {"params": model.output.parameters()}]
    optimizer = torch.optim.Adam(groups, config.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=epochs * batches)
    history, best, best_weights = [], (-1.0, 0.0), copy.deepcopy(model.state_dict())
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(data.labels)).split(config.batch):
            batch = data.select(rows)
            layer, output = model(batch)
            loss = model.loss(layer, output, batch.labels)
            optimizer.zero_grad()
            loss.backward()  # exact, through the event times of both layers
            # The gradient of an event grows without bound as its unit barely reaches the threshold: always clip.
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(rows)
        accuracy, events = evaluate(model, validation)
        history.append({"loss": total / len(data.labels), "validation": accuracy, "events": events})
        score = (accuracy, -history[-1]["loss"])  # the loss decides between equal accuracies
        if score > best:
            best, best_weights = score, copy.deepcopy(model.state_dict())
        report(accuracy)
    model.load_state_dict(best_weights)
    return history


@torch.no_grad()
def plot_raster(model: Classifier, task: Task, sample: EventSamples, path: Path) -> None:
    """Plot the input events of a sample above the events of the recurrent layer."""
    from egru.report.theme import LIGHT

    output, _ = model(sample)
    activity = output.units.bincount(minlength=model.layer.hidden_size)
    row_of_unit = activity.argsort(descending=True, stable=True).argsort()
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.6])
        above.scatter(sample.times[0], sample.channels[0], s=60, marker="|", color=LIGHT.dense)
        above.set_ylabel("channel")
        above.set_ylim(-0.5, task.channels - 0.5)
        title = task.classes[int(sample.labels[0])]
        above.set_title(f"{title}: {sample.times.shape[1]} events in, {len(output.times)} out")
        below.scatter(output.times, row_of_unit[output.units], s=40, marker="|", color=LIGHT.event[0])
        below.set_ylim(model.layer.hidden_size - 0.5, -0.5)
        below.set_ylabel("unit, most active first")
        below.set_xlabel("time, in time constants")
        below.set_xlim(0, task.horizon)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def fit(
    name: str, config: Config, report: Callable[[float], None] = lambda accuracy: None, *, test: bool = True
) -> tuple[Classifier, dict[str, Any]]:
    """Train and, unless ``test`` is False, test on one task; return the network and the results."""
    task = TASKS[name]
    settings = config.resolve(task)
    data = task.draw(settings.samples, 1000 + config.seed)
    validation = task.draw(2000, 2000 + config.seed)
    torch.manual_seed(config.seed)
    model = Classifier(task, settings)
    start = time.process_time()
    history = train(model, data, validation, settings.epochs, report)
    seconds = time.process_time() - start
    result = {
        "task": name,
        "validation": max(line["validation"] for line in history),
        "chance": 1 / len(task.classes),
        "processor_seconds": round(seconds, 1),
        "config": dataclasses.asdict(settings),
        "history": history,
    }
    if test:
        result["test"], result["events_per_sample"] = evaluate(model, test_set(name, config.seed))
    return model, result


def test_set(name: str, seed: int) -> EventSamples:
    return TASKS[name].draw(5000, 4000 + seed)


def run(name: str, config: Config) -> dict[str, object]:
    """Train with a progress bar, write the results and a figure, and return the results."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
        TextColumn("validation {task.fields[accuracy]}"),
    )
    console = Console()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=config.resolve(TASKS[name]).epochs, accuracy="")
        model, result = fit(name, config, lambda x: progress.update(bar, advance=1, accuracy=f"{100 * x:.1f} %"))
    folder = Path(config.folder)
    plot_raster(model, TASKS[name], test_set(name, config.seed).select(slice(1)), folder / f"{name}.png")
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    console.print(
        f"{name}, seed {config.seed}: test {100 * result['test']:.1f} % (chance {100 * result['chance']:.1f} %), "
        f"validation {100 * result['validation']:.1f} %, {result['events_per_sample']:.0f} events per sample, "
        f"{result['processor_seconds']:.0f} s; results in {folder}"
    )
    return result


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=tuple(TASKS))
    for field in dataclasses.fields(Config):
        option = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(option, action="store_true")
        elif field.name == "output":
            parser.add_argument(option, choices=("first", "membrane"), default=field.default)
        else:
            kind = int if "int" in str(field.type) else float if "float" in str(field.type) else str
            default = "that of the task" if field.default is None else field.default
            parser.add_argument(option, type=kind, default=field.default, help=f"default: {default}")
    options = vars(parser.parse_args(arguments))
    task = options.pop("task")
    torch.set_num_threads(1)  # the tensors are too small for a second thread to help
    return run(task, Config(**options))


if __name__ == "__main__":
    main()
