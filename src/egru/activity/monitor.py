"""Counting of events and operations while a model runs."""

from collections.abc import Callable
from typing import Any

from torch import nn

from egru.activity.changes import Changes
from egru.activity.counts import Counts, DenseCounts, EventCounts, LinearCounts, LinearModule, dense_costs
from egru.activity.operations import EnergyModel, count_parameters
from egru.activity.summary import ActivitySummary, LayerActivity
from egru.layers import EventRNN, event_directions, labelled_modules


class ActivityMonitor:
    """Counts the events and operations of a model inside a context.

    Event layers are counted exactly, per layer and direction, on their device. Dense recurrent layers (``nn.GRU``,
    ``nn.LSTM``, ``nn.RNN`` and the baselines of :mod:`egru.models`) count outputs with ``|h| <= tolerance`` as
    inactive. They, ``nn.Linear`` and convolutions are observed by forward hooks. Convolutions skip nothing. An event
    layer or ``nn.Linear`` works on its non-zero inputs; if it reads the output of a layer with ``events="delta"``, on
    the events of that layer. This holds for the output itself, packed or not. After operations that compute new values
    or copies, such as concatenation or ``pad_packed_sequence``, all non-zero values count.

    Counts accumulate when the context is entered again; :meth:`reset` clears them. Outside the context there is no
    overhead. A model under ``torch.compile`` is recompiled, with the counting inside.

    Args:
        model: Model with at least one recurrent layer.
        tolerance: Largest magnitude of an inactive output of a dense layer. Default: 1e-8.
        energy: Energy per operation, for the estimate. If None, ``EnergyModel()``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If the model has no recurrent layer, or ``tolerance`` is negative.

    Example:
        >>> import torch, egru
        >>> model = egru.models.SequenceClassifier(3, 16, 5)
        >>> with egru.ActivityMonitor(model) as monitor:
        ...     _ = model(torch.randn(2, 20, 3))
        >>> summary = monitor.summary()  # print(summary) shows a table
        >>> summary.steps
        40
        >>> 0 <= summary.activity_sparsity <= 1
        True
    """

    def __init__(self, model: nn.Module, *, tolerance: float = 1e-8, energy: EnergyModel | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"ActivityMonitor: model must be a torch.nn.Module, got {type(model).__name__}")
        if not tolerance >= 0:
            raise ValueError(f"ActivityMonitor: tolerance must not be negative, got {tolerance!r}")
        self.model, self.tolerance, self.energy = model, tolerance, energy or EnergyModel()
        self._removers: list[Callable[[], None]] = []
        self._changes = Changes()
        self.reset()
        if not self._event and not self._dense:
            raise ValueError(f"ActivityMonitor: the model must have a recurrent layer, got {type(model).__name__}")

    def reset(self) -> None:
        """Clear all counts."""
        active = bool(self._removers)
        self._stop()
        self._event: dict[EventRNN, dict[str, EventCounts]] = {}
        for label, layer, direction in event_directions(self.model):
            self._event.setdefault(layer, {})[direction.name] = EventCounts(label, layer, direction, self._changes)
        self._dense: list[DenseCounts] = []
        self._linear: list[LinearCounts] = []
        for label, module in labelled_modules(self.model):
            if costs := dense_costs(module):
                self._dense.append(DenseCounts(module, label, costs, self.tolerance))
            elif isinstance(module, LinearModule):
                self._linear.append(LinearCounts(module, label, self._changes))
        if active:
            self._start()

    def _start(self) -> None:
        for layer, counts in self._event.items():
            self._removers.append(layer.observe(lambda record, counts=counts: counts[record.direction.name](record)))
            self._removers += self._changes.follow(layer)
        for counts in (*self._dense, *self._linear):
            self._removers.append(counts.module.register_forward_hook(counts, with_kwargs=True).remove)

    def _stop(self) -> None:
        while self._removers:
            self._removers.pop()()
        self._changes.clear()

    def __enter__(self) -> "ActivityMonitor":
        if self._removers:
            raise RuntimeError("ActivityMonitor: already active; leave the context before entering it again")
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def counts(self) -> list[dict[str, Any]]:
        """Return all counts, to be passed to :meth:`add` in another process."""
        return [counts.values() for counts in self._all()]

    def add(self, counts: list[dict[str, Any]]) -> None:
        """Add the counts of a monitor of the same model in another process.

        Args:
            counts: Result of :meth:`counts`.
        """
        for total, values in zip(self._all(), counts, strict=True):
            total.add(values)

    def _all(self) -> list[Counts]:
        return [*(c for named in self._event.values() for c in named.values()), *self._dense, *self._linear]

    def summary(self) -> ActivitySummary:
        """Return the counts so far, without layers that did not run.

        Raises:
            RuntimeError: If no layer ran inside the context.
        """
        layers: list[LayerActivity] = []
        for layer, named in self._event.items():
            below = 1.0  # the gradient density of what feeds the first layer is unknown
            ran = [counts for counts in named.values() if int(counts.steps)]
            for i, counts in enumerate(ran):
                if i % layer.num_directions == 0 and i:
                    previous = layers[-layer.num_directions :]
                    below = sum(p.cost.gradient_density for p in previous) / len(previous)
                layers.append(counts.activity(below))
        for counts in self._dense:
            layers += counts.activities() if counts.steps else []
        if not layers:
            raise RuntimeError("ActivityMonitor: nothing was counted; run the model inside the context")
        linears = tuple(counts.activity() for counts in self._linear if counts.calls)
        return ActivitySummary(tuple(layers), linears, count_parameters(self.model), self.energy)
