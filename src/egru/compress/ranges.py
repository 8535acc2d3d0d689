"""How far the states of units vary: the scale of their thresholds."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from egru.compress.batches import evaluation
from egru.layers import Record, event_directions, record

FEWEST_STATES = 256
"""Steps times sequences from which ranges are taken, at least."""
LOWEST_RANGE = 0.001
"""Lower bound on the range of a unit, relative to the mean magnitude of its layer's states."""


@dataclasses.dataclass(frozen=True)
class _Moments:
    """Moments of the states of one direction, ``(H,)`` each."""

    count: int
    mean: Tensor
    variance: Tensor
    square: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "_Moments":
        """Return the moments of states, ``(N, H)``."""
        mean = values.mean(0)
        return cls(len(values), mean, (values - mean).square().mean(0), values.square().mean(0))

    def merge(self, other: "_Moments") -> "_Moments":
        """Return the moments of both sets of states together."""
        count = self.count + other.count
        share = other.count / count
        between = share * (1 - share) * (other.mean - self.mean).square()
        return _Moments(
            count,
            self.mean.lerp(other.mean, share),
            self.variance.lerp(other.variance, share) + between,
            self.square.lerp(other.square, share),
        )


class Ranges:
    """Ranges of all units of a model, from the forward passes that are added.

    The range of a unit is the standard deviation of its state for delta events, and the root mean square of its state
    for positive and signed events.

    Args:
        model: Model with at least one event layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {label: layer for label, layer, _ in event_directions(model)}
        self._moments: dict[str, _Moments] = {}
        self._incomplete = set(self._layers)

    @property
    def complete(self) -> bool:
        """Whether every direction has run for :data:`FEWEST_STATES` states and every unit has changed its state."""
        return not self._incomplete

    def add(self, records: Iterable[Record]) -> None:
        """Add forward passes of the directions that are not complete yet."""
        states: dict[str, list[Tensor]] = {}
        for r in records:
            if r.label in self._incomplete:
                states.setdefault(r.label, []).append(r.c[_valid(r.c, r.lengths)].detach().double())
        for label, parts in states.items():
            moments = _Moments.of(torch.cat(parts))
            before = self._moments.get(label)
            self._moments[label] = moments = moments if before is None else before.merge(moments)
            if moments.count >= FEWEST_STATES and bool((self._range(label) > self._lowest(label)).all()):
                self._incomplete.discard(label)

    def measured(self, label: str) -> Tensor | None:
        """Return the range of every unit of a direction, ``(H,)``, or None if it has not run."""
        if label not in self._moments:
            return None
        return self._range(label).to(self._layers[label].reset_scale.dtype)

    def scales(self, label: str) -> Tensor | None:
        """Return the ranges with a lower bound, so that units that have never changed their state get thresholds too.

        The bound is 0 if all states are.
        """
        if label not in self._moments:
            return None
        return self._range(label).clamp(min=self._lowest(label)).to(self._layers[label].reset_scale.dtype)

    def _range(self, label: str) -> Tensor:
        moments = self._moments[label]
        return (moments.variance if self._layers[label].events == "delta" else moments.square).sqrt()

    def _lowest(self, label: str) -> Tensor:
        return LOWEST_RANGE * self._moments[label].square.sqrt().mean()


def measure_ranges(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """Return the range of every unit, ``(H,)`` per layer and direction: how far its state varies while ``run`` runs.

    Args:
        model: Model with at least one event layer.
        run: Runs the model on representative data, in evaluation mode.

    Raises:
        ValueError: If a layer did not run.
    """
    with evaluation(model), record(model) as records:
        run()
        ranges = Ranges(model)
        ranges.add(records)
    return [_require(ranges.measured(label), label) for label, _, _ in event_directions(model)]


def _require(values: Tensor | None, label: str) -> Tensor:
    if values is None:
        raise ValueError(
            f"calibrate: layer {label} did not run on any sequence; pass sequences that run every event layer"
        )
    return values


def _valid(c: Tensor, lengths: Tensor | None) -> Tensor:
    """Return a mask of the steps and sequences that are not padding, ``(T, B)``."""
    steps = torch.arange(len(c), device=c.device)[:, None]
    return steps < (torch.full_like(steps[0], len(c)) if lengths is None else lengths).expand(c.shape[1])
