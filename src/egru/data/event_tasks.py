"""Generated classification tasks whose samples are lists of events, for continuous-time layers."""

import dataclasses
import itertools

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class EventSamples:
    """Labelled samples with the same number of events ``L`` each, sorted in time.

    Attributes:
        times: Event times ``(N, L)``, float32.
        channels: Input channels ``(N, L)``, int64.
        labels: Classes ``(N,)``, int64.
    """

    times: Tensor
    channels: Tensor
    labels: Tensor

    def select(self, rows: Tensor | slice) -> "EventSamples":
        """Return some of the samples."""
        return EventSamples(self.times[rows], self.channels[rows], self.labels[rows])


def yin_yang(count: int, seed: int = 0, *, span: float = 2.0) -> EventSamples:
    """Return points of the yin-yang figure (Kriener et al., 2022), encoded as event times.

    A point ``(x, y)`` of the disc is drawn at random, with each class equally likely: yin 0, yang 1, dots 2. There are
    five channels. The first four have one event each, at ``0.1 + span v`` for ``v`` in ``x, y, 1 - x, 1 - y``. The last
    one has an event at 0.1, as a reference. No linear classifier of the coordinates exceeds about 64 %.

    Args:
        count: The number of samples.
        seed: The seed of the random numbers.
        span: The difference of event times between coordinates 0 and 1.

    Example:
        >>> samples = egru.data.yin_yang(5000)
        >>> samples.times.shape
        torch.Size([5000, 5])
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    points, missing = torch.zeros(count, 2), torch.ones(count, dtype=torch.bool)
    while missing.any():  # redraw until every point lies in the region of its class
        drawn = torch.rand(count, 2, generator=generator)
        fits = missing & ((drawn - 0.5).norm(dim=1) <= 0.5) & (_yin_yang_class(drawn) == labels)
        points[fits] = drawn[fits]
        missing &= ~fits
    values = torch.cat([points, 1 - points, torch.zeros(count, 1)], 1)
    return _sorted(0.1 + span * values, torch.arange(5).expand(count, 5), labels)


def _yin_yang_class(points: Tensor) -> Tensor:
    right = (points - torch.tensor([0.75, 0.5])).norm(dim=1)
    left = (points - torch.tensor([0.25, 0.5])).norm(dim=1)
    is_yin = (right <= 0.1) | ((left > 0.1) & (left <= 0.25)) | ((points[:, 1] > 0.5) & (right > 0.25))
    return torch.where((right < 0.1) | (left < 0.1), 2, torch.where(is_yin, 0, 1))


def event_order(count: int, seed: int = 0, *, channels: int = 3) -> EventSamples:
    """Return samples with one event on each channel. The class is the order in which the channels emit.

    Event times are uniform between 0 and 4 and at least 0.3 apart. Only the times carry information, but it is linear
    in them: logistic regression on the times of the channels reaches 100 %.

    Args:
        count: The number of samples.
        seed: The seed of the random numbers.
        channels: The number of channels; the number of classes is its factorial.

    Returns:
        The samples; times and channels are ``(count, channels)``.

    Example:
        >>> samples = egru.data.event_order(1000)
        >>> samples.times.shape, int(samples.labels.max())
        (torch.Size([1000, 3]), 5)
    """
    generator = torch.Generator().manual_seed(seed)
    times = _spaced(count, channels, 4.0, 0.3, generator)
    orders = torch.tensor(list(itertools.permutations(range(channels))))
    labels = torch.randint(len(orders), (count,), generator=generator)
    return EventSamples(times, orders[labels], labels)


def interval_comparison(count: int, seed: int = 0, *, distractors: int = 6) -> EventSamples:
    """Return samples in which the second of two intervals on channel 0 is longer (1) or shorter (0) than the first.

    Four events on channel 0 mark the intervals, which last from 0.3 to 1.5 and differ by at least 0.2. A pause of 0.5
    to 1.5 separates them, and the first begins between 0 and 1. ``distractors`` events on channels 1 and 2 are at
    random times up to 6. Both classes have the same distribution of counts, so counts allow 50 %. The class depends on
    a difference of intervals: a network must measure one interval and remember it during the other.

    Args:
        count: The number of samples.
        seed: The seed of the random numbers.
        distractors: The number of events without information.

    Returns:
        The samples; times and channels are ``(count, 4 + distractors)``.

    Example:
        >>> samples = egru.data.interval_comparison(1000)
        >>> samples.times.shape
        torch.Size([1000, 10])
    """
    generator = torch.Generator().manual_seed(seed)
    intervals = _uniform(0.3, 1.5, (count, 2), generator)
    while (close := (intervals[:, 0] - intervals[:, 1]).abs() < 0.2).any():
        intervals[close] = _uniform(0.3, 1.5, (int(close.sum()), 2), generator)
    first, second = intervals.unbind(1)
    return _two_intervals(intervals, (second > first).long(), distractors, generator)


def interval_match(count: int, seed: int = 0, *, distractors: int = 6) -> EventSamples:
    """Return samples in which two intervals on channel 0 are both short or both long (1), or different (0).

    A short interval lasts from 0.3 to 0.7 and a long one from 1.0 to 1.4. Everything else is as in
    :func:`interval_comparison`. The class is the exclusive or of two durations, so no linear classifier of counts or of
    event times exceeds 50 %: a network must measure one interval, remember it during a delay, and compare.

    Args:
        count: The number of samples.
        seed: The seed of the random numbers.
        distractors: The number of events without information.

    Returns:
        The samples; times and channels are ``(count, 4 + distractors)``.

    Example:
        >>> samples = egru.data.interval_match(1000)
        >>> samples.times.shape
        torch.Size([1000, 10])
    """
    generator = torch.Generator().manual_seed(seed)
    is_long = torch.randint(2, (count, 2), generator=generator)
    intervals = _uniform(0.3, 0.7, (count, 2), generator) + 0.7 * is_long
    return _two_intervals(intervals, (is_long[:, 0] == is_long[:, 1]).long(), distractors, generator)


def _two_intervals(intervals: Tensor, labels: Tensor, distractors: int, generator: torch.Generator) -> EventSamples:
    """Return samples with four events on channel 0 that mark two intervals, and distractors on channels 1 and 2."""
    count = len(labels)
    start, pause = _uniform(0.0, 1.0, (count,), generator), _uniform(0.5, 1.5, (count,), generator)
    marks = torch.stack([start, intervals[:, 0], pause, intervals[:, 1]], 1).cumsum(1)
    others = _uniform(0.0, 6.0, (count, distractors), generator)
    channels = torch.cat(
        [torch.zeros(count, 4, dtype=torch.int64), torch.randint(1, 3, (count, distractors), generator=generator)], 1
    )
    return _sorted(torch.cat([marks, others], 1), channels, labels)


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def _spaced(count: int, events: int, end: float, apart: float, generator: torch.Generator) -> Tensor:
    """Return sorted times, uniform among those that are at least ``apart`` from one another."""
    free = torch.rand(count, events, generator=generator).sort(1).values * (end - apart * (events - 1))
    return free + apart * torch.arange(events)


def _sorted(times: Tensor, channels: Tensor, labels: Tensor) -> EventSamples:
    times, order = times.sort(dim=1, stable=True)
    return EventSamples(times, channels.gather(1, order), labels)
