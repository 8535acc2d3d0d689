"""Options of an engine that do not depend on its network."""

import dataclasses
from typing import Any

from egru.layers import checks
from egru.types import PACKINGS, WEIGHT_FORMATS, Packing, WeightFormat

DEFAULT_TOKEN_TABLE = 256 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked arguments of :class:`egru.EventEngine`, which describes them.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option is out of range.
    """

    weights: WeightFormat
    threads: int
    streams: int
    token_table: int
    packing: Packing = "auto"

    def __post_init__(self) -> None:
        checks.choice("EventEngine", "weights", self.weights, WEIGHT_FORMATS)
        checks.choice("EventEngine", "packing", self.packing, PACKINGS)
        checks.positive_int("EventEngine", "threads", self.threads)
        checks.positive_int("EventEngine", "streams", self.streams)
        size: Any = self.token_table
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"EventEngine: token_table must be a number of bytes, at least 0; got {size!r}")
