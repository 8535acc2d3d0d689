"""Running counts of the layers that an :class:`egru.ActivityMonitor` watches."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from egru.activity.changes import Changes
from egru.activity.chunks import time_chunks
from egru.activity.operations import LayerCost
from egru.activity.pruned import PrunedProduct
from egru.activity.summary import LayerActivity, LinearActivity
from egru.events import Surrogate
from egru.layers import Direction, EventRNN, Record
from egru.layers.structure import direction_label, direction_name

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
LinearModule = nn.Linear | Convolution


class Counts:
    """Counts that can be added over calls and over processes."""

    sums: tuple[str, ...]
    """Names of the attributes that are counts."""

    def values(self) -> dict[str, Any]:
        """Return the counts by name, tensors on the CPU."""
        values = {name: getattr(self, name) for name in self.sums}
        return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}

    def add(self, values: dict[str, Any]) -> None:
        """Add the result of :meth:`values` from another process."""
        for name, value in values.items():
            if value is not None:
                total = getattr(self, name)
                both_tensors = isinstance(value, Tensor) and isinstance(total, Tensor)
                value = value.to(total.device) if both_tensors else value
                setattr(self, name, value if total is None else total + value)


class EventCounts(Counts):
    """Counts of one direction of an event layer, kept on the layer's device so that counting does not wait for it."""

    sums = ("events", "inside_window", "gradient", "input_active", "steps")

    def __init__(self, label: str, layer: EventRNN, direction: Direction, changes: Changes) -> None:
        device = layer.reset_scale.device
        self.changes = changes
        self.label, self.layer, self.direction = label, layer, direction
        self.events = torch.zeros(layer.hidden_size, dtype=torch.int64, device=device)
        self.inside_window = torch.zeros((), dtype=torch.int64, device=device)
        self.gradient = torch.zeros((), dtype=torch.int64, device=device)
        self.input_active = torch.zeros(direction.input_size, dtype=torch.int64, device=device)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.input_gradient = False

    @torch.no_grad()
    def __call__(self, record: Record) -> None:
        """Add one forward pass."""
        T, B, _ = record.seen.shape
        self.steps += T * B if record.lengths is None else record.lengths.sum()
        self.input_gradient = self.input_gradient or record.input.requires_grad
        before = self.events.clone()
        changes = self.changes.received(record)
        for chunk in time_chunks(record.seen):
            self._count(record, chunk, count_input=changes is None)
        if changes is not None:
            self.input_active += changes
        self.changes.add(record, self.events - before)

    def _count(self, record: Record, chunk: slice, count_input: bool) -> None:
        x, theta, surrogate = record.input[chunk], record.theta, record.surrogate
        c = record._replace(seen=record.seen[chunk]).magnitude()
        events = c > theta
        inside = (c - theta).abs_() < surrogate.width
        # If the value of an event is not what was compared, it is not recorded. Assume that it is never zero.
        value = c if self.layer.emits_compared else torch.ones_like(c)
        if self._simple_slope(surrogate, theta):
            nonzero = (inside & (value > 0 if surrogate.bounded else value != 0)).logical_or_(events)
        else:
            nonzero = surrogate.output_slope(value, events.to(c.dtype), surrogate.slope(c, theta)) != 0
        active = x != 0
        if record.lengths is not None:
            valid = (torch.arange(chunk.start, chunk.stop, device=c.device)[:, None] < record.lengths)[..., None]
            events, inside, nonzero, active = events & valid, inside & valid, nonzero & valid, active & valid
        self.events += events.sum((0, 1))
        self.inside_window += inside.count_nonzero()
        self.gradient += nonzero.count_nonzero()
        if count_input:
            self.input_active += active.sum((0, 1))

    @staticmethod
    def _simple_slope(surrogate: Surrogate, theta: Tensor) -> bool:
        """Return whether the signs of states and thresholds tell where the slope of the output is zero.

        Then the slope need not be computed, which takes half of the time on a CPU. On other devices, reading the
        thresholds would wait for the device.
        """
        if surrogate.shape != "triangle" or surrogate.height == 0:
            return False
        return theta.device.type == "cpu" and not torch.compiler.is_compiling() and bool((theta >= 0).all())

    def activity(self, gradient_density_below: float) -> LayerActivity:
        """Return the activity; ``gradient_density_below`` is the gradient density of the layer that feeds this one."""
        weights = self.layer.weights(self.direction)
        return LayerActivity(
            self.label,
            type(self.layer).__name__.removeprefix("Parametrized"),  # the class of a layer with masks
            self.direction.input_size,
            self.layer.hidden_size,
            self.layer.gates,
            recurrent_size=None,
            steps=int(self.steps),
            active=tuple(self.events.tolist()),
            input_active=int(self.input_active.sum()),
            inside_window=int(self.inside_window),
            nonzero_gradients=int(self.gradient),
            input_gradient_density=gradient_density_below if self.input_gradient else 0.0,
            input_pruned=PrunedProduct.count(weights.ih, self.input_active),
            recurrent_pruned=PrunedProduct.count(weights.hh, self.events),
        )


def _module_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input of a module, passed by position or by keyword."""
    return args[0] if args else kwargs["input"]


class DenseCounts(Counts):
    """Near-zero outputs of a dense recurrent module.

    Only the output of the last layer can be observed; its counts are used for all layers.
    """

    sums = ("near_zero", "steps", "input_active")

    def __init__(self, module: nn.Module, label: str, costs: list[LayerCost], tolerance: float) -> None:
        self.module, self.label, self.costs, self.tolerance = module, label, costs, tolerance
        self.near_zero: Tensor | None = None
        self.steps = 0
        self.input_active: Tensor | int = 0
        self.input_gradient = False

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Add one forward pass."""
        x, y = _module_input(args, kwargs), output[0]
        if isinstance(y, PackedSequence):
            x, y = x.data, y.data
        near_zero = (y.abs() <= self.tolerance).flatten(0, -2).sum(0)
        self.near_zero = near_zero if self.near_zero is None else self.near_zero + near_zero
        self.steps += y.numel() // y.shape[-1]
        self.input_active = self.input_active + (x != 0).sum()
        self.input_gradient = self.input_gradient or bool(x.requires_grad)

    def activities(self) -> list[LayerActivity]:
        """Return one entry per layer and direction."""
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


class LinearCounts(Counts):
    """Inputs of a linear layer or a convolution.

    A convolution is a linear layer that reads one patch per output position. All entries of its patches count, padding
    and zeros too: dense convolutions skip nothing, and the paper counts them in full. A transposed convolution is a
    linear layer that writes one patch per input position.
    """

    sums = ("calls", "active")

    def __init__(self, module: LinearModule, label: str, changes: Changes) -> None:
        self.module, self.label, self.calls, self.changes = module, label, 0, changes
        self.active: Tensor | int = 0  # of a linear layer, one entry per input

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Add one forward pass."""
        x: Tensor = _module_input(args, kwargs)
        if isinstance(self.module, nn.Linear):
            self.calls += x.numel() // x.shape[-1]
            changes = self.changes.find(x)
            self.active = self.active + ((x != 0).reshape(-1, x.shape[-1]).sum(0) if changes is None else changes)
            return
        transposed = self.module.transposed
        calls = x.numel() // self.module.in_channels if transposed else output.numel() // self.module.out_channels
        self.calls += calls
        self.active = self.active + calls * self._sizes()[0]

    def activity(self) -> LinearActivity:
        """Return the counts so far."""
        if not isinstance(self.active, Tensor):
            return LinearActivity(self.label, *self._sizes(), self.calls, self.active)
        pruned = PrunedProduct.count(self.module.weight, self.active)
        return LinearActivity(self.label, *self._sizes(), self.calls, int(self.active.sum()), pruned)

    def _sizes(self) -> tuple[int, int]:
        """Return the number of inputs and outputs of one call, so that their product is the number of weights."""
        module = self.module
        if isinstance(module, nn.Linear):
            return module.in_features, module.out_features
        patch = math.prod(module.weight.shape[1:])
        return (module.in_channels, patch) if module.transposed else (patch, module.out_channels)


_TORCH_GATES = {"GRU": 3, "LSTM": 4, "RNN_TANH": 1, "RNN_RELU": 1}


def dense_costs(module: nn.Module) -> list[LayerCost] | None:
    """Return the cost of each layer and direction of a dense recurrent module, or None for other modules.

    The projection of an LSTM with ``proj_size`` is not included.
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
    from egru.models.baselines import CoRNN, IndRNN  # here, so that importing egru does not load the models

    if isinstance(module, CoRNN):
        return [LayerCost(module.input_size, module.hidden_size, 1, 2 * module.hidden_size)]
    if isinstance(module, IndRNN):
        sizes = [module.input_size, *[module.hidden_size] * (module.num_layers - 1)]
        return [LayerCost(size, module.hidden_size, 1, 1) for size in sizes]
    return None
