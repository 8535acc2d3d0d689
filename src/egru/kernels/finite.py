"""Checks for NaN and infinity on the CPU. On other devices a check would wait for the device.

NaN compares false, so an unchecked NaN would look like an inactive unit.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from egru._autograd import is_plain
from egru.kernels.problem import Problem
from egru.types import Events


def check_finite(values: Mapping[str, Tensor | None]) -> None:
    """Raise ``ValueError`` if one of the named tensors is on the CPU and contains NaN or infinity."""
    for name, value in values.items():
        if value is not None and not _all_finite(value):
            bad = value[~torch.isfinite(value)][0].item()
            raise ValueError(f"{name} contains {bad}; expected finite values")


def check_arguments(problem: Problem) -> None:
    """Raise ``ValueError`` if an argument of a problem on the CPU contains NaN or infinity."""
    named = {"input": problem.input, "state.c": problem.c0, "state.y": problem.y0, "the threshold": problem.theta}
    weights = {name: getattr(problem, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    check_finite({**named, **weights})
    check_thresholds(problem.theta, problem.events)


def check_thresholds(theta: Tensor, events: Events) -> None:
    """Raise ``ValueError`` if a threshold on the CPU is negative although magnitudes are compared with it."""
    if events != "positive" and theta.device.type == "cpu" and (theta < 0).any():
        raise ValueError(
            f"the threshold contains {theta.min().item():g}; events={events!r} requires thresholds of at least 0, e.g. "
            "Threshold('abs')"
        )


def check_result(c_last: Tensor) -> None:
    """Raise ``ValueError`` if the final state on the CPU is not finite. A state that became NaN stays NaN."""
    if not _all_finite(c_last):
        raise ValueError("the state became NaN or infinite: products of weights overflow")


def _all_finite(value: Tensor) -> bool:
    if value.device.type != "cpu":
        return True
    # NumPy where possible: torch takes ten times as long, and threads that it wakes would spin for longer than a short
    # sequence takes. A detached parameter is an ordinary tensor.
    detached = value.detach()
    if value.dtype in (torch.float32, torch.float64) and is_plain(detached):
        return bool(np.isfinite(detached.numpy()).all())
    return bool(torch.isfinite(value).all())
