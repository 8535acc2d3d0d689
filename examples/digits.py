"""First run: a GRU and an EGRU of the same size read handwritten digits one pixel at a time.

    python examples/digits.py            # about two minutes on two cores, then open report/digits/index.html
    python examples/digits.py --device cuda --precision bfloat16     # the same on a GPU, products in bfloat16

Both models have the same readout, optimiser, schedule and budget. Validation watches; the test split is used once.
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
    """What the run does; every field is a command-line option."""

    hidden: int = 128
    epochs: int = 100
    batch: int = 32
    learning_rate: float = 1e-2
    clip: float = 1.0
    label_smoothing: float = 0.1
    trace: float = 200.0
    """Time constant of the output trace, in steps."""
    threshold: float = -4.0
    """Mean of the unconstrained thresholds at the start: sigmoid(-4) is 0.02."""
    zoneout: float = 0.1
    permuted: bool = False
    seed: int = 0
    device: str = "cpu"
    precision: str = "float32"
    """Of products: "bfloat16" runs the models under autocast, with float32 parameters and states."""
    report: str = "report/digits"

    def autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.precision == "bfloat16")


CHOICES = {"precision": ("float32", "bfloat16")}


class Classifier(nn.Module):
    """Recurrent layer, output trace at the last step, linear readout."""

    def __init__(self, rnn: nn.Module, hidden: int, trace: float, classes: int) -> None:
        super().__init__()
        self.rnn, self.decay = rnn, math.exp(-1 / trace)
        self.normalise, self.readout = nn.BatchNorm1d(hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        # A weighted mean of the events, not their sum: small enough that units which hardly ever fire stay below the
        # normalisation's floor instead of being blown up to the size of the others.
        gain = (1 - self.decay) / (1 - self.decay ** x.shape[1])
        trace = egru.exponential_trace(y, self.decay, gain=gain, last=True, batch_first=True)
        return self.readout(self.normalise(trace))


def event_layer(config: Config) -> egru.EGRU:
    """Settings that train on sequences of this length: a narrow, low surrogate, low thresholds, no clearing."""
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
    # Uniform-gate initialisation: update gates spread over (0, 1), so that memories of every length are there.
    with torch.no_grad():
        z = torch.empty(config.hidden).uniform_(1 / config.hidden, 1 - 1 / config.hidden)
        layer.get_parameter("bias_ih_l0")[config.hidden : 2 * config.hidden] = torch.logit(z)
        layer.get_parameter("bias_hh_l0")[config.hidden : 2 * config.hidden] = 0
    return layer


def on_device(data: Classification, device: str) -> Classification:
    splits = (Split(*(part.to(device) for part in split)) for split in (data.train, data.validation, data.test))
    return Classification(data.name, data.classes, *splits)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split, config: Config) -> float:
    model.eval()
    with config.autocast():
        scores = model(split.x)
    return (scores.argmax(-1) == split.y).double().mean().item()


def train(model: nn.Module, data: Classification, config: Config, progress: Progress, task) -> list[Epoch]:
    """Adam with one cycle of the learning rate and clipped gradients."""
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
    """The events of the first correctly read ``digit`` in ``split``, in float32."""
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
            parser.add_argument(option, action="store_true", help="pixels in one fixed random order")
        else:
            parser.add_argument(
                option,
                type=type(field.default),
                default=field.default,
                choices=CHOICES.get(field.name),
                help=f"default {field.default}",
            )
    config = Config(**vars(parser.parse_args(arguments)))
    data = on_device(egru.data.digits(permuted=config.permuted), config.device)
    console = Console()
    console.print(
        f"{data.name}: {len(data.train.y)} sequences of {data.train.x.shape[1]} pixels to learn from, "
        f"{len(data.test.y)} to test on; {config.hidden} units, {config.epochs} epochs, seed {config.seed}, "
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
        "Digits, one pixel at a time",
        [gru, event],
        [raster(model, data.validation, digit) for digit in (3, 8)],
        command=" ".join(["python examples/digits.py", *(sys.argv[1:] if arguments is None else arguments)]),
        config=dataclasses.asdict(config),
    )
    console.print(f"report: {page}")
    return page


if __name__ == "__main__":
    main()
