"""What a person sees of a run while it goes on: a bar and a line per epoch; TensorBoard by option."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol


class Progress(Protocol):
    def step(self, epochs: float) -> None:
        """So many epochs are done, fractions included."""
        ...

    def epoch(self, line: dict[str, Any]) -> None:
        """An epoch is done and saved; ``line`` is what the metrics hold of it."""
        ...


class Silent:
    """Shows nothing."""

    def step(self, epochs: float) -> None:
        pass

    def epoch(self, line: dict[str, Any]) -> None:
        pass


class Lines(Silent):
    """A line per epoch."""

    def epoch(self, line: dict[str, Any]) -> None:
        print(words(line), flush=True)


def words(line: dict[str, Any]) -> str:
    """An epoch on one line."""
    trained, scores, activity = line["train"], line["validation"], line["activity"]
    quality = (
        f"accuracy {100 * scores['accuracy']:.1f} %"
        if scores["perplexity"] is None
        else f"perplexity {scores['perplexity']:.1f}"
    )
    parts = [
        f"epoch {line['epoch']}: loss {trained['loss']:.3f}, validation {quality}",
        f"{100 * activity['activity_sparsity']:.0f} % silent",
        f"gradient {trained['gradient_norm']:.2g} (largest {trained['gradient_norm_max']:.2g})",
        f"{line['seconds']:.1f} s, {100 * trained['waited'] / max(line['seconds'], 1e-9):.0f} % waiting for data",
    ]
    return ", ".join(parts)


@contextlib.contextmanager
def bar(name: str, epochs: int) -> Iterator[Progress]:
    """A progress bar under one line per epoch; without rich, the lines alone."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.1f} / {task.total:.0f}"),
               TextColumn("epochs"), TimeRemainingColumn())  # fmt: skip
    with Bar(*columns, console=Console(soft_wrap=True), transient=True) as shown:
        task = shown.add_task(name, total=epochs)

        class Shown:
            def step(self, epochs: float) -> None:
                shown.update(task, completed=epochs)

            def epoch(self, line: dict[str, Any]) -> None:
                shown.update(task, completed=line["epoch"])
                shown.console.print(words(line), highlight=False)

        yield Shown()


@contextlib.contextmanager
def tensorboard(inner: Progress, folder: Path) -> Iterator[Progress]:
    """``inner``, with every epoch's metrics also written for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs tensorboard: pip install 'egru[tensorboard]'") from error
    with SummaryWriter(str(folder)) as writer:

        class Both:
            def step(self, epochs: float) -> None:
                inner.step(epochs)

            def epoch(self, line: dict[str, Any]) -> None:
                inner.epoch(line)
                for group in ("train", "validation", "activity"):
                    for name, value in line[group].items():
                        if value is not None:
                            writer.add_scalar(f"{group}/{name}", value, line["epoch"])
                for layer, sparsities in line["layers"].items():
                    for name, value in sparsities.items():
                        if value is not None:
                            writer.add_scalar(f"{layer}/{name}", value, line["epoch"])

        yield Both()
