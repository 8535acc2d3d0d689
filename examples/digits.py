"""Train a GRU and an EGRU of the same size to classify handwritten digits, one pixel per step.

    python examples/digits.py            # about three minutes on two cores; then open report/digits/index.html
    python examples/digits.py --device cuda --precision bfloat16     # on a GPU, with matrix products in bfloat16

Both models have the same readout, optimiser, schedule and number of epochs. The validation split is evaluated after
every epoch, the test split once, at the end.
"""

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import egru
from egru.data import Classification, Split
from egru.report import Epoch, Raster, RunReport, print_table, write_report


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the demo. Every field is a command-line option."""

    hidden: int = 128
    epochs: int = 100
    batch: int = 32
    learning_rate: float = 1e-2
    clip: float = 1.0
    label_smoothing: float = 0.1
    trace: float = 200.0
    """Time constant of the output trace, in steps."""
    threshold: float = -4.0
    """Mean of the initial unconstrained thresholds. A threshold is its sigmoid: sigmoid(-4) is 0.02."""
    zoneout: float = 0.1
    permuted: bool = False
    seed: int = 0
    device: str = "cpu"
    precision: str = "float32"
    """Precision of matrix products. With "bfloat16" the models run under autocast; parameters stay float32."""
    report: str = "report/digits"

    def autocast(self) -> torch.autocast:
        """Return the autocast context for :attr:`precision`."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.precision == "bfloat16")


CHOICES = {"precision": ("float32", "bfloat16")}


class Classifier(nn.Module):
    """A recurrent layer, an exponential trace of its outputs, and a linear readout of the last trace."""

    def __init__(self, rnn: nn.Module, hidden: int, trace: float, classes: int) -> None:
        super().__init__()
        self.rnn, self.decay = rnn, math.exp(-1 / trace)
        self.normalise, self.readout = nn.BatchNorm1d(hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        # Use a weighted mean of the events instead of their sum. The batch normalisation would otherwise scale rarely
        # active units up to the size of the others; a mean keeps their variance below the normalisation's epsilon.
        gain = (1 - self.decay) / (1 - self.decay ** x.shape[1])
        trace = egru.exponential_trace(y, self.decay, gain=gain, last=True, batch_first=True)
        return self.readout(self.normalise(trace))


def event_layer(config: Config) -> egru.EGRU:
    """Return an EGRU with settings that train over 64 steps: narrow, low surrogate; low thresholds; no clearing."""
    layer = egru.EGRU(
        1,
        config.hidden,
        batch_first=True,
        reset="none",
        reset_gate="after",
        threshold=egru.Threshold(mean=config.threshold),
        surrogate=egru.Surrogate(width=0.3, height=0.5),
        zoneout=config.zoneout,
    )
    # Spread the initial update gates uniformly over (0, 1), so that units start with time constants of every length.
    with torch.no_grad():
        z = torch.empty(config.hidden).uniform_(1 / config.hidden, 1 - 1 / config.hidden)
        layer.get_parameter("bias_ih_l0")[config.hidden : 2 * config.hidden] = torch.logit(z)
        layer.get_parameter("bias_hh_l0")[config.hidden : 2 * config.hidden] = 0
    return layer


def move_to(data: Classification, device: str) -> Classification:
    splits = (Split(*(part.to(device) for part in split)) for split in (data.train, data.validation, data.test))
    return Classification(data.name, data.classes, *splits)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split, config: Config) -> float:
    model.eval()
    with config.autocast():
        scores = model(split.x)
    return (scores.argmax(-1) == split.y).double().mean().item()


def train(model: nn.Module, data: Classification, config: Config, progress: Progress, task) -> list[Epoch]:
    """Train with Adam, a one-cycle learning rate and clipped gradients; return one record per epoch."""
    optimiser = torch.optim.Adam(model.parameters(), config.learning_rate)
    batches = math.ceil(len(data.train.y) / config.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, config.learning_rate, total_steps=config.epochs * batches, pct_start=0.1
    )
    history: list[Epoch] = []
    for epoch in range(1, config.epochs + 1):
        start, total = time.perf_counter(), 0.0
        model.train()
        for rows in torch.randperm(len(data.train.y)).to(config.device).split(config.batch):
            with config.autocast():
                scores = model(data.train.x[rows])
                loss = F.cross_entropy(scores, data.train.y[rows], label_smoothing=config.label_smoothing)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimiser.step()
            schedule.step()
            total += loss.item() * len(rows)
        with egru.ActivityMonitor(model) as activity:
            validation = accuracy(model, data.validation, config)
        sparsity = activity.summary().activity_sparsity if isinstance(model.rnn, egru.EGRU) else None
        history.append(Epoch(epoch, total / len(data.train.y), validation, sparsity, time.perf_counter() - start))
        progress.update(task, advance=1, accuracy=f"{100 * validation:.1f} %")
    return history


def run(name: str, data: Classification, config: Config, progress: Progress) -> tuple[RunReport, Classifier]:
    """Train and test one model; return its record and the model."""
    torch.manual_seed(config.seed)
    rnn = event_layer(config) if name == "EGRU" else nn.GRU(1, config.hidden, batch_first=True)
    model = Classifier(rnn, config.hidden, config.trace, data.classes).to(config.device)
    task = progress.add_task(name, total=config.epochs, accuracy="")
    start = time.perf_counter()
    history = train(model, data, config, progress, task)
    seconds = time.perf_counter() - start
    with egru.ActivityMonitor(model) as activity:
        test = accuracy(model, data.test, config)
    return RunReport(name, tuple(history), test, activity.summary(), seconds, config.seed), model


@torch.no_grad()
def raster(model: Classifier, split: Split, digit: int) -> Raster:
    """Record the events while the model reads the first correctly classified ``digit`` of ``split``."""
    model.eval()
    rows = (model(split.x).argmax(-1) == split.y) & (split.y == digit)
    index = int(rows.nonzero()[0]) if rows.any() else int((split.y == digit).nonzero()[0])
    x = split.x[index : index + 1]
    events, _ = model.rnn(x)
    pixels, shown = x[0].cpu(), events[0].cpu()
    return Raster(
        f"Events while reading a {digit}", pixels.numpy(), shown.numpy(), pixels.reshape(8, 8).numpy(), str(digit)
    )


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action="store_true", help="present the pixels in one fixed random order")
        else:
            parser.add_argument(
                option,
                type=type(field.default),
                default=field.default,
                choices=CHOICES.get(field.name),
                help=f"default {field.default}",
            )
    config = Config(**vars(parser.parse_args(arguments)))
    data = move_to(egru.data.digits(permuted=config.permuted), config.device)
    console = Console()
    console.print(
        f"{data.name}: {len(data.train.y)} training sequences of {data.train.x.shape[1]} pixels, "
        f"{len(data.test.y)} test sequences; {config.hidden} units, {config.epochs} epochs, seed {config.seed}, "
        f"{config.precision} on {config.device}"
    )
    columns = (TextColumn("{task.description:5}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"),
               TimeRemainingColumn(), TextColumn("validation {task.fields[accuracy]}"))  # fmt: skip
    with Progress(*columns, console=console) as progress:
        gru, _ = run("GRU", data, config, progress)
        event, model = run("EGRU", data, config, progress)
    print_table([gru, event])
    page = write_report(
        Path(config.report),
        "Digits, one pixel per step",
        [gru, event],
        [raster(model, data.validation, digit) for digit in (3, 8)],
        command=" ".join(["python examples/digits.py", *(sys.argv[1:] if arguments is None else arguments)]),
        config=dataclasses.asdict(config),
    )
    console.print(f"report: {page}")
    return page


if __name__ == "__main__":
    main()
