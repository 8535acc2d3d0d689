"""Event-camera recordings: from events to frames, in numpy."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from egru.data.root import DataCorrupt, Source, find, verify

SENSOR = 128
"""Pixels along a side of the DVS128 camera."""
CLIP_NAMES = {"1": "hand clap", "2": "right hand wave", "8": "arm roll", "10": "air guitar"}
_ADDRESS = "whoever keeps the test recordings, which have no public address (egru.data.read_events reads any like them)"
CLIPS = {
    name: Source(f"{name}.bs2", sha256, _ADDRESS)
    for name, sha256 in {
        "1": "adb41d4a19c2f0815b67fc80ef72d0b58ff9d86a558f905730eb0c2639766214",
        "2": "c96b1793ccccc3e737406a1a3a3b37cb917361038306a55e87577770c2405c3e",
        "8": "6148ca549a7be5b1e91234fd3040849d117a225dd3f69b5e180e467dff7f3951",
        "10": "1d4050500bf39882d7b9b2174cc1810baaff6afb411e83284dc9613b296bcbcf",
    }.items()
}


class Events(NamedTuple):
    """One recording in order of time: pixel, polarity 0 or 1, and microseconds, as int64 vectors."""

    x: np.ndarray
    y: np.ndarray
    p: np.ndarray
    t: np.ndarray

    def select(self, rows: np.ndarray | slice) -> "Events":
        return Events(self.x[rows], self.y[rows], self.p[rows], self.t[rows])


def read_events(path: str | os.PathLike[str]) -> Events:
    """A file of 5-byte events, big-endian: x, y, polarity in the top bit of a 24-bit word, time in the rest."""
    return _parse(Path(path).read_bytes(), Path(path))


def dvs_clips(root: str | os.PathLike[str] | None = None) -> dict[str, Events]:
    """Four short raw recordings in the folder ``dvs-raw``, by gesture: enough to try the pipeline on real events."""
    clips: dict[str, Events] = {}
    for name, source in CLIPS.items():
        path = find(source, "dvs-raw", root)
        content = path.read_bytes()
        verify(content, source, path)
        clips[CLIP_NAMES[name]] = _parse(content, path)
    return clips


def _parse(content: bytes, path: Path) -> Events:
    if len(content) % 5 or not content:
        raise DataCorrupt(f"{path}: {len(content)} bytes are not a whole number of 5-byte events")
    raw = np.frombuffer(content, np.uint8).reshape(-1, 5).astype(np.int64)
    events = Events(raw[:, 0], raw[:, 1], raw[:, 2] >> 7, (raw[:, 2] & 127) << 16 | raw[:, 3] << 8 | raw[:, 4])
    if max(events.x.max(), events.y.max()) >= SENSOR:
        raise DataCorrupt(f"{path}: pixel outside the {SENSOR} by {SENSOR} sensor")
    if (np.diff(events.t) < 0).any():
        raise DataCorrupt(f"{path}: event {int((np.diff(events.t) < 0).argmax()) + 1} is earlier than the one before")
    return events


def denoise(events: Events, time: int = 10_000) -> Events:
    """Only events that followed, within ``time`` microseconds, one at a pixel above, below, left or right of theirs."""
    n = len(events.t)
    index = np.arange(n)
    pixel = events.y * SENSOR + events.x
    keys = np.sort(pixel * n + index)  # by pixel, then by time
    keep = np.zeros(n, bool)
    for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        x, y = events.x + dx, events.y + dy
        neighbour = y * SENSOR + x
        # the newest event at the neighbour before this one, if any
        before = keys[np.maximum(np.searchsorted(keys, neighbour * n + index) - 1, 0)]
        inside = (x >= 0) & (x < SENSOR) & (y >= 0) & (y < SENSOR)
        recent = (before // n == neighbour) & (before % n < index) & (events.t - events.t[before % n] < time)
        keep |= inside & recent
    return events.select(keep)


def time_slices(events: Events, length: int = 1_700_000) -> Iterator[tuple[int, Events]]:
    """When each piece of ``length`` microseconds starts, and its events; from the first event on, whole ones only."""
    if not len(events.t):
        return
    first = events.t[0]
    for k in range(int((events.t[-1] - first) // length)):
        start = int(first) + k * length
        yield start, events.select(slice(*np.searchsorted(events.t, (start, start + length))))


def event_frames(events: Events, *, start: float, width: float, bins: int, side: int = 32) -> np.ndarray:
    """Counts ``(bins, 2, side, side)`` of events in bins of ``width`` microseconds from ``start``, int64.

    The sensor's pixels are max-pooled down to ``side``; events outside the bins are left out.
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
    """The paper's preparation of a recording: ``(slices, bins, 2, side, side)``, float32 in [0, 1].

    Denoised with 10 ms, cut into slices of 1.7 s, counted in bins of 25 ms by polarity, max-pooled, and divided by the
    largest count of the slice.
    """
    bins = length // width
    slices = []
    for start, piece in time_slices(denoise(events), length):
        counts = event_frames(piece, start=start, width=width, bins=bins, side=side)
        slices.append((counts / max(1, counts.max())).astype(np.float32))
    return np.stack(slices) if slices else np.zeros((0, bins, 2, side, side), np.float32)
