"""Iterate over batches: from a split on the training device, or prefetched from the host if it does not fit."""

import collections
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from egru.data.datasets import Split

_MAX_MEMORY_FRACTION = 0.5
"""Maximum fraction of the free device memory that a split may take."""
_PREFETCH = 2
"""Number of batches gathered in advance."""


def fits_on_device(split: Split, device: torch.device | str) -> bool:
    """Return whether a split may be kept on a device.

    True if the device is a CPU, the split is on a GPU already, or it takes at most half of the free memory.

    Args:
        split: The split.
        device: The device.

    Example:
        >>> egru.data.fits_on_device(egru.data.digits().train, "cpu")
        True
    """
    device = torch.device(device)
    if device.type != "cuda" or split.x.device.type == "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return sum(tensor.numel() * tensor.element_size() for tensor in split) <= _MAX_MEMORY_FRACTION * free


class Batches:
    """Iterate over ``(x, y)`` batches of a split on a device. The last batch may be smaller.

    Args:
        split: The data, on any device.
        size: Number of rows per batch.
        device: Device of the batches.
        shuffle: If True, draw a new order for every iteration, on the CPU. If False, keep the order of the split.
        generator: Random generator of the shuffle. If None, the default generator of torch.
        decode: Function applied to ``x`` of each batch on its device, such as ``Classification.decode`` or an
            augmentation.
        resident: If True, keep the split on the device. If False, gather batches on the host in a thread, two in
            advance. If None, :func:`fits_on_device` decides.
        part: ``(i, n)`` to yield only the i-th of n parts of every shuffled batch, for n processes that share it. If a
            batch has fewer than n rows, the remaining parts repeat its first row.
        order: Function that draws the order of a shuffle from the number of rows. If None, :func:`torch.randperm`.

    Raises:
        ValueError: If ``size`` is not a positive int, or ``x`` and ``y`` are empty or differ in length.

    Example:
        >>> split = Split(torch.rand(10, 28, 1), torch.arange(10))
        >>> [len(y) for x, y in Batches(split, 4)]
        [4, 4, 2]
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
            raise ValueError(f"Batches: size must be a positive int, got {size!r}")
        if len(split.x) != len(split.y) or not len(split.y):
            raise ValueError(
                f"Batches: x and y must be non-empty and of equal length, got {len(split.x)} rows and "
                f"{len(split.y)} labels"
            )
        self.device = torch.device(device)
        self.resident = fits_on_device(split, self.device) if resident is None else resident
        self.split = Split(*(tensor.to(self.device) for tensor in split)) if self.resident else split
        self.size, self.shuffle, self.generator, self.decode = size, shuffle, generator, decode
        self.part, self.order = part, order

    def __len__(self) -> int:
        return -(-len(self.split.y) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self.split.y)
        if self.shuffle:
            order = torch.randperm(n, generator=self.generator) if self.order is None else self.order(n)
            rows: Iterator[Tensor | slice] = map(self._select_part, order.to(self.split.x.device).split(self.size))
        else:
            rows = (slice(start, start + self.size) for start in range(0, n, self.size))
        for x, y in map(self._gather, rows) if self.resident else self._prefetch(rows):
            yield (x if self.decode is None else self.decode(x)), y

    def _select_part(self, rows: Tensor) -> Tensor:
        index, parts = self.part
        part = rows.tensor_split(parts)[index] if parts > 1 else rows
        return part if len(part) else rows[:1]

    def _gather(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.split.x[rows], self.split.y[rows]

    def _gather_pinned(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        x, y = self._gather(rows)
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" and x.device.type == "cpu" else (x, y)

    def _prefetch(self, rows: Iterator[Tensor | slice]) -> Iterator[tuple[Tensor, Tensor]]:
        with ThreadPoolExecutor(1, "egru-batches") as pool:
            pending = collections.deque(pool.submit(self._gather_pinned, r) for r in itertools.islice(rows, _PREFETCH))
            while pending:
                x, y = pending.popleft().result()
                pending.extend(pool.submit(self._gather_pinned, r) for r in itertools.islice(rows, 1))
                yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
