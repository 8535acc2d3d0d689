"""The result of an :class:`egru.ActivityMonitor`: counts per layer, and the numbers that follow from them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from egru import format
from egru.activity.operations import EnergyModel, LayerCost
from egru.activity.pruned import PrunedProduct, weight_sparsity
from egru.records import OPTIONAL, JSONRecord, dumps


@dataclasses.dataclass(frozen=True)
class LayerActivity:
    """Counts of one layer and direction of a recurrent module, over all non-padded steps.

    Attributes:
        name: Name of the module in the model, with layer and direction if it has several.
        kind: Class name of the module.
        input_size: Number of inputs.
        hidden_size: Number of units.
        gates: Number of gates: 3 for a GRU, 4 for an LSTM.
        recurrent_size: Length of a row of recurrent weights; None for ``hidden_size``. See :class:`LayerCost`.
        steps: Time steps times batch rows.
        active: Number of steps at which each output was active: an event, or ``|h| > tolerance`` for a dense layer.
        input_active: Number of non-zero input entries. For the output of a layer with ``events="delta"``, its number of
            events.
        inside_window: Number of states whose distance to the threshold is below ``width``. None for dense layers.
        nonzero_gradients: Number of states with ``dy/dc != 0``. None for dense layers.
        input_gradient_density: Fraction of the input's gradient that is needed; 0 if the input needs none.
        input_pruned: Counts of the product with the input weights if some of them are zero, else None.
        recurrent_pruned: The same for the recurrent weights.
    """

    name: str
    kind: str
    input_size: int
    hidden_size: int
    gates: int
    recurrent_size: int | None
    steps: int
    active: tuple[int, ...]
    input_active: int
    inside_window: int | None
    nonzero_gradients: int | None
    input_gradient_density: float
    input_pruned: PrunedProduct | None = dataclasses.field(default=None, metadata=OPTIONAL)
    recurrent_pruned: PrunedProduct | None = dataclasses.field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.active:
            raise ValueError(
                f"LayerActivity {self.name!r}: requires at least one step and one unit, got {self.steps} and "
                f"{len(self.active)}"
            )

    @functools.cached_property
    def unit_activity(self) -> tuple[float, ...]:
        """Fraction of steps at which each output was active."""
        return tuple(count / self.steps for count in self.active)

    @functools.cached_property
    def cost(self) -> LayerCost:
        """Operation counts of the layer."""
        nonzero = self.nonzero_gradients
        return LayerCost(
            self.input_size,
            self.hidden_size,
            self.gates,
            self.recurrent_size,
            input_density=self.input_active / (self.steps * self.input_size),
            activity=sum(self.active) / (self.steps * len(self.active)),
            gradient_density=1.0 if nonzero is None else nonzero / (self.steps * self.hidden_size),
            input_gradient_density=self.input_gradient_density,
            input_weight_density=1.0 if self.input_pruned is None else self.input_pruned.density,
            recurrent_weight_density=1.0 if self.recurrent_pruned is None else self.recurrent_pruned.density,
        )

    @property
    def products(self) -> list[tuple[PrunedProduct | None, int]]:
        """Counts of the two matrices, with their numbers of weights."""
        rows = self.gates * self.hidden_size
        recurrent = self.hidden_size if self.recurrent_size is None else self.recurrent_size
        return [(self.input_pruned, rows * self.input_size), (self.recurrent_pruned, rows * recurrent)]

    @property
    def activity_sparsity(self) -> float:
        """Fraction of outputs without an event, over units and steps."""
        return 1 - self.cost.activity

    @property
    def backward_sparsity(self) -> float | None:
        """Fraction of states at least ``width`` away from the threshold, as in the paper. None for dense layers."""
        return None if self.inside_window is None else 1 - self.inside_window / (self.steps * self.hidden_size)

    @property
    def backward_skippable(self) -> float | None:
        """Fraction of states with ``dy/dc = 0``, which a kernel can skip. None for dense layers."""
        return None if self.nonzero_gradients is None else 1 - self.cost.gradient_density


@dataclasses.dataclass(frozen=True)
class LinearActivity:
    """Counts of a linear layer, or of a convolution as a linear layer that reads one patch per output position.

    Attributes:
        name: Name of the module in the model.
        in_features: Number of inputs; for a convolution, the entries of a patch in one group of channels.
        out_features: Number of outputs; for a convolution, of output channels.
        calls: Number of input rows or patches.
        active: Number of input entries that are not skipped: the non-zero ones of a linear layer (for the output of a
            layer with ``events="delta"``, its events), all of a convolution.
        pruned: Counts of the product of a linear layer if some of its weights are zero, else None.
    """

    name: str
    in_features: int
    out_features: int
    calls: int
    active: int
    pruned: PrunedProduct | None = dataclasses.field(default=None, metadata=OPTIONAL)

    @property
    def product(self) -> tuple[PrunedProduct | None, int]:
        """Counts of the product, with the number of weights."""
        return self.pruned, self.in_features * self.out_features

    @property
    def input_density(self) -> float:
        """Fraction of input entries that are not skipped."""
        return self.active / (self.calls * self.in_features)

    @property
    def macs(self) -> float:
        """Multiply-accumulates of all rows. Zero inputs and weights of a linear layer are skipped."""
        return float(self.active * self.out_features if self.pruned is None else self.pruned.macs)

    @property
    def dense_macs(self) -> float:
        """Multiply-accumulates of all rows, with nothing skipped."""
        return float(self.calls * self.in_features * self.out_features)


@dataclasses.dataclass(frozen=True)
class ActivitySummary(JSONRecord):
    """Activity, operation counts and estimated energy of a model, per layer and overall.

    MACs are per time step of one sequence. The overall MACs weight each layer by the number of steps it ran. Overall
    sparsities are weighted by the number of units.

    Attributes:
        layers: One entry per layer and direction of each recurrent module.
        linears: One entry per linear layer or convolution.
        parameters: Number of parameters, from :func:`egru.activity.count_parameters`.
        energy: Energy per operation, for the estimate.

    Example:
        >>> model = egru.EGRU(3, 16)
        >>> with egru.ActivityMonitor(model) as monitor:
        ...     _ = model(torch.randn(20, 2, 3))
        >>> summary = monitor.summary()
        >>> summary.steps, [layer.name for layer in summary.layers]
        (40, ['egru'])
    """

    layers: tuple[LayerActivity, ...]
    linears: tuple[LinearActivity, ...]
    parameters: int
    energy: EnergyModel

    @property
    def steps(self) -> int:
        """Time steps times batch rows of the layer that ran most often."""
        return max((layer.steps for layer in self.layers), default=0)

    @property
    def activity_sparsity(self) -> float:
        """Fraction of outputs without an event, averaged over the layers."""
        sparsity = _weighted_mean([(layer.activity_sparsity, layer.hidden_size) for layer in self.layers])
        assert sparsity is not None  # ActivityMonitor raises if no layer ran
        return sparsity

    @property
    def weight_sparsity(self) -> float:
        """Fraction of the weights of recurrent and linear layers that are zero. Biases and thresholds do not count."""
        products = [product for layer in self.layers for product in layer.products]
        return weight_sparsity(products + [linear.product for linear in self.linears])

    @property
    def backward_sparsity(self) -> float | None:
        """Fraction of states at least ``width`` away from the threshold, over event layers. None for a dense model."""
        return _weighted_mean([(layer.backward_sparsity, layer.hidden_size) for layer in self.layers])

    @property
    def backward_skippable(self) -> float | None:
        """Fraction of states with ``dy/dc = 0``, over the event layers. None for a dense model."""
        return _weighted_mean([(layer.backward_skippable, layer.hidden_size) for layer in self.layers])

    @property
    def forward_macs(self) -> float:
        """Effective MACs of one forward step."""
        return self._recurrent(lambda cost: cost.forward) + self._linear(dense=False)

    @property
    def backward_macs(self) -> float:
        """Effective MACs of one backward step. Linear layers count twice their forward MACs."""
        return self._recurrent(lambda cost: cost.backward) + 2 * self._linear(dense=False)

    @property
    def dense_forward_macs(self) -> float:
        """MACs of one forward step with nothing skipped."""
        return self._recurrent(lambda cost: cost.dense.forward) + self._linear(dense=True)

    @property
    def dense_backward_macs(self) -> float:
        """MACs of one backward step with nothing skipped."""
        return self._recurrent(lambda cost: cost.dense.backward) + 2 * self._linear(dense=True)

    @property
    def estimated_joules(self) -> float:
        """Estimated energy of one forward step: the number of MACs times :attr:`energy`."""
        return self.energy.joules(self.forward_macs)

    @property
    def estimated_dense_joules(self) -> float:
        """Estimated energy of one forward step with nothing skipped."""
        return self.energy.joules(self.dense_forward_macs)

    def _recurrent(self, macs: Callable[[LayerCost], float]) -> float:
        """MACs of the recurrent layers per step, each weighted by how often it ran."""
        return sum(macs(layer.cost) * (layer.steps / self.steps) for layer in self.layers)

    def _linear(self, dense: bool) -> float:
        """MACs of the linear layers per step."""
        return sum(linear.dense_macs if dense else linear.macs for linear in self.linears) / self.steps

    def to_json(self) -> str:
        """Return :meth:`to_dict` as JSON text."""
        return dumps(self.to_dict())

    def __str__(self) -> str:
        """Return a table with one row per layer, followed by the assumptions of the energy estimate."""
        header = (
            *("layer", "units", "sparse", "backward", "skippable", "input", "weights"),
            *("MACs fwd", "of dense", "MACs bwd"),
        )
        rows = [
            (
                f"{layer.name} ({layer.kind})",
                f"{layer.hidden_size}",
                format.percent(layer.activity_sparsity),
                format.percent(layer.backward_sparsity),
                format.percent(layer.backward_skippable),
                format.percent(layer.cost.input_density),
                format.percent(1 - weight_sparsity(layer.products)),
                format.count(layer.cost.forward),
                format.percent(layer.cost.forward / layer.cost.dense.forward),
                format.count(layer.cost.backward),
            )
            for layer in self.layers
        ]
        rows += [
            (
                linear.name,
                f"{linear.out_features}",
                "",
                "",
                "",
                format.percent(linear.input_density),
                format.percent(1 - weight_sparsity([linear.product])),
                format.count(linear.macs / self.steps),
                format.percent(linear.macs / linear.dense_macs),
                format.count(2 * linear.macs / self.steps),
            )
            for linear in self.linears
        ]
        total = (
            "overall",
            f"{sum(layer.hidden_size for layer in self.layers)}",
            format.percent(self.activity_sparsity),
            format.percent(self.backward_sparsity),
            format.percent(self.backward_skippable),
            "",
            format.percent(1 - self.weight_sparsity),
            format.count(self.forward_macs),
            format.percent(self.forward_macs / self.dense_forward_macs),
            format.count(self.backward_macs),
        )
        lines = _aligned([header, *rows, total])
        rule = "-" * len(lines[0])
        return "\n".join(
            [
                lines[0],
                rule,
                *lines[1:-1],
                rule,
                lines[-1],
                f"{format.count(self.parameters)} parameters, {self.steps:,} steps; MACs are per time step",
                f"estimated energy {format.joules(self.estimated_joules)} per step, "
                f"dense {format.joules(self.estimated_dense_joules)}, assuming",
                self.energy.assumption,
            ]
        )


def _weighted_mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    """Mean of (value, weight) pairs, without those whose value is None; None if no value is left."""
    known = [(value, weight) for value, weight in values if value is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad the cells of each column to one width: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
