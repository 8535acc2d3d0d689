"""Train an event-based GRU in continuous time, with exact gradients, on one CPU core in about a minute.

    python examples/continuous.py timing                    # in which order did three events arrive?
    EGRU_DATA=... python examples/continuous.py poker       # card suits from an event camera (POKER-DVS)
    python examples/continuous.py timing --freeze           # control: train only the readout

In the timing task every sample has one event on each of three channels; the class is their order, so only the event
times carry information. In the poker task, events with microsecond timestamps from 35 x 35 pixels are pooled to 7 x 7
cells with two polarities. The validation set selects the epoch, and the test set is used once, at the end. The results
and a raster plot of one test sample are written to --output.

Read it from top to bottom: the two tasks, the model, the training loop, the plot.
"""

import argparse
import copy
import dataclasses
import itertools
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import egru
from egru.continuous import ContinuousEGRU, ContinuousOutput, ContinuousStack, InputEvents
from egru.continuous.options import EngineName
from egru.data.pokerdvs import PIXELS, SUITS, Recording
from egru.report.theme import LIGHT


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run. Every field is a command-line option.

    Attributes:
        hidden: The number of recurrent units.
        listeners: The number of units in the second layer, whose states are read out.
        learning_rate: The peak learning rate of the recurrent layer.
        readout_rate: The peak learning rate of the listeners and of the linear readout.
        clip: The maximum norm of the gradient.
        tau_s: Time constant of the activations.
        tau_m: Time constant of the states of the recurrent layer.
        tau_listen: Time constant of the states of the listeners.
        recurrent: A factor on the initial recurrent weights.
        freeze: Train only the listeners and the readout.
        tune: Stop before the test set is used.
        data: The folder that contains pokerdvs. If empty, EGRU_DATA.
    """

    hidden: int = 12
    listeners: int = 12
    epochs: int = 16
    batch: int = 50
    learning_rate: float = 3e-3
    readout_rate: float = 1e-2
    clip: float = 1.0
    tau_s: float = 1.0
    tau_m: float = 1.0
    tau_listen: float = 2.0
    recurrent: float = 0.3
    engine: EngineName = "auto"
    seed: int = 0
    freeze: bool = False
    tune: bool = False
    data: str = ""
    output: str = "report/continuous"


POKER = Config(hidden=48, epochs=40, batch=12, tau_s=2.0, tau_m=2.0, tau_listen=15.0)


# Tasks: a sample is a list of events (time, channel) and a label


@dataclasses.dataclass
class Sample:
    times: Tensor
    channels: Tensor
    label: int


@dataclasses.dataclass
class Task:
    """The samples of a task. ``value`` is the value of every input event, ``horizon`` the duration of a sample.

    ``recordings`` are the raw training data; if present, they are augmented in every epoch.
    """

    name: str
    classes: tuple[str, ...]
    channels: int
    horizon: float
    time_unit: str
    value: float
    train: list[Sample]
    validation: list[Sample]
    test: list[Sample]
    recordings: list[Recording] | None = None


def make_timing_task(config: Config) -> Task:
    """One event on each of three channels, at least 0.3 apart. The class is their order."""
    orders = list(itertools.permutations(range(3)))

    def draw_samples(count: int, seed: int) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed + config.seed)
        samples: list[Sample] = []
        while len(samples) < count:
            times = torch.rand(3, generator=generator) * 4
            order = times.argsort()
            if times[order].diff().min() > 0.3:
                samples.append(Sample(times[order], order, orders.index(tuple(order.tolist()))))
        return samples

    return Task(
        name="timing",
        classes=tuple(" ".join("ABC"[c] for c in order) for order in orders),
        channels=3,
        horizon=5.0,
        time_unit="",
        value=2.0,
        train=draw_samples(900, 1000),
        validation=draw_samples(300, 2000),
        test=draw_samples(1000, 3000),
    )


CELL_SIZE = 5  # pixels
EVENTS_PER_POOLED_EVENT = 6


def pool_events(recording: Recording, shift: tuple[int, int] = (0, 0)) -> Sample:
    """Pool a recording: every sixth event of a cell of 5 x 5 pixels becomes an input event, at its exact time in ms."""
    x, y = recording.x + shift[0], recording.y + shift[1]
    inside = (x >= 0) & (x < PIXELS) & (y >= 0) & (y < PIXELS)
    side = PIXELS // CELL_SIZE
    cell = ((recording.polarity * side + y // CELL_SIZE) * side + x // CELL_SIZE)[inside]
    times = recording.times[inside].float() / 1000
    # The rank of each event within its cell: after sorting by cell, its position minus that of the cell's first event.
    order = cell.argsort(stable=True)
    sorted_rank = torch.arange(len(cell)) - torch.searchsorted(cell[order].contiguous(), cell[order].contiguous())
    rank = torch.empty_like(sorted_rank)
    rank[order] = sorted_rank
    keep = rank % EVENTS_PER_POOLED_EVENT == EVENTS_PER_POOLED_EVENT - 1
    return Sample(times[keep], cell[keep], recording.suit)


def make_poker_task(config: Config) -> Task:
    """Four card suits. Three training recordings of each suit are held out for validation."""
    data = egru.data.pokerdvs(config.data or None)
    generator = torch.Generator().manual_seed(1000 + config.seed)
    train, validation = [], []
    for suit in range(len(SUITS)):
        recordings = [r for r in data.train if r.suit == suit]
        order = torch.randperm(len(recordings), generator=generator).tolist()
        validation += [recordings[i] for i in order[:3]]
        train += [recordings[i] for i in order[3:]]
    return Task(
        name="poker",
        classes=SUITS,
        channels=2 * (PIXELS // CELL_SIZE) ** 2,
        horizon=30.0,
        time_unit="ms",
        value=1.0,
        train=[pool_events(r) for r in train],
        validation=[pool_events(r) for r in validation],
        test=[pool_events(r) for r in data.test],
        recordings=train,
    )


TASKS = {"timing": make_timing_task, "poker": make_poker_task}


# Model


class Classifier(nn.Module):
    """A recurrent layer that emits events, a layer of listeners that only integrates them, and a linear readout.

    The exact gradient does not account for events that appear or vanish, so the loss should hardly change when they
    do. Two choices take care of that. The biases of the recurrent layer let its units emit events all the time, so
    events appear and vanish only at the end of a run. The thresholds of the listeners are out of reach, and their
    states hardly respond to an event that has just arrived.
    """

    def __init__(self, task: Task, config: Config) -> None:
        super().__init__()
        self.horizon, self.value = task.horizon, task.value
        self.layer = ContinuousEGRU(
            task.channels,
            config.hidden,
            config.tau_s,
            config.tau_m,
            threshold=egru.Threshold(mean=-1.0, std=0.25),
            engine=config.engine,
        )
        listeners = ContinuousEGRU(
            config.hidden,
            config.listeners,
            config.tau_s,
            config.tau_listen,
            threshold=egru.Threshold.constant(1.5),  # |c| < 1, so a listener never emits an event
            engine=config.engine,
        )
        with torch.no_grad():
            self.layer.V.mul_(config.recurrent)
            self.layer.b[0], self.layer.b[2] = 0.5, 0.8  # gates u and z: c rises to tanh(0.8) = 0.66, above threshold
            listeners.U.mul_(1.5)
        self.layer.requires_grad_(not config.freeze)
        self.stack = ContinuousStack(self.layer, listeners)
        self.readout_times = [0.8 * task.horizon, task.horizon]
        self.readout = nn.Linear(len(self.readout_times) * config.listeners, len(task.classes))

    def run_layers(self, samples: list[Sample]) -> tuple[ContinuousOutput, ...]:
        """Return the output of the recurrent layer and that of the listeners."""
        events = InputEvents.from_lists(
            times=[s.times for s in samples],
            channels=[s.channels for s in samples],
            values=[torch.full_like(s.times, self.value) for s in samples],
        )
        return self.stack(events, self.horizon, self.readout_times)

    def forward(self, samples: list[Sample]) -> tuple[Tensor, ContinuousOutput]:
        """Return the class scores and the output of the recurrent layer."""
        layer, listeners = self.run_layers(samples)
        return self.readout(3 * listeners.c.flatten(1)), layer


def labels_of(samples: list[Sample]) -> Tensor:
    return torch.tensor([s.label for s in samples])


# Training


@torch.no_grad()
def evaluate(model: Classifier, samples: list[Sample]) -> tuple[float, float]:
    """Return the accuracy and the number of events per sample."""
    model.eval()
    correct, events = 0, 0
    for start in range(0, len(samples), 100):
        batch = samples[start : start + 100]
        scores, output = model(batch)
        correct += int((scores.argmax(1) == labels_of(batch)).sum())
        events += len(output.times)
    return correct / len(samples), events / len(samples)


def epoch_samples(task: Task, generator: torch.Generator) -> list[Sample]:
    """Return the training samples of an epoch. Recordings are shifted by up to two pixels."""
    if task.recordings is None:
        return task.train
    shifts = torch.randint(-2, 3, (len(task.recordings), 2), generator=generator).tolist()
    return [pool_events(r, (dx, dy)) for r, (dx, dy) in zip(task.recordings, shifts, strict=True)]


def train_batch(model: Classifier, batch: list[Sample], optimizer: torch.optim.Optimizer, clip: float) -> float:
    """Take one training step and return the loss."""
    scores, _ = model(batch)
    loss = F.cross_entropy(scores, labels_of(batch))
    optimizer.zero_grad()
    loss.backward()  # exact, through the event times of both layers
    # The gradient of an event grows without bound as its unit barely reaches the threshold: always clip.
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def train(model: Classifier, task: Task, config: Config, progress: Progress) -> list[dict[str, float]]:
    """Train with Adam and a one-cycle schedule, then restore the epoch with the best validation accuracy."""
    batches = -(-len(task.train) // config.batch)
    rates = [config.learning_rate, config.readout_rate]
    upper = [*model.stack.layers[1].parameters(), *model.readout.parameters()]
    optimizer = torch.optim.Adam([{"params": model.layer.parameters()}, {"params": upper}], config.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=config.epochs * batches)
    generator = torch.Generator().manual_seed(config.seed)
    bar = progress.add_task(task.name, total=config.epochs, accuracy="")
    history, best, best_weights = [], (-1.0, 0.0), copy.deepcopy(model.state_dict())
    for _ in range(config.epochs):
        model.train()
        samples, total = epoch_samples(task, generator), 0.0
        for rows in torch.randperm(len(samples), generator=generator).split(config.batch):
            batch = [samples[i] for i in rows.tolist()]
            total += train_batch(model, batch, optimizer, config.clip) * len(batch)
            schedule.step()
        accuracy, events = evaluate(model, task.validation)
        history.append({"loss": total / len(samples), "validation": accuracy, "events": events})
        score = (accuracy, -history[-1]["loss"])  # the loss decides between equal accuracies
        if score > best:
            best, best_weights = score, copy.deepcopy(model.state_dict())
        progress.update(bar, advance=1, accuracy=f"{100 * accuracy:.1f} %")
    model.load_state_dict(best_weights)
    return history


# Plot and command line


@torch.no_grad()
def plot_raster(model: Classifier, task: Task, sample: Sample, path: Path) -> None:
    """Plot the input events of a sample above the events of the recurrent layer."""
    model.eval()
    output, _ = model.run_layers([sample])
    activity = output.units.bincount(minlength=model.layer.hidden_size)
    row_of_unit = activity.argsort(descending=True, stable=True).argsort()
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.6])
        size = 60 if len(sample.times) < 10 else 4
        above.scatter(sample.times, sample.channels, s=size, marker="|", color=LIGHT.dense)
        above.set_ylabel("channel")
        above.set_ylim(-0.5, task.channels - 0.5)
        above.set_title(f"{task.classes[sample.label]}: {len(sample.times)} events in, {len(output.times)} out")
        below.scatter(output.times, row_of_unit[output.units], s=40, marker="|", color=LIGHT.event[0])
        below.set_ylim(model.layer.hidden_size - 0.5, -0.5)
        below.set_ylabel("unit, most active first")
        below.set_xlabel(f"time, {task.time_unit}" if task.time_unit else "time, in time constants")
        below.set_xlim(0, task.horizon)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def run(name: str, config: Config, console: Console) -> dict[str, object]:
    """Train and test on one task, write the results, and return them."""
    task = TASKS[name](config)
    torch.manual_seed(config.seed)
    model = Classifier(task, config)
    console.print(
        f"{name}: {len(task.train)} training, {len(task.validation)} validation and {len(task.test)} test samples; "
        f"{len(task.classes)} classes; {config.hidden} units, {config.epochs} epochs, seed {config.seed}"
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
        TextColumn("validation {task.fields[accuracy]}"),
    )
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        history = train(model, task, config, progress)
    seconds = time.perf_counter() - start
    validation, _ = evaluate(model, task.validation)
    if config.tune:
        console.print(f"{name}: validation {100 * validation:.1f} %, {seconds:.0f} s")
        return {"validation": validation, "history": history}
    test, events = evaluate(model, task.test)
    folder = Path(config.output)
    plot_raster(model, task, task.test[0], folder / f"{name}.png")
    result = {
        "task": name,
        "seed": config.seed,
        "test": test,
        "validation": validation,
        "chance": 1 / len(task.classes),
        "events_per_sample": events,
        "seconds": round(seconds, 1),
        "config": dataclasses.asdict(config),
        "history": history,
    }
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    console.print(
        f"{name}: test {100 * test:.1f} % (chance {100 / len(task.classes):.1f} %), "
        f"validation {100 * validation:.1f} %, {events:.0f} events per sample, {seconds:.0f} s; "
        f"raster: {folder / f'{name}.png'}"
    )
    return result


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=tuple(TASKS))
    for field in dataclasses.fields(Config):
        option = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(option, action="store_true", default=None)
        else:
            text = f"default {field.default}, for poker {getattr(POKER, field.name)}"
            parser.add_argument(option, type=type(field.default), help=text)
    options = vars(parser.parse_args(arguments))
    task = options.pop("task")
    defaults = POKER if task == "poker" else Config()
    config = dataclasses.replace(defaults, **{name: value for name, value in options.items() if value is not None})
    torch.set_num_threads(1)  # the tensors are too small for a second thread to help
    return run(task, config, Console())


if __name__ == "__main__":
    main()
