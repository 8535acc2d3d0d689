"""Watching a model: who fired, how often, and what it would cost to skip the silence."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from egru.activity.operations import EnergyModel, LayerCost, count_parameters
from egru.activity.pieces import pieces
from egru.activity.summary import ActivitySummary, LayerActivity, LinearActivity
from egru.layers import EventRNN, Record, labelled_modules
from egru.layers.structure import direction_label, direction_name
from egru.models.baselines import CoRNN, IndRNN


class _Counts:
    """What can be added up over calls, and over processes."""

    sums: tuple[str, ...]

    def values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.sums}
        return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}

    def add(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            own = getattr(self, name)
            if value is not None:
                other = value.to(own.device) if isinstance(value, Tensor) and isinstance(own, Tensor) else value
                setattr(self, name, other if own is None else own + other)


class _EventCounts(_Counts):
    """Running counts of one layer and direction; tensors on the layer's device, updated without leaving it."""

    sums = ("events", "inside_window", "gradient", "input_active", "steps")

    def __init__(self, module: EventRNN, label: str, input_size: int) -> None:
        device = module.reset_scale.device
        self.module, self.label, self.input_size = module, label, input_size
        H = module.hidden_size
        self.events = torch.zeros(H, dtype=torch.int64, device=device)
        self.inside_window = torch.zeros((), dtype=torch.int64, device=device)
        self.gradient = torch.zeros((), dtype=torch.int64, device=device)
        self.input_active = torch.zeros((), dtype=torch.int64, device=device)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.input_gradient = False

    @torch.no_grad()
    def __call__(self, record: Record) -> None:
        T, B, _ = record.c.shape
        self.steps += T * B if record.lengths is None else record.lengths.sum()
        self.input_gradient = self.input_gradient or record.input.requires_grad
        for piece in pieces(record.c):
            self._count(record, piece)

    def _count(self, record: Record, piece: slice) -> None:
        c, x, theta, surrogate = record.c[piece], record.input[piece], record.theta, record.surrogate
        fired = c > theta
        inside = (c - theta).abs() < surrogate.width
        value = c if self.module.emits_state else torch.ones_like(c)  # else the slope of the window alone
        slope = surrogate.slope(c, theta)
        k = surrogate.output_slope(value, fired.to(c.dtype), slope) != 0
        active = x != 0
        if record.lengths is not None:
            real = (torch.arange(piece.start, piece.stop, device=c.device)[:, None] < record.lengths)[..., None]
            fired, inside, k, active = fired & real, inside & real, k & real, active & real
        self.events += fired.sum((0, 1))
        self.inside_window += inside.sum()
        self.gradient += k.sum()
        self.input_active += active.sum()

    def activity(self, gradient_density_below: float | None) -> LayerActivity:
        below = 1.0 if gradient_density_below is None else gradient_density_below
        return LayerActivity(
            self.label,
            type(self.module).__name__,
            self.input_size,
            self.module.hidden_size,
            self.module.gates,
            recurrent_size=None,
            steps=int(self.steps),
            active=tuple(self.events.tolist()),
            input_active=int(self.input_active),
            inside_window=int(self.inside_window),
            nonzero_gradients=int(self.gradient),
            input_gradient_density=below if self.input_gradient else 0.0,
        )


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The input of a module, however it was passed."""
    return args[0] if args else kwargs["input"]


class _DenseCounts(_Counts):
    """Near-zero outputs of a dense recurrent module. Seen from outside: the last layer's output stands for them all."""

    sums = ("near_zero", "steps", "input_active")

    def __init__(self, module: nn.Module, label: str, costs: list[LayerCost], tolerance: float) -> None:
        self.module, self.label, self.costs, self.tolerance = module, label, costs, tolerance
        self.near_zero: Tensor | None = None
        self.steps = 0
        self.input_active: Tensor | int = 0
        self.input_gradient = False

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x, y = _first(args, kwargs), output[0]
        if isinstance(y, PackedSequence):
            x, y = x.data, y.data
        near_zero = (y.abs() <= self.tolerance).flatten(0, -2).sum(0)
        self.near_zero = near_zero if self.near_zero is None else self.near_zero + near_zero
        self.steps += y.numel() // y.shape[-1]
        self.input_active = self.input_active + (x != 0).sum()
        self.input_gradient = self.input_gradient or bool(x.requires_grad)

    def activities(self) -> list[LayerActivity]:
        assert self.near_zero is not None
        active = self.steps - self.near_zero
        directions = 2 if getattr(self.module, "bidirectional", False) else 1
        rows: list[LayerActivity] = []
        for i, cost in enumerate(self.costs):
            layer, direction = divmod(i, directions)
            rows.append(
                LayerActivity(
                    direction_label(self.label, direction_name(layer, bool(direction)), len(self.costs)),
                    type(self.module).__name__,
                    cost.input_size,
                    cost.hidden_size,
                    cost.gates,
                    cost.recurrent_size,
                    steps=self.steps,
                    active=tuple(active.view(directions, -1)[direction].tolist()),
                    input_active=int(self.input_active if layer == 0 else active.sum()),
                    inside_window=None,
                    nonzero_gradients=None,
                    input_gradient_density=float(layer > 0 or self.input_gradient),
                )
            )
        return rows


class _LinearCounts(_Counts):
    """Non-zero inputs of a linear layer."""

    sums = ("calls", "active")

    def __init__(self, module: nn.Linear, label: str) -> None:
        self.module, self.label, self.calls = module, label, 0
        self.active: Tensor | int = 0

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x: Tensor = _first(args, kwargs)
        self.calls += x.numel() // x.shape[-1]
        self.active = self.active + (x != 0).sum()

    def activity(self) -> LinearActivity:
        i, o = self.module.in_features, self.module.out_features
        return LinearActivity(self.label, i, o, self.calls, int(self.active))


_TORCH_GATES = {"GRU": 3, "LSTM": 4, "RNN_TANH": 1, "RNN_RELU": 1}


def _dense_costs(module: nn.Module) -> list[LayerCost] | None:
    """One cost per layer and direction of a dense recurrent module, or None for any other module.

    Of an LSTM with ``proj_size``, the gates: the projection itself is not counted.
    """
    if isinstance(module, nn.RNNBase):
        directions = 2 if module.bidirectional else 1
        H, P = module.hidden_size, module.proj_size
        return [
            LayerCost(
                module.input_size if layer == 0 else directions * (P or H), H, _TORCH_GATES[module.mode], P or None
            )
            for layer in range(module.num_layers)
            for _ in range(directions)
        ]
    if isinstance(module, CoRNN):
        return [LayerCost(module.input_size, module.hidden_size, 1, 2 * module.hidden_size)]
    if isinstance(module, IndRNN):
        sizes = [module.input_size, *[module.hidden_size] * (module.num_layers - 1)]
        return [LayerCost(size, module.hidden_size, 1, 1) for size in sizes]
    return None


class ActivityMonitor:
    """Counts events, open windows and operations of every recurrent and linear layer in ``model`` while it is active.

    ::

        with egru.ActivityMonitor(model) as activity:
            model(x)
        print(activity.summary())

    Event layers are counted exactly, layer by layer, on their own device, compiled or not. Dense recurrent layers
    (``nn.GRU``, ``nn.LSTM``, ``nn.RNN`` and the baselines of :mod:`egru.models`) count outputs with
    ``|h| <= tolerance`` as silent; they and ``nn.Linear`` are watched through forward hooks. A compiled model is
    compiled once more with the counting inside. Costs nothing outside the context. Entering again adds up;
    :meth:`reset` starts anew.
    """

    def __init__(self, model: nn.Module, *, tolerance: float = 1e-8, energy: EnergyModel | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"ActivityMonitor: model must be a torch.nn.Module, got {type(model).__name__}")
        if not tolerance >= 0:
            raise ValueError(f"ActivityMonitor: tolerance must not be negative, got {tolerance!r}")
        self.model, self.tolerance, self.energy = model, tolerance, energy or EnergyModel()
        self._undo: list[Callable[[], None]] = []
        self.reset()
        if not self._event and not self._dense:
            raise ValueError("ActivityMonitor: the model has no recurrent layer to watch")

    def reset(self) -> None:
        """Forget what was counted."""
        watching = bool(self._undo)
        self._stop()
        self._event: list[tuple[EventRNN, dict[str, _EventCounts]]] = []
        self._dense: list[_DenseCounts] = []
        self._linear: list[_LinearCounts] = []
        for label, module in labelled_modules(self.model):
            if isinstance(module, EventRNN):
                self._event.append((module, self._event_counts(module, label)))
            elif costs := _dense_costs(module):
                self._dense.append(_DenseCounts(module, label, costs, self.tolerance))
            elif isinstance(module, nn.Linear):
                self._linear.append(_LinearCounts(module, label))
        if watching:
            self._start()

    def _event_counts(self, module: EventRNN, label: str) -> dict[str, _EventCounts]:
        directions = module.directions()
        return {
            direction.name: _EventCounts(
                module, direction_label(label, direction.name, len(directions)), direction.input_size
            )
            for direction in directions
        }

    def _start(self) -> None:
        for module, counts in self._event:
            self._undo.append(module.observe(lambda record, counts=counts: counts[record.direction.name](record)))
        for counts in (*self._dense, *self._linear):
            self._undo.append(counts.module.register_forward_hook(counts, with_kwargs=True).remove)

    def _stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "ActivityMonitor":
        if self._undo:
            raise RuntimeError("ActivityMonitor: already active")
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def counts(self) -> list[dict[str, Any]]:
        """What was counted, for the monitor of the same model in another process to :meth:`add`."""
        return [counts.values() for counts in self._all()]

    def add(self, counts: list[dict[str, Any]]) -> None:
        """Add what :meth:`counts` gave elsewhere."""
        for own, other in zip(self._all(), counts, strict=True):
            own.add(other)

    def _all(self) -> list[_Counts]:
        return [*(c for _, named in self._event for c in named.values()), *self._dense, *self._linear]

    def summary(self) -> ActivitySummary:
        """What was seen so far. Layers that did not run are left out."""
        layers: list[LayerActivity] = []
        for module, counts in self._event:
            below: float | None = None
            seen = [c for c in counts.values() if int(c.steps)]
            for i, count in enumerate(seen):
                if i % module.num_directions == 0 and i:
                    previous = layers[-module.num_directions :]
                    below = sum(p.cost.gradient_density for p in previous) / len(previous)
                layers.append(count.activity(below))
        for count in self._dense:
            layers += count.activities() if count.steps else []
        if not layers:
            raise RuntimeError("ActivityMonitor: nothing was counted; run the model inside the context")
        linears = tuple(count.activity() for count in self._linear if count.calls)
        return ActivitySummary(tuple(layers), linears, count_parameters(self.model), self.energy)
