"""Tasks: how a data set becomes batches, a batch becomes a loss, and a split becomes scores."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.data import Batches, Classification, Split, Text, augment, batchify
from egru.models import detach_state
from egru.training import distributed
from egru.training.config import ClassifierTraining, LanguageTraining, Training
from egru.training.records import Scores

_EVALUATION_WORDS = {"cpu": 2048, "cuda": 8192}
"""Words evaluated per call, unless a training batch has more: fewer calls give the same scores."""
_EVALUATION_STEPS = 1 << 14
"""Steps of all sequences that a classifier evaluates per call on a CPU: the states of more would not stay in the
cache, which makes long sequences three times slower."""
_PROBE_SEQUENCES = 64
"""Sequences in :meth:`ClassifierTask.probe`."""


class Batch(NamedTuple):
    """A training batch.

    Attributes:
        x: Inputs.
        y: Targets.
        rate_factor: Factor on the learning rate of the step.
        epoch_fraction: Fraction of the epoch before this batch.
        weight: Factor on the objective, for a process with more or fewer rows than the others.
    """

    x: Tensor
    y: Tensor
    rate_factor: float
    epoch_fraction: float
    weight: float = 1.0

    @property
    def targets(self) -> int:
        """Number of targets; 0 for the placeholder batch of a process without rows."""
        return self.y.numel() if self.weight else 0


class Task(Protocol):
    """Data and loss of :func:`egru.training.train`."""

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, drawn with torch's default generator."""
        ...

    def loss(self, model: nn.Module, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Compute the loss of a batch.

        Returns:
            The loss that is reported, a term that is added for training only, and the state for the next batch.
        """
        ...

    def evaluate(self, model: nn.Module, split: str, progress: Callable[[float], None] | None = None) -> Scores:
        """Return the scores on a split: "train", "validation" or "test".

        Args:
            model: Model to evaluate.
            split: Name of the split.
            progress: Called with the fraction of the split that is done, after every part. May be None.
        """
        ...

    def merit(self, scores: Scores) -> tuple[float, ...]:
        """Return the key by which validation chooses the best epoch; larger is better."""
        ...

    def probe(self, model: nn.Module) -> None:
        """Run ``model`` on a fixed small part of the validation split."""
        ...


def autocast(training: Training) -> torch.autocast:
    """Return a reusable autocast context with the precision of the config."""
    device = torch.device(training.device).type
    low = training.precision != "float32"
    return torch.autocast(device, getattr(torch, training.precision) if low else torch.bfloat16, enabled=low)


class ClassifierTask:
    """Classification of labelled sequences, for models such as :class:`egru.models.SequenceClassifier`.

    A model maps sequences ``(B, T, ...)`` to scores, alone or as the first entry of a tuple. If it returns scores at
    every step, each step has a loss in training, and evaluation uses the mean of the steps' probabilities.

    Args:
        data: Training, validation and test split.
        training: Batch sizes, device, precision and augmentation.

    Example:
        >>> data, training = egru.data.digits(), egru.training.ClassifierTraining(epochs=20, batch=100)
        >>> task = egru.training.ClassifierTask(data, training)
        >>> model = egru.models.SequenceClassifier(1, 64, data.classes)
        >>> accuracy = task.evaluate(model, "validation").accuracy
    """

    def __init__(self, data: Classification, training: ClassifierTraining) -> None:
        self.training, self.autocast = training, autocast(training)
        decode = plain = data.decode_training or data.decode
        if training.augment:
            decode = (lambda x: augment(x)) if plain is None else (lambda x: augment(plain(x)))
        size, device = training.evaluation_batch, training.device
        self.rank, self.ranks = distributed.rank(), distributed.world_size()
        self.train = Batches(
            data.train,
            training.batch * self.ranks,
            device=device,
            shuffle=True,
            decode=decode,
            part=(self.rank, self.ranks),
            order=lambda rows: distributed.from_rank_zero(lambda: torch.randperm(rows)),
        )
        self.data = {"train": self.train}
        for name, split in (("validation", data.validation), ("test", data.test)):
            part = Split(*(tensor[self.rank :: self.ranks] for tensor in split)) if self.ranks > 1 else split
            if len(part.y):
                self.data[name] = Batches(part, size, device=device, decode=data.decode)

    def batches(self) -> Iterator[Batch]:
        rows, size = len(self.train.split.y), self.train.size
        for i, (x, y) in enumerate(self.train):
            total = min(size, rows - i * size)  # rows in all processes together
            rows_here = total // self.ranks + (self.rank < total % self.ranks)
            yield Batch(x, y, 1.0, i / len(self.train), rows_here * self.ranks / total)

    def loss(self, model: nn.Module, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Any]:
        with self.autocast:
            scores, y = _model_scores(model, batch.x), batch.y
            if scores.dim() == 3:
                scores, y = scores.flatten(0, 1), y.repeat_interleave(scores.shape[1])
            loss = F.cross_entropy(scores, y, label_smoothing=self.training.label_smoothing)
        return loss, loss.new_zeros(()), None

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, progress: Callable[[float], None] | None = None) -> Scores:
        model.eval()
        zero = torch.zeros((), device=self.training.device)
        losses, correct, count = [zero.double()], [zero.long()], 0
        for x, y in self._parts(split):
            with self.autocast:
                scores = _sequence_scores(_model_scores(model, x).double())
            losses.append(F.cross_entropy(scores, y, reduction="sum"))
            correct.append((scores.argmax(-1) == y).sum())
            count += len(y)
            if progress is not None:
                progress(count / len(self.data[split].split.y))
        sums = torch.stack([torch.stack(losses).sum(), torch.stack(correct).sum().double(), zero.double() + count])
        loss, correct, count = distributed.all_sum(sums).tolist()
        return Scores(loss / count, correct / count)

    def _parts(self, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of a split, on a CPU in parts of at most :data:`_EVALUATION_STEPS` steps."""
        for x, y in self.data.get(split, ()):
            rows = max(1, _EVALUATION_STEPS // x.shape[1]) if x.device.type == "cpu" else len(y)
            yield from zip(x.split(rows), y.split(rows), strict=True)

    def merit(self, scores: Scores) -> tuple[float, ...]:
        return (scores.accuracy, -scores.loss)

    def probe(self, model: nn.Module) -> None:
        x, _ = next(iter(self.data["validation"]))
        model(x[:_PROBE_SEQUENCES])


def _model_scores(model: nn.Module, x: Tensor) -> Tensor:
    """Return the scores of a model that returns them alone or as the first entry of a tuple."""
    output = model(x)
    return output[0] if isinstance(output, tuple) else output


def _sequence_scores(scores: Tensor) -> Tensor:
    """Return scores ``(B, classes)``: for scores per step, the logarithm of the mean probability."""
    return scores.log_softmax(-1).logsumexp(1) - math.log(scores.shape[1]) if scores.dim() == 3 else scores


class LanguageTask:
    """Next-word prediction, for models such as :class:`egru.models.LanguageModel`.

    The text is arranged in parallel columns and read in segments. The state is carried from segment to segment.

    Args:
        data: Training, validation and test text.
        training: Number of columns, length of the segments, device and precision.

    Raises:
        ValueError: If a split has too few words for its number of columns.

    Example:
        >>> tokens = torch.randint(50, (2000,))
        >>> text = egru.data.Text("noise", [f"word{i}" for i in range(50)], tokens, tokens, tokens)
        >>> task = egru.training.LanguageTask(text, egru.training.LanguageTraining(batch=4, bptt=20, test_batch=4))
        >>> scores = task.evaluate(egru.models.LanguageModel(50, 16, 32), "validation")
    """

    def __init__(self, data: Text, training: LanguageTraining) -> None:
        self.training, self.autocast = training, autocast(training)
        self.data = {
            "train": batchify(data.train, training.batch * distributed.world_size()).to(training.device),
            "validation": batchify(data.validation, training.evaluation_batch).to(training.device),
            "test": batchify(data.test, training.test_batch).to(training.device),
        }
        for name, text in self.data.items():
            if len(text) < 2:
                raise ValueError(
                    f"LanguageTask: the {name} split has too few words for a batch of {text.shape[1]}, which needs at "
                    f"least {2 * text.shape[1]}; use a smaller batch"
                )
            self.data[name] = text.tensor_split(distributed.world_size(), dim=1)[distributed.rank()].contiguous()

    def batches(self) -> Iterator[Batch]:
        text, bptt = self.data["train"], self.training.bptt
        for start, stop, length in distributed.items_from_rank_zero(self._segments(len(text) - 1)):
            yield Batch(text[start:stop], text[start + 1 : stop + 1], length / bptt, start / (len(text) - 1))

    def _segments(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first step, the end and the drawn length of each segment. The last one may be cut short."""
        start = 0
        while start < steps:
            length = self._draw_length() if self.training.vary_bptt else self.training.bptt
            stop = min(start + length, steps)
            yield start, stop, length
            start = stop

    def _draw_length(self) -> int:
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
        return loss, extra, detach_state(state)

    @torch.no_grad()
    def evaluate(self, model: Any, split: str, progress: Callable[[float], None] | None = None) -> Scores:
        model.eval()
        text, state = self.data[split], None
        length = max(self.training.bptt, _EVALUATION_WORDS[text.device.type] // max(1, text.shape[1]))
        total, correct = torch.zeros((), dtype=torch.float64, device=text.device), text.new_zeros(())
        segments = zip(text[:-1].split(length), text[1:].split(length), strict=True) if text.numel() else ()
        done = 0
        for x, y in segments:
            with self.autocast:
                logits, state = model(x, state)
            total += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum").double()
            correct += (logits.argmax(-1) == y).sum()
            done += len(x)
            if progress is not None:
                progress(done / (len(text) - 1))
        sums = torch.stack([total, correct.double(), torch.full_like(total, text[1:].numel())])
        total, correct, targets = distributed.all_sum(sums).tolist()
        loss = total / targets
        return Scores(loss, correct / targets, math.exp(loss) if loss < 700 else math.inf)

    def merit(self, scores: Scores) -> tuple[float, ...]:
        return (-scores.loss,)

    def probe(self, model: nn.Module) -> None:
        model(self.data["validation"][: self.training.bptt])
