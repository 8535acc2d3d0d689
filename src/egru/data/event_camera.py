"""Convert event-camera recordings to frames, in numpy."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from egru.data.files import DataCorrupt

SENSOR = 128
"""Pixels along a side of the DVS128 camera."""


class Events(NamedTuple):
    """The events of one recording in order of time, as int64 vectors of equal length.

    Attributes:
        x: Column of the pixel.
        y: Row of the pixel.
        p: Polarity, 0 or 1.
        t: Time in microseconds.

    Example:
        >>> pixels, times = np.arange(3), np.array([0, 2_000, 900_000])
        >>> events = egru.data.Events(x=pixels, y=pixels, p=np.array([1, 0, 1]), t=times)
        >>> events.select(events.p == 1).t
        array([     0, 900000])
    """

    x: np.ndarray
    y: np.ndarray
    p: np.ndarray
    t: np.ndarray

    def select(self, rows: np.ndarray | slice) -> "Events":
        """Return the events at these positions, or where a mask is True."""
        return Events(self.x[rows], self.y[rows], self.p[rows], self.t[rows])


def read_events(path: str | os.PathLike[str]) -> Events:
    """Read a file of 5-byte events.

    An event is one byte x, one byte y, and a big-endian 24-bit word with the polarity in its highest bit and the time
    in microseconds in the others.

    Args:
        path: Path of the file.

    Returns:
        The events in order of time.

    Raises:
        DataCorrupt: If the file is not a whole number of events, a pixel is outside the sensor, or times decrease.

    Example:
        >>> Path("clip.bs2").write_bytes(bytes([10, 20, 0x80, 0, 100]))
        5
        >>> egru.data.read_events("clip.bs2")
        Events(x=array([10]), y=array([20]), p=array([1]), t=array([100]))
    """
    return parse_events(Path(path).read_bytes(), Path(path))


def parse_events(content: bytes, path: Path) -> Events:
    """Decode the content of a file for :func:`read_events`; ``path`` is used in error messages."""
    if len(content) % 5 or not content:
        raise DataCorrupt(f"{path}: expected a whole number of 5-byte events, got {len(content)} bytes")
    raw = np.frombuffer(content, np.uint8).reshape(-1, 5).astype(np.int64)
    events = Events(raw[:, 0], raw[:, 1], raw[:, 2] >> 7, (raw[:, 2] & 127) << 16 | raw[:, 3] << 8 | raw[:, 4])
    largest = max(events.x.max(), events.y.max())
    if largest >= SENSOR:
        raise DataCorrupt(f"{path}: pixel coordinates must be below {SENSOR}, got {largest}")
    if (np.diff(events.t) < 0).any():
        index = int((np.diff(events.t) < 0).argmax()) + 1
        raise DataCorrupt(
            f"{path}: events must be in order of time, but event {index} is earlier than event {index - 1}"
        )
    return events


def denoise(events: Events, time: int = 10_000) -> Events:
    """Remove isolated events.

    An event is kept if one of its four neighbouring pixels had an event less than ``time`` microseconds before it.

    Args:
        events: The recording.
        time: Microseconds. Default: 10,000.

    Returns:
        The events that were kept.

    Example:
        >>> x, y, p = np.array([10, 11, 90]), np.array([20, 20, 50]), np.array([1, 1, 0])
        >>> events = egru.data.Events(x, y, p, t=np.array([0, 2_000, 900_000]))
        >>> egru.data.denoise(events).t  # only the second event has a neighbour shortly before it
        array([2000])
    """
    n = len(events.t)
    index = np.arange(n)
    pixel = events.y * SENSOR + events.x
    keys = np.sort(pixel * n + index)  # by pixel, then by time
    keep = np.zeros(n, bool)
    for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        x, y = events.x + dx, events.y + dy
        neighbour = y * SENSOR + x
        # The last event before this one at the neighbouring pixel, if there is one.
        before = keys[np.maximum(np.searchsorted(keys, neighbour * n + index) - 1, 0)]
        inside = (x >= 0) & (x < SENSOR) & (y >= 0) & (y < SENSOR)
        recent = (before // n == neighbour) & (before % n < index) & (events.t - events.t[before % n] < time)
        keep |= inside & recent
    return events.select(keep)


def time_slices(events: Events, length: int = 1_700_000) -> Iterator[tuple[int, Events]]:
    """Yield the start time and the events of consecutive slices.

    The first slice starts at the first event. An incomplete slice at the end is dropped.

    Args:
        events: The recording.
        length: Length of a slice, in microseconds. Default: 1,700,000.

    Yields:
        Pairs of start time, in microseconds, and events.

    Example:
        >>> ramp = np.arange(40)
        >>> events = egru.data.Events(x=ramp, y=ramp, p=ramp % 2, t=100_000 * ramp)  # 3.9 s
        >>> [int(start) for start, part in egru.data.time_slices(events)]
        [0, 1700000]
    """
    if not len(events.t):
        return
    first = events.t[0]
    for k in range(int((events.t[-1] - first) // length)):
        start = int(first) + k * length
        yield start, events.select(slice(*np.searchsorted(events.t, (start, start + length))))


def event_frames(events: Events, *, start: float, width: float, bins: int, side: int = 32) -> np.ndarray:
    """Count events per time bin, polarity and pixel, and max-pool the pixels.

    Args:
        events: The recording.
        start: Start of the first bin, in microseconds.
        width: Width of a bin, in microseconds.
        bins: Number of bins. Events outside the bins are ignored.
        side: Pixels along a side of a frame; must divide 128.

    Returns:
        Counts of shape ``(bins, 2, side, side)``, int64.

    Raises:
        ValueError: If ``side`` does not divide 128.

    Example:
        >>> ramp = np.arange(40)
        >>> events = egru.data.Events(x=ramp, y=ramp, p=ramp % 2, t=100_000 * ramp)
        >>> egru.data.event_frames(events, start=0, width=1_000_000, bins=4).shape
        (4, 2, 32, 32)
    """
    if SENSOR % side:
        raise ValueError(f"event_frames: side must divide {SENSOR}, got {side}")
    bin = np.floor((events.t - start) / width).astype(np.int64)
    inside = (bin >= 0) & (bin < bins)
    cell = ((bin * 2 + events.p) * SENSOR + events.y) * SENSOR + events.x
    counts = np.bincount(cell[inside], minlength=bins * 2 * SENSOR * SENSOR)
    k = SENSOR // side
    return counts.reshape(bins, 2, side, k, side, k).max((3, 5))


def gesture_frames(events: Events, *, length: int = 1_700_000, width: int = 25_000, side: int = 32) -> np.ndarray:
    """Prepare a recording as in the paper.

    Events are denoised with 10 ms, cut into slices, counted per bin and polarity, and max-pooled. The counts of a slice
    are divided by the largest.

    Args:
        events: The recording.
        length: Length of a slice, in microseconds.
        width: Width of a bin, in microseconds.
        side: Pixels along a side of a frame; must divide 128.

    Returns:
        Frames of shape ``(slices, length // width, 2, side, side)``, float32 in [0, 1].

    Example:
        >>> steps, zeros = np.arange(800), np.zeros(800, int)  # a dot that moves to the right for 4 s
        >>> events = egru.data.Events(x=steps % 128, y=zeros, p=zeros, t=5_000 * steps)
        >>> egru.data.gesture_frames(events).shape
        (2, 68, 2, 32, 32)
    """
    bins = length // width
    slices = []
    for start, slice_events in time_slices(denoise(events), length):
        counts = event_frames(slice_events, start=start, width=width, bins=bins, side=side)
        slices.append((counts / max(1, counts.max())).astype(np.float32))
    return np.stack(slices) if slices else np.zeros((0, bins, 2, side, side), np.float32)
