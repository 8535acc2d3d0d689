"""Networks of several test files of the engine."""

import numpy as np
import torch
from torch import Tensor, nn

from egru import EGRU, EGRUCell, Threshold
from egru.runtime.network import Trace, extract_network
from egru.runtime.reference import ReferenceRunner
from egru.types import WeightFormat

SUMMARIES: list[Trace | None] = [None, 0.9, 1.0, "mean"]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    threshold = Threshold("identity", mean=0.05, std=0.05)
    first = EGRU(20, 30, 2, threshold=threshold, reset="threshold", zoneout=0.1)
    return nn.Sequential(first, EGRUCell(30, 25, threshold=threshold), nn.Linear(25, 6))


def in_float64(weights: WeightFormat, trace: Trace | None, x: Tensor) -> Tensor:
    """Return the outputs of the reference runner in float64 for ``x``, ``(T, I)``."""
    reference = ReferenceRunner(extract_network(network(), trace=trace), weights, 1, dtype=torch.float64)
    out = np.empty((len(x), 1, 6), np.float64)
    reference.run(x.numpy()[:, None], None, False, out)
    return torch.from_numpy(out[:, 0])
