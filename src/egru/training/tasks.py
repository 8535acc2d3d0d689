"""What is learnt: how a data set becomes batches, a batch a loss, and a split a score."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.data import Classification, Split
from egru.training.config import ClassifierTraining, LanguageTraining, Training

SPLITS = ("train", "validation", "test")


class Batch(NamedTuple):
    """``scale`` multiplies the learning rate of the step; ``done`` is the share of the epoch that lies before it."""

    x: Tensor
    y: Tensor
    scale: float
    done: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a split came to. ``perplexity`` for language only, where accuracy counts next words guessed right."""

    loss: float
    accuracy: float
    perplexity: float | None = None


class Task(Protocol):
    """What the loop needs to know."""

    def batches(self) -> Iterator[Batch]:
        """One epoch of training, drawn from torch's generator."""
        ...

    def loss(self, model: nn.Module, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Any]:
        """The loss proper, what to add to it for training only, and the state for the next batch."""
        ...

    def evaluate(self, model: nn.Module, split: str) -> Scores: ...

    def merit(self, scores: Scores) -> tuple[float, ...]:
        """What validation decides by: larger is better."""
        ...


def detached(state: Any) -> Any:
    """A state, however nested, without its history: the seam of truncated back-propagation."""
    if isinstance(state, Tensor):
        return state.detach()
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*map(detached, state))
    return type(state)(map(detached, state)) if isinstance(state, list | tuple) else state


class Autocast:
    """The precision of a run, as a context that can be entered again and again."""

    def __init__(self, training: Training) -> None:
        self.device = torch.device(training.device)
        self.enabled = training.precision == "bfloat16"

    def __call__(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.enabled)


class ClassifierTask:
    """Labelled sequences; ``model`` maps ``(B, T, features)`` to scores ``(B, classes)`` or ``(B, T, classes)``.

    Scores of every step are judged by their mean over steps. ``augment`` maps a training batch to an altered one.
    """

    def __init__(
        self, data: Classification, training: ClassifierTraining, augment: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.training, self.augment, self.autocast = training, augment, Autocast(training)
        device = training.device
        self.splits = {name: Split(*(part.to(device) for part in getattr(data, name))) for name in SPLITS}

    def batches(self) -> Iterator[Batch]:
        x, y = self.splits["train"]
        rows = torch.randperm(len(y)).to(y.device)
        for start in range(0, len(y), self.training.batch):
            chosen = rows[start : start + self.training.batch]
            inputs = _floating(x[chosen])
            yield Batch(self.augment(inputs) if self.augment else inputs, y[chosen], 1.0, start / len(y))

    def loss(self, model: nn.Module, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Any]:
        with self.autocast():
            scores = _of_sequence(model(batch.x))
            loss = F.cross_entropy(scores, batch.y, label_smoothing=self.training.label_smoothing)
        return loss, loss.new_zeros(()), None

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> Scores:
        model.eval()
        x, y = self.splits[split]
        total, right = y.new_zeros((), dtype=torch.float64), y.new_zeros(())
        for start in range(0, len(y), self.training.evaluation_batch):
            rows = slice(start, start + self.training.evaluation_batch)
            with self.autocast():
                scores = _of_sequence(model(_floating(x[rows])))
            total += F.cross_entropy(scores.float(), y[rows], reduction="sum")
            right += (scores.argmax(-1) == y[rows]).sum()
        return Scores(total.item() / len(y), right.item() / len(y))

    def merit(self, scores: Scores) -> tuple[float, ...]:
        return (scores.accuracy, -scores.loss)


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _of_sequence(scores: Tensor) -> Tensor:
    return scores.mean(1) if scores.dim() == 3 else scores


class LanguageTask:
    """A text; ``model`` maps tokens ``(T, B)`` and a state to :class:`Prediction`-like results.

    The model returns ``(logits, output, state)``: scores ``(T, B, vocabulary)`` and the last layer's output
    ``(T, B, features)``. The state, whatever it holds, is carried from stretch to stretch without its history.
    """

    def __init__(self, data: Any, training: LanguageTraining) -> None:
        self.training, self.autocast = training, Autocast(training)
        columns = {"train": training.batch}
        self.splits = {
            name: in_columns(getattr(data, name), columns.get(name, training.evaluation_batch)).to(training.device)
            for name in SPLITS
        }

    def batches(self) -> Iterator[Batch]:
        text, bptt = self.splits["train"], self.training.bptt
        steps, start = len(text) - 1, 0
        while start < steps:
            length = self._length() if self.training.vary_bptt else bptt
            stop = min(start + length, steps)
            yield Batch(text[start:stop], text[start + 1 : stop + 1], length / bptt, start / steps)
            start = stop

    def _length(self) -> int:
        mean = self.training.bptt * (1.0 if torch.rand(()).item() < 0.95 else 0.5)
        return max(5, int(torch.normal(torch.tensor(mean), torch.tensor(5.0)).item()))

    def loss(self, model: nn.Module, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Any]:
        with self.autocast():
            logits, output, state = model(batch.x, state)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.y.flatten())
        extra = loss.new_zeros(())
        if self.training.activity_decay:
            extra = extra + self.training.activity_decay * output.square().mean()
        if self.training.temporal_decay and len(output) > 1:
            extra = extra + self.training.temporal_decay * output.diff(dim=0).square().mean()
        return loss, extra, detached(state)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> Scores:
        model.eval()
        text, state = self.splits[split], None
        total, right = torch.zeros((), dtype=torch.float64, device=text.device), text.new_zeros(())
        for x, y in zip(text[:-1].split(self.training.bptt), text[1:].split(self.training.bptt), strict=True):
            with self.autocast():
                logits, _, state = model(x, state)
            total += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum")
            right += (logits.argmax(-1) == y).sum()
        targets = text[1:].numel()
        loss = total.item() / targets
        return Scores(loss, right.item() / targets, math.exp(loss) if loss < 700 else math.inf)

    def merit(self, scores: Scores) -> tuple[float, ...]:
        return (-scores.loss,)


def in_columns(tokens: Tensor, columns: int) -> Tensor:
    """Token ids ``(N,)`` as ``(N // columns, columns)``, each column one stretch of the text; the rest is left out."""
    steps = len(tokens) // columns
    if steps < 2:
        raise ValueError(f"in_columns: {len(tokens)} tokens are too few for {columns} columns of at least 2")
    return tokens[: steps * columns].view(columns, steps).t().contiguous()
