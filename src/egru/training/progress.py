"""Progress display: a bar and one line per epoch, and optionally TensorBoard."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from egru import format
from egru.records import to_plain
from egru.training.records import EpochMetrics


class Progress(Protocol):
    """Receives the progress of :func:`egru.training.train`."""

    def step(self, epochs: float) -> None:
        """Called after every optimiser step with the number of epochs done, including fractions."""
        ...

    def epoch(self, metrics: EpochMetrics) -> None:
        """Called after every epoch, once its metrics and checkpoint are written."""
        ...


class NoProgress:
    """Displays nothing. Base class for displays that override one method.

    Example:
        >>> class Losses(egru.training.NoProgress):
        ...     def epoch(self, metrics):
        ...         print(f"epoch {metrics.epoch}: {metrics.train.loss:.3f}")
        >>> result = egru.training.train(model, task, training, run, Losses())
    """

    def step(self, epochs: float) -> None:
        pass

    def epoch(self, metrics: EpochMetrics) -> None:
        pass


_STEP_LINE_SECONDS = 60.0
"""Seconds without a line after which :class:`PrintedProgress` reports steps."""


class PrintedProgress(NoProgress):
    """Prints one line per epoch. During long epochs, reports progress on the standard error once per minute.

    Args:
        name: Label of the lines within epochs.
        epochs: Number of epochs in total, for an estimate of the remaining time. None for no estimate.
    """

    def __init__(self, name: str = "training", epochs: int | None = None) -> None:
        self.name, self.epochs = name, epochs
        self.printed = time.monotonic()
        self.first: tuple[float, float] | None = None
        """Time of the first step and number of epochs done then: a resumed run does not start at 0."""

    def step(self, epochs: float) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now, epochs
        if now - self.printed < _STEP_LINE_SECONDS:
            return
        self.printed = now
        start, done_before = self.first
        line = f"{self.name}: {epochs:.2f} epochs done"
        if self.epochs is not None:
            line = f"{self.name}: {epochs:.2f} of {self.epochs} epochs done"
            if epochs > done_before:
                left = (now - start) / (epochs - done_before) * (self.epochs - epochs)
                line += f", about {format.seconds(left)} left"
        print(line, file=sys.stderr, flush=True)

    def epoch(self, metrics: EpochMetrics) -> None:
        self.printed = time.monotonic()
        print(describe_epoch(metrics), flush=True)


def describe_epoch(metrics: EpochMetrics) -> str:
    """Return the metrics of an epoch as one line of text."""
    train, scores = metrics.train, metrics.validation
    quality = f"accuracy {format.percent(scores.accuracy)}"
    if scores.perplexity is not None:
        quality = f"perplexity {scores.perplexity:.1f}"
    sparsity = f"activity sparsity {100 * metrics.activity.activity_sparsity:.0f} %"
    if metrics.activity.weight_sparsity is not None:
        sparsity += f", weight sparsity {100 * metrics.activity.weight_sparsity:.0f} %"
    waiting = train.waited / max(metrics.seconds, 1e-9)
    return (
        f"epoch {metrics.epoch}: loss {train.loss:.3f}, validation {quality}, {sparsity}, "
        f"gradient norm {train.gradient_norm:.2g} (max {train.gradient_norm_max:.2g}), "
        f"{metrics.seconds:.1f} s, {100 * waiting:.0f} % waiting for data"
    )


@contextlib.contextmanager
def progress_bar(name: str, epochs: int) -> Iterator[Progress]:
    """Display one line per epoch and a progress bar. Without rich or a terminal, see :class:`PrintedProgress`.

    Args:
        name: Label of the bar.
        epochs: Number of epochs in total.

    Example:
        >>> with egru.training.progress_bar("digits", training.epochs) as progress:
        ...     result = egru.training.train(model, task, training, run, progress)
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield PrintedProgress(name, epochs)
        return
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        yield PrintedProgress(name, epochs)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.1f} / {task.total:.0f}"),
               TextColumn("epochs"), TimeRemainingColumn())  # fmt: skip
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=epochs)

        class BarProgress:
            def step(self, epochs: float) -> None:
                bar.update(task, completed=epochs)

            def epoch(self, metrics: EpochMetrics) -> None:
                bar.update(task, completed=metrics.epoch)
                bar.console.print(describe_epoch(metrics), highlight=False)

        yield BarProgress()


_LINE_SECONDS = 10.0
"""Seconds between two lines of :func:`evaluation_progress` without a bar."""


@contextlib.contextmanager
def evaluation_progress(name: str) -> Iterator[Callable[[float], None]]:
    """Display the progress of an evaluation on the standard error.

    In a terminal with rich it is a bar, otherwise one line every ten seconds.

    Args:
        name: Label of the display.

    Yields:
        A function of the fraction that is done.

    Example:
        >>> with evaluation_progress("test") as progress:
        ...     egru.training.score(model, task, "test", progress)
    """
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=1.0)
            yield lambda fraction: bar.update(task, completed=fraction)
        return
    printed = time.monotonic()

    def print_line(fraction: float) -> None:
        nonlocal printed
        if time.monotonic() - printed >= _LINE_SECONDS:
            printed = time.monotonic()
            print(f"{name}: {100 * fraction:.0f} % done", file=sys.stderr, flush=True)

    yield print_line


@contextlib.contextmanager
def tensorboard(inner: Progress, folder: Path) -> Iterator[Progress]:
    """Write the metrics of every epoch for TensorBoard, in addition to another progress display.

    Args:
        inner: Display that also receives the progress.
        folder: Folder of the event files.

    Raises:
        ImportError: If tensorboard is not installed.

    Yields:
        A display for :func:`train`.

    Example:
        >>> with egru.training.progress_bar("digits", training.epochs) as bar:
        ...     with egru.training.tensorboard(bar, Path("tensorboard")) as progress:  # doctest: +SKIP
        ...         egru.training.train(model, task, training, run, progress)
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard requires tensorboard: pip install 'egru[tensorboard]'") from error
    with SummaryWriter(str(folder)) as writer:

        class TensorBoardProgress:
            def step(self, epochs: float) -> None:
                inner.step(epochs)

            def epoch(self, metrics: EpochMetrics) -> None:
                inner.epoch(metrics)
                for name, value in _scalars(metrics).items():
                    if value is not None:
                        writer.add_scalar(name, value, metrics.epoch)

        yield TensorBoardProgress()


def _scalars(metrics: EpochMetrics) -> dict[str, float | None]:
    """Return the numbers of an epoch by their names in TensorBoard."""
    parts = {"train": metrics.train, "validation": metrics.validation, "activity": metrics.activity, **metrics.layers}
    return {f"{part}/{name}": value for part, values in parts.items() for name, value in to_plain(values).items()}
