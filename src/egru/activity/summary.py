"""What a monitor saw, as numbers, a table, a dict and JSON."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from egru.activity.operations import EnergyModel, LayerCost


@dataclasses.dataclass(frozen=True)
class LayerActivity:
    """One layer and direction of an event or dense recurrent module, averaged over every real step seen."""

    name: str
    kind: str
    cost: LayerCost
    steps: int
    unit_activity: tuple[float, ...]
    backward_sparsity: float | None
    """The paper's count: states with ``|c - theta| >= width``. None for dense layers."""
    backward_skippable: float | None
    """What a kernel can skip: states with ``dy/dc = 0``. None for dense layers."""

    @property
    def activity_sparsity(self) -> float:
        return 1 - self.cost.activity


@dataclasses.dataclass(frozen=True)
class LinearActivity:
    """A linear layer: MACs with zero inputs skipped. ``calls`` counts input rows."""

    name: str
    in_features: int
    out_features: int
    calls: int
    input_density: float

    @property
    def macs(self) -> float:
        return self.calls * self.input_density * self.in_features * self.out_features

    @property
    def dense_macs(self) -> float:
        return float(self.calls * self.in_features * self.out_features)


@dataclasses.dataclass(frozen=True)
class ActivitySummary:
    """Per layer and overall. MACs are per time step of one sequence; overall sparsities are weighted by units.

    A layer's own MACs are per step of that layer; overall, layers that ran for fewer :attr:`steps` count for less.
    """

    layers: tuple[LayerActivity, ...]
    linears: tuple[LinearActivity, ...]
    parameters: int
    energy: EnergyModel

    def _mean(self, values: list[tuple[float | None, int]]) -> float | None:
        known = [(v, n) for v, n in values if v is not None]
        return sum(v * n for v, n in known) / sum(n for _, n in known) if known else None

    @property
    def steps(self) -> int:
        """Time steps times batch rows, of the layer that ran for most."""
        return max((layer.steps for layer in self.layers), default=0)

    @property
    def activity_sparsity(self) -> float:
        value = self._mean([(layer.activity_sparsity, layer.cost.hidden_size) for layer in self.layers])
        assert value is not None  # a monitor refuses to summarise nothing
        return value

    @property
    def backward_sparsity(self) -> float | None:
        return self._mean([(layer.backward_sparsity, layer.cost.hidden_size) for layer in self.layers])

    @property
    def backward_skippable(self) -> float | None:
        return self._mean([(layer.backward_skippable, layer.cost.hidden_size) for layer in self.layers])

    def _readout(self, dense: bool) -> float:
        total = sum(linear.dense_macs if dense else linear.macs for linear in self.linears)
        return total / self.steps

    def _recurrent(self, macs: Callable[[LayerCost], float]) -> float:
        """A step of all layers, each as often as it ran."""
        return sum(macs(layer.cost) * (layer.steps / self.steps) for layer in self.layers)

    @property
    def forward_macs(self) -> float:
        """Effective MACs of one forward step, layers and readouts as often as they ran."""
        return self._recurrent(lambda cost: cost.forward) + self._readout(dense=False)

    @property
    def backward_macs(self) -> float:
        """Effective MACs of one backward step; a linear layer costs twice its forward."""
        return self._recurrent(lambda cost: cost.backward) + 2 * self._readout(dense=False)

    @property
    def dense_forward_macs(self) -> float:
        return self._recurrent(lambda cost: cost.dense.forward) + self._readout(dense=True)

    @property
    def dense_backward_macs(self) -> float:
        return self._recurrent(lambda cost: cost.dense.backward) + 2 * self._readout(dense=True)

    @property
    def joules(self) -> float:
        """Energy of one forward step under :attr:`energy`'s assumptions."""
        return self.energy.joules(self.forward_macs)

    @property
    def dense_joules(self) -> float:
        return self.energy.joules(self.dense_forward_macs)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            "overall": {
                "parameters": self.parameters,
                "steps": self.steps,
                "activity_sparsity": self.activity_sparsity,
                "backward_sparsity": self.backward_sparsity,
                "backward_skippable": self.backward_skippable,
                "forward_macs": self.forward_macs,
                "dense_forward_macs": self.dense_forward_macs,
                "backward_macs": self.backward_macs,
                "dense_backward_macs": self.dense_backward_macs,
                "joules": self.joules,
                "dense_joules": self.dense_joules,
                "energy_assumption": self.energy.assumption,
            },
            "layers": [
                {
                    "name": layer.name,
                    "kind": layer.kind,
                    "input_size": layer.cost.input_size,
                    "hidden_size": layer.cost.hidden_size,
                    "steps": layer.steps,
                    "input_density": layer.cost.input_density,
                    "activity_sparsity": layer.activity_sparsity,
                    "backward_sparsity": layer.backward_sparsity,
                    "backward_skippable": layer.backward_skippable,
                    "forward_macs": layer.cost.forward,
                    "dense_forward_macs": layer.cost.dense.forward,
                    "backward_macs": layer.cost.backward,
                    "dense_backward_macs": layer.cost.dense.backward,
                    "unit_activity": list(layer.unit_activity),
                }
                for layer in self.layers
            ],
            "linears": [dataclasses.asdict(linear) | {"macs": linear.macs} for linear in self.linears],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "ActivitySummary":
        """The summary that :meth:`to_dict` wrote down; what it left out follows from the operation counts.

        In older dictionaries layers have no steps of their own: they are taken to have run for the overall ones.
        """
        overall = plain["overall"]
        costs = re.match(r"(\S+) pJ .*? and (\S+) pJ", overall["energy_assumption"])
        if costs is None:
            raise ValueError(f"ActivitySummary: unknown energy assumption {overall['energy_assumption']!r}")
        layers = tuple(_layer(layer, layer.get("steps", overall["steps"])) for layer in plain["layers"])
        fields = [field.name for field in dataclasses.fields(LinearActivity)]
        linears = tuple(LinearActivity(**{name: linear[name] for name in fields}) for linear in plain["linears"])
        mac, weight_read = (float(value) * 1e-12 for value in costs.groups())
        return cls(layers, linears, overall["parameters"], EnergyModel(mac, weight_read))

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        header = ("layer", "units", "sparse", "backward", "skippable", "input", "MACs fwd", "of dense", "MACs bwd")
        rows = [
            (
                f"{layer.name} ({layer.kind})",
                f"{layer.cost.hidden_size}",
                _percent(layer.activity_sparsity),
                _percent(layer.backward_sparsity),
                _percent(layer.backward_skippable),
                _percent(layer.cost.input_density),
                _count(layer.cost.forward),
                _percent(layer.cost.forward / layer.cost.dense.forward),
                _count(layer.cost.backward),
            )
            for layer in self.layers
        ]
        rows += [
            (
                f"{linear.name} (Linear)",
                f"{linear.out_features}",
                "",
                "",
                "",
                _percent(linear.input_density),
                _count(linear.macs / self.steps),
                _percent(linear.input_density),
                _count(2 * linear.macs / self.steps),
            )
            for linear in self.linears
        ]
        total = (
            "overall",
            f"{sum(layer.cost.hidden_size for layer in self.layers)}",
            _percent(self.activity_sparsity),
            _percent(self.backward_sparsity),
            _percent(self.backward_skippable),
            "",
            _count(self.forward_macs),
            _percent(self.forward_macs / self.dense_forward_macs),
            _count(self.backward_macs),
        )
        table = [header, *rows, total]
        widths = [max(len(row[i]) for row in table) for i in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        rule = "-" * len(lines[0])
        return "\n".join(
            [
                lines[0],
                rule,
                *lines[1:-1],
                rule,
                lines[-1],
                f"{_count(self.parameters)} parameters; {self.steps:,} steps seen; MACs are per time step",
                f"energy {self.joules * 1e6:.3g} uJ a step, dense {self.dense_joules * 1e6:.3g}, assuming",
                self.energy.assumption,
            ]
        )


def _layer(plain: Mapping[str, Any], steps: int) -> LayerActivity:
    inputs, H = plain["input_size"], plain["hidden_size"]
    units = tuple(plain["unit_activity"])
    projected = len(units) if len(units) != H else None
    recurrent = {"CoRNN": 2 * H, "IndRNN": 1}.get(plain["kind"], projected)
    fan_in = H if recurrent is None else recurrent
    skippable, activity = plain["backward_skippable"], 1 - plain["activity_sparsity"]
    cost = LayerCost(
        inputs,
        H,
        gates=round(plain["dense_forward_macs"] / (H * (inputs + fan_in + 1))),
        recurrent_size=recurrent,
        input_density=plain["input_density"],
        activity=activity,
        gradient_density=1.0 if skippable is None else 1 - skippable,
    )
    rows = cost.gates * H
    below = (plain["backward_macs"] - cost.backward) / (rows * inputs)
    cost = dataclasses.replace(cost, input_gradient_density=below if below > 1e-9 else 0.0)
    names = ("backward_sparsity", "backward_skippable")
    return LayerActivity(plain["name"], plain["kind"], cost, steps, units, *(plain[name] for name in names))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"
