"""Batches: from a data set that lives on the training device, or fetched ahead from the host where it does not fit."""

import collections
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from egru.data.sets import Split

_SHARE = 0.5
"""Of the free device memory, what a data set may take."""
_AHEAD = 2
"""Batches gathered before they are asked for."""


def fits(split: Split, device: torch.device | str) -> bool:
    """Whether ``split`` may live on ``device``: it is there already, or takes less than half of what is free."""
    device = torch.device(device)
    if device.type != "cuda" or split.x.device.type == "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return sum(part.numel() * part.element_size() for part in split) <= _SHARE * free


class Batches:
    """Iterates over ``(x, y)`` batches of ``split`` on ``device``, every row once, the last batch smaller if need be.

    Args:
        split: the data, on any device.
        size: rows in a batch.
        device: where batches are wanted.
        shuffle: a new order at every iteration, drawn on the CPU from ``generator`` (torch's own if None); otherwise
            the order of the split.
        decode: applied to ``x`` of a batch on its device, as in :class:`~egru.data.Classification`; augmentation goes
            here too.
        resident: keep the whole split on the device, or gather batches on the host in a thread, two ahead. None
            decides by :func:`fits`.
        part: ``(i, n)``: only the i-th of n parts of every batch, for processes that share it; of a batch with fewer
            rows than that, the last parts are its first row.
        order: draws the order of a shuffle, given the number of rows; :func:`torch.randperm` if None.
    """

    def __init__(
        self,
        split: Split,
        size: int,
        *,
        device: torch.device | str = "cpu",
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        resident: bool | None = None,
        part: tuple[int, int] = (0, 1),
        order: Callable[[int], Tensor] | None = None,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"Batches: size must be an int of at least 1, got {size!r}")
        if len(split.x) != len(split.y) or not len(split.y):
            raise ValueError(
                f"Batches: split has {len(split.x)} rows and {len(split.y)} labels; as many, and some, needed"
            )
        self.device = torch.device(device)
        self.resident = fits(split, self.device) if resident is None else resident
        self.split = Split(*(part.to(self.device) for part in split)) if self.resident else split
        self.size, self.shuffle, self.generator, self.decode = size, shuffle, generator, decode
        self.part, self.order = part, order

    def __len__(self) -> int:
        return -(-len(self.split.y) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self.split.y)
        if self.shuffle:
            order = torch.randperm(n, generator=self.generator) if self.order is None else self.order(n)
            rows: Iterator[Tensor | slice] = map(self._own, order.to(self.split.x.device).split(self.size))
        else:
            rows = (slice(at, at + self.size) for at in range(0, n, self.size))
        for x, y in map(self._gather, rows) if self.resident else self._ahead(rows):
            yield (x if self.decode is None else self.decode(x)), y

    def _own(self, rows: Tensor) -> Tensor:
        index, parts = self.part
        own = rows.tensor_split(parts)[index] if parts > 1 else rows
        return own if len(own) else rows[:1]

    def _gather(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.split.x[rows], self.split.y[rows]

    def _pinned(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        x, y = self._gather(rows)
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" and x.device.type == "cpu" else (x, y)

    def _ahead(self, rows: Iterator[Tensor | slice]) -> Iterator[tuple[Tensor, Tensor]]:
        with ThreadPoolExecutor(1, "egru-batches") as pool:
            waiting = collections.deque(pool.submit(self._pinned, r) for r in itertools.islice(rows, _AHEAD))
            while waiting:
                x, y = waiting.popleft().result()
                waiting.extend(pool.submit(self._pinned, r) for r in itertools.islice(rows, 1))
                yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
