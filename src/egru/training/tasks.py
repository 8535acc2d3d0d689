"""What is learnt: how a data set becomes batches, a batch a loss, and a split a score."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.data import Batches, Classification, Split, Text, augment, batchify
from egru.models import detached
from egru.training import distributed
from egru.training.config import ClassifierTraining, LanguageTraining, Training

_EVALUATED = {"cpu": 2048, "cuda": 8192}
"""Words scored in one call, where that is more than a stretch of training: fewer calls, the same scores."""
_PROBED = 64
"""Sequences in a probe."""


class Batch(NamedTuple):
    """``scale`` multiplies the learning rate of the step; ``done`` is the share of the epoch that lies before it.

    ``weight`` multiplies the objective, where this process has more or fewer rows of a batch than others.
    """

    x: Tensor
    y: Tensor
    scale: float
    done: float
    weight: float = 1.0

    @property
    def targets(self) -> int:
        return self.y.numel() if self.weight else 0


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

    def probe(self, model: nn.Module) -> None:
        """Run ``model`` on a little validation data, the same every time."""
        ...


def autocast(training: Training) -> torch.autocast:
    """The precision of a run, as a context to enter again and again: making one takes longer than entering it."""
    device = torch.device(training.device).type
    low = training.precision != "float32"
    return torch.autocast(device, getattr(torch, training.precision) if low else torch.bfloat16, enabled=low)


class ClassifierTask:
    """Labelled sequences for a model like :class:`egru.models.SequenceClassifier`.

    Scores at every step each have a loss in training; in evaluation the mean of their probabilities counts.
    """

    def __init__(self, data: Classification, training: ClassifierTraining) -> None:
        self.training, self.autocast = training, autocast(training)
        decode = data.decode
        if training.augment:
            decode = (lambda x: augment(x)) if decode is None else (lambda x: augment(data.decode(x)))  # pyright: ignore
        size, device = training.evaluation_batch, training.device
        self.rank, self.ranks = distributed.rank(), distributed.size()
        self.train = Batches(
            data.train,
            training.batch * self.ranks,
            device=device,
            shuffle=True,
            decode=decode,
            part=(self.rank, self.ranks),
            order=lambda rows: distributed.agreed(lambda: torch.randperm(rows)),
        )
        self.data = {"train": self.train}
        for name, split in (("validation", data.validation), ("test", data.test)):
            own = Split(*(part[self.rank :: self.ranks] for part in split)) if self.ranks > 1 else split
            if len(own.y):
                self.data[name] = Batches(own, size, device=device, decode=data.decode)

    def batches(self) -> Iterator[Batch]:
        rows, whole = len(self.train.split.y), self.train.size
        for i, (x, y) in enumerate(self.train):
            here = min(whole, rows - i * whole)  # in all processes together
            own = here // self.ranks + (self.rank < here % self.ranks)
            yield Batch(x, y, 1.0, i / len(self.train), own * self.ranks / here)

    def loss(self, model: nn.Module, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Any]:
        with self.autocast:
            scores, y = model(batch.x)[0], batch.y
            if scores.dim() == 3:
                scores, y = scores.flatten(0, 1), y.repeat_interleave(scores.shape[1])
            loss = F.cross_entropy(scores, y, label_smoothing=self.training.label_smoothing)
        return loss, loss.new_zeros(()), None

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> Scores:
        model.eval()
        zero = torch.zeros((), device=self.training.device)
        losses, right, count = [zero.double()], [zero.long()], 0
        for x, y in self.data.get(split, ()):
            with self.autocast:
                scores = _of_sequence(model(x)[0].double())
            losses.append(F.cross_entropy(scores, y, reduction="sum"))
            right.append((scores.argmax(-1) == y).sum())
            count += len(y)
        sums = torch.stack([torch.stack(losses).sum(), torch.stack(right).sum().double(), zero.double() + count])
        loss, right, count = distributed.total(sums).tolist()
        return Scores(loss / count, right / count)

    def merit(self, scores: Scores) -> tuple[float, ...]:
        return (scores.accuracy, -scores.loss)

    def probe(self, model: nn.Module) -> None:
        x, _ = next(iter(self.data["validation"]))
        model(x[:_PROBED])


def _of_sequence(scores: Tensor) -> Tensor:
    """``(B, classes)`` of double precision; the logarithm of the mean probability where every step has scores."""
    return scores.log_softmax(-1).logsumexp(1) - math.log(scores.shape[1]) if scores.dim() == 3 else scores


class LanguageTask:
    """A text for a model like :class:`egru.models.LanguageModel`, its state carried from stretch to stretch."""

    def __init__(self, data: Text, training: LanguageTraining) -> None:
        self.training, self.autocast = training, autocast(training)
        self.data = {
            "train": batchify(data.train, training.batch * distributed.size()).to(training.device),
            "validation": batchify(data.validation, training.evaluation_batch).to(training.device),
            "test": batchify(data.test, training.test_batch).to(training.device),
        }
        for name, text in self.data.items():
            if len(text) < 2:
                raise ValueError(f"LanguageTask: the {name} split is too short for a batch of {text.shape[1]}")
            self.data[name] = text.tensor_split(distributed.size(), dim=1)[distributed.rank()].contiguous()

    def batches(self) -> Iterator[Batch]:
        text, bptt = self.data["train"], self.training.bptt
        for start, stop, length in distributed.shared(self._stretches(len(text) - 1)):
            yield Batch(text[start:stop], text[start + 1 : stop + 1], length / bptt, start / (len(text) - 1))

    def _stretches(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """First step, end, and the length drawn."""
        start = 0
        while start < steps:
            length = self._length() if self.training.vary_bptt else self.training.bptt
            stop = min(start + length, steps)
            yield start, stop, length
            start = stop

    def _length(self) -> int:
        mean = self.training.bptt * (1.0 if torch.rand(()).item() < 0.95 else 0.5)
        return max(5, int(torch.normal(torch.tensor(mean), torch.tensor(5.0)).item()))

    def loss(self, model: Any, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Any]:
        with self.autocast:
            output, dropped, state = model.features(batch.x, state)
            logits = model.decode(dropped)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.y.flatten())
        extra = loss.new_zeros(())
        if self.training.activity_decay:
            extra = extra + self.training.activity_decay * dropped.square().mean()
        if self.training.temporal_decay and len(output) > 1:
            extra = extra + self.training.temporal_decay * output.diff(dim=0).square().mean()
        return loss, extra, detached(state)

    @torch.no_grad()
    def evaluate(self, model: Any, split: str) -> Scores:
        model.eval()
        text, state = self.data[split], None
        stretch = max(self.training.bptt, _EVALUATED[text.device.type] // max(1, text.shape[1]))
        total, right = torch.zeros((), dtype=torch.float64, device=text.device), text.new_zeros(())
        pieces = zip(text[:-1].split(stretch), text[1:].split(stretch), strict=True) if text.numel() else ()
        for x, y in pieces:
            with self.autocast:
                logits, state = model(x, state)
            total += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum").double()
            right += (logits.argmax(-1) == y).sum()
        sums = torch.stack([total, right.double(), torch.full_like(total, text[1:].numel())])
        total, right, targets = distributed.total(sums).tolist()
        loss = total / targets
        return Scores(loss, right / targets, math.exp(loss) if loss < 700 else math.inf)

    def merit(self, scores: Scores) -> tuple[float, ...]:
        return (-scores.loss,)

    def probe(self, model: nn.Module) -> None:
        model(self.data["validation"][: self.training.bptt])
