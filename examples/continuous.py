"""Training in continuous time: events in, exact gradients back, on one core in minutes.

    python examples/continuous.py timing                          # which of six orders did three events come in?
    EGRU_DATA=... python examples/continuous.py poker             # suits of cards from an event camera, POKER-DVS

In the timing task every sample has the same three events of the same size; only their times tell the classes apart. In
the second, microsecond events of 35 by 35 pixels are pooled to 7 by 7 cells of two polarities. Validation picks the
epoch; the test part is used once, at the end. A raster of one test sample is written beside the numbers.

    python examples/continuous.py timing --freeze                 # the control: the readout alone learns
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
from egru.data.pokerdvs import PIXELS, SUITS, Recording
from egru.report.theme import LIGHT


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run does; every field is a command-line option."""

    hidden: int = 12
    listeners: int = 12
    epochs: int = 16
    batch: int = 50
    learning_rate: float = 3e-3
    """Of the layer."""
    readout_rate: float = 1e-2
    """Of the listeners and the linear map."""
    clip: float = 1.0
    tau_s: float = 1.0
    tau_m: float = 1.0
    tau_listen: float = 2.0
    recurrent: float = 0.3
    """Recurrent weights at the start, in units of the layer's own."""
    engine: str = "auto"
    seed: int = 0
    freeze: bool = False
    """Leave the layer as it starts and train the readout alone: the control."""
    tune: bool = False
    """Stop before the test part is touched."""
    data: str = ""
    """Folder above pokerdvs; empty takes EGRU_DATA."""
    output: str = "report/continuous"


POKER = Config(hidden=48, epochs=40, batch=12, tau_s=2.0, tau_m=2.0, tau_listen=15.0)


@dataclasses.dataclass
class Sample:
    times: Tensor
    channels: Tensor
    label: int


@dataclasses.dataclass
class Task:
    """Samples of three parts, and how long one lasts, in units of time the time constants are given in."""

    name: str
    classes: tuple[str, ...]
    channels: int
    horizon: float
    unit: str
    value: float
    """Of every input event."""
    train: list[Sample]
    validation: list[Sample]
    test: list[Sample]
    recordings: list[Recording] | None = None
    """What the training samples were made of, to make them anew, a little shifted, in every epoch."""


# The timing task


def timing(config: Config) -> Task:
    """One event on each of three channels, at least 0.3 apart; the class is their order."""
    orders = list(itertools.permutations(range(3)))

    def draw(count: int, seed: int) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed + config.seed)
        samples: list[Sample] = []
        while len(samples) < count:
            times = torch.rand(3, generator=generator) * 4
            order = times.argsort()
            if times[order].diff().min() > 0.3:
                samples.append(Sample(times[order], order, orders.index(tuple(order.tolist()))))
        return samples

    names = tuple(" ".join("ABC"[c] for c in order) for order in orders)
    return Task("timing", names, 3, 5.0, "", 2.0, draw(900, 1000), draw(300, 2000), draw(1000, 3000))


# The cards

CELL, BUNDLE = 5, 6


def pooled(recording: Recording, shift: tuple[int, int] = (0, 0)) -> Sample:
    """One event, at its exact time in milliseconds, for every six that a cell of 5 by 5 pixels sees."""
    x, y = recording.x + shift[0], recording.y + shift[1]
    inside = (x >= 0) & (x < PIXELS) & (y >= 0) & (y < PIXELS)
    side = PIXELS // CELL
    cell = ((recording.polarity * side + y // CELL) * side + x // CELL)[inside]
    times = recording.times[inside].float() / 1000
    # Which event of its cell each one is: sorted by cell, the position minus that of the cell's first.
    order = cell.argsort(stable=True)
    ranked = torch.arange(len(cell)) - torch.searchsorted(cell[order].contiguous(), cell[order].contiguous())
    rank = torch.empty_like(ranked)
    rank[order] = ranked
    keep = rank % BUNDLE == BUNDLE - 1
    return Sample(times[keep], cell[keep], recording.suit)


def poker(config: Config) -> Task:
    """A quarter of the training recordings of each suit is kept for validation."""
    data = egru.data.pokerdvs(config.data or None)
    generator = torch.Generator().manual_seed(1000 + config.seed)
    train, validation = [], []
    for suit in range(len(SUITS)):
        mine = [r for r in data.train if r.suit == suit]
        order = torch.randperm(len(mine), generator=generator).tolist()
        validation += [mine[i] for i in order[:3]]
        train += [mine[i] for i in order[3:]]
    parts = [[pooled(r) for r in part] for part in (train, validation, data.test)]
    return Task("poker", SUITS, 2 * (PIXELS // CELL) ** 2, 30.0, "ms", 1.0, *parts, recordings=train)


# Training


class Classifier(nn.Module):
    """Units that fire by themselves and are pushed by the input, units that only listen, and a linear map of those.

    Exact gradients do not see events that appear or vanish, so the loss should not jump when they do. Units that fire
    all the time gain and lose events only at the end of a run, and a listener, whose threshold is out of reach, hardly
    feels an event that has just come.
    """

    def __init__(self, task: Task, config: Config) -> None:
        super().__init__()
        self.horizon, self.value = task.horizon, task.value
        self.layer = ContinuousEGRU(
            task.channels, config.hidden, config.tau_s, config.tau_m,
            threshold=egru.Threshold(mean=-1.0, std=0.25), engine=config.engine,
        )  # fmt: skip
        listeners = ContinuousEGRU(
            config.hidden, config.listeners, config.tau_s, config.tau_listen,
            threshold=egru.Threshold.constant(1.5), engine=config.engine,
        )  # fmt: skip
        with torch.no_grad():
            self.layer.V.mul_(config.recurrent)
            self.layer.b[0], self.layer.b[2] = 0.5, 0.8
            listeners.U.mul_(1.5)
        self.layer.requires_grad_(not config.freeze)
        self.stack = ContinuousStack(self.layer, listeners)
        self.readouts = [0.8 * task.horizon, task.horizon]
        self.readout = nn.Linear(len(self.readouts) * config.listeners, len(task.classes))

    def events(self, samples: list[Sample]) -> tuple[ContinuousOutput, ...]:
        given = InputEvents.from_lists(
            [s.times for s in samples],
            [s.channels for s in samples],
            [torch.full_like(s.times, self.value) for s in samples],
        )
        return self.stack(given, self.horizon, self.readouts)

    def forward(self, samples: list[Sample]) -> tuple[Tensor, ContinuousOutput]:
        layer, listeners = self.events(samples)
        return self.readout(3 * listeners.c.flatten(1)), layer


def labels(samples: list[Sample]) -> Tensor:
    return torch.tensor([s.label for s in samples])


@torch.no_grad()
def evaluate(model: Classifier, samples: list[Sample]) -> tuple[float, float]:
    """Accuracy, and events per sample."""
    model.eval()
    right, events = 0, 0
    for start in range(0, len(samples), 100):
        part = samples[start : start + 100]
        scores, output = model(part)
        right += int((scores.argmax(1) == labels(part)).sum())
        events += len(output.times)
    return right / len(samples), events / len(samples)


def shifted(task: Task, generator: torch.Generator) -> list[Sample]:
    """The training samples of an epoch: recordings moved by up to two pixels, where there are any."""
    if task.recordings is None:
        return task.train
    moves = torch.randint(-2, 3, (len(task.recordings), 2), generator=generator).tolist()
    return [pooled(r, (dx, dy)) for r, (dx, dy) in zip(task.recordings, moves, strict=True)]


def train(model: Classifier, task: Task, config: Config, progress: Progress) -> list[dict[str, float]]:
    """Adam with one cycle of the learning rate and clipped gradients; ends with the epoch validation liked best."""
    batches = -(-len(task.train) // config.batch)
    rates = [config.learning_rate, config.readout_rate]
    above = [*model.stack.layers[1].parameters(), *model.readout.parameters()]
    optimiser = torch.optim.Adam([{"params": model.layer.parameters()}, {"params": above}], config.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rates, total_steps=config.epochs * batches)
    generator = torch.Generator().manual_seed(config.seed)
    bar = progress.add_task(task.name, total=config.epochs, accuracy="")
    history, best, best_state = [], (-1.0, 0.0), copy.deepcopy(model.state_dict())
    for _ in range(config.epochs):
        model.train()
        samples, total = shifted(task, generator), 0.0
        for rows in torch.randperm(len(samples), generator=generator).split(config.batch):
            part = [samples[i] for i in rows.tolist()]
            scores, _ = model(part)
            loss = F.cross_entropy(scores, labels(part))
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimiser.step()
            schedule.step()
            total += loss.item() * len(part)
        accuracy, events = evaluate(model, task.validation)
        history.append({"loss": total / len(samples), "validation": accuracy, "events": events})
        if (accuracy, -history[-1]["loss"]) > best:
            best, best_state = (accuracy, -history[-1]["loss"]), copy.deepcopy(model.state_dict())
        progress.update(bar, advance=1, accuracy=f"{100 * accuracy:.1f} %")
    model.load_state_dict(best_state)
    return history


@torch.no_grad()
def draw(model: Classifier, task: Task, sample: Sample, path: Path) -> None:
    """Input events above, the layer's events below, on one axis of time."""
    model.eval()
    output, _ = model.events([sample])
    order = output.units.bincount(minlength=model.layer.hidden_size).argsort(descending=True, stable=True).argsort()
    with LIGHT.context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.6])
        above.scatter(
            sample.times, sample.channels, s=60 if len(sample.times) < 10 else 4, marker="|", color=LIGHT.dense
        )
        above.set_ylabel("channel")
        above.set_ylim(-0.5, task.channels - 0.5)
        above.set_title(f"{task.classes[sample.label]}: {len(sample.times)} events in, {len(output.times)} out")
        below.scatter(output.times, order[output.units], s=40, marker="|", color=LIGHT.event[0])
        below.set_ylim(model.layer.hidden_size - 0.5, -0.5)
        below.set_ylabel("unit, busiest first")
        below.set_xlabel(f"time, {task.unit}" if task.unit else "time, in time constants")
        below.set_xlim(0, task.horizon)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def run(name: str, config: Config, console: Console) -> dict[str, object]:
    task = {"timing": timing, "poker": poker}[name](config)
    torch.manual_seed(config.seed)
    model = Classifier(task, config)
    console.print(
        f"{name}: {len(task.train)} samples to learn from, {len(task.validation)} to validate, {len(task.test)} to "
        f"test on; {len(task.classes)} classes; {config.hidden} units, {config.epochs} epochs, seed {config.seed}"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"),
               TimeRemainingColumn(), TextColumn("validation {task.fields[accuracy]}"))  # fmt: skip
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
    draw(model, task, task.test[0], folder / f"{name}.png")
    result = {
        "task": name, "seed": config.seed, "test": test, "validation": validation, "chance": 1 / len(task.classes),
        "events_per_sample": events, "seconds": round(seconds, 1), "config": dataclasses.asdict(config),
        "history": history,
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    console.print(
        f"{name}: test {100 * test:.1f} % (chance {100 / len(task.classes):.1f} %), "
        f"validation {100 * validation:.1f} %, {events:.0f} events a sample, {seconds:.0f} s; "
        f"raster: {folder / f'{name}.png'}"
    )
    return result


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("timing", "poker"))
    for field in dataclasses.fields(Config):
        text = f"default {field.default}, poker {getattr(POKER, field.name)}"
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action="store_true", default=None)
        else:
            parser.add_argument(option, type=type(field.default), help=text)
    given = vars(parser.parse_args(arguments))
    task = given.pop("task")
    base = POKER if task == "poker" else Config()
    config = dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
    torch.set_num_threads(1)  # small tensors: a second thread only waits
    return run(task, config, Console())


if __name__ == "__main__":
    main()
