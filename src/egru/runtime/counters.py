"""Counters of the work that an engine does."""

from typing import NamedTuple


class Activity(NamedTuple):
    """Work done by an engine since it was built or :meth:`EventEngine.reset_activity` was called.

    Attributes:
        steps: Number of steps, summed over streams.
        hidden: Number of units, one per layer.
        events: Number of events over all streams, one per layer.
        macs: Number of multiply-adds with a non-zero input, plus ``3 H`` per layer, stream and step for the
            element-wise update.
    """

    steps: int
    hidden: tuple[int, ...]
    events: tuple[int, ...]
    macs: int

    @property
    def rates(self) -> tuple[float, ...]:
        """Events per unit and step, one per layer. The activity sparsity is ``1 - rate``."""
        return tuple(n / (max(1, self.steps) * h) for n, h in zip(self.events, self.hidden, strict=True))
