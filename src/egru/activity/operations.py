"""Counting: parameters, multiply-accumulates, energy. Definitions shared by every report.

MACs of one time step of one layer with ``I`` inputs of density ``d``, ``H`` units of activity ``1 - alpha`` and ``g``
gates, as in the paper: ``g*H*(d*I + (1-alpha)*H) + g*H``; a readout adds ``(1-alpha)*H*out``.
"""

import dataclasses
from collections.abc import Sequence

from torch import nn

from egru.layers import EGRU, EGRUCell, event_layers


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """One layer in one direction, with how much of it was in use.

    Densities are fractions of non-zero entries: of the input, of the output (``activity``), of ``dy/dc``
    (``gradient_density``: what the backward pass cannot skip), and of the input's gradient, 0 where none is needed.
    ``recurrent_size`` is the length of a recurrent weight row: ``H``; 2H for coRNN; ``proj_size`` of a projected LSTM;
    1 where units are independent.
    """

    input_size: int
    hidden_size: int
    gates: int = 3
    recurrent_size: int | None = None
    input_density: float = 1.0
    activity: float = 1.0
    gradient_density: float = 1.0
    input_gradient_density: float = 0.0

    @property
    def _fan_in(self) -> int:
        return self.hidden_size if self.recurrent_size is None else self.recurrent_size

    @property
    def forward(self) -> float:
        """Effective MACs of one forward step."""
        rows = self.gates * self.hidden_size
        return rows * (self.input_density * self.input_size + self.activity * self._fan_in) + rows

    @property
    def backward(self) -> float:
        """Effective MACs of one backward step: ``dy`` where it is used, ``dV`` and ``dW`` from events, ``dx``."""
        rows = self.gates * self.hidden_size
        recurrent = (self.gradient_density + self.activity) * self._fan_in
        inputs = (self.input_density + self.input_gradient_density) * self.input_size
        return rows * (recurrent + inputs) + rows

    @property
    def dense(self) -> "LayerCost":
        """The same layer with nothing skipped."""
        needs_input_gradient = float(self.input_gradient_density > 0)
        return dataclasses.replace(
            self, input_density=1.0, activity=1.0, gradient_density=1.0, input_gradient_density=needs_input_gradient
        )


def macs_per_step(layers: Sequence[LayerCost], outputs: int = 0) -> float:
    """Effective forward MACs a time step, the paper's count: the layers and a readout of the last one's events."""
    readout = layers[-1].activity * layers[-1].hidden_size * outputs if layers else 0.0
    return sum(layer.forward for layer in layers) + readout


def count_parameters(model: nn.Module) -> int:
    """Parameters that matter, the paper's count: of two biases that only ever add up, one; shared tensors once.

    In torch's layout a GRU has two biases per gate. They are one degree of freedom in every gate but the candidate of
    the "after" form. For plain torch layers this is the ordinary count.
    """
    total = sum(p.numel() for p in model.parameters())
    for _, layer in event_layers(model):
        if layer.bias:
            distinct = 1 if isinstance(layer, EGRU | EGRUCell) and layer.reset_gate == "after" else 0
            total -= (layer.gates - distinct) * layer.hidden_size * len(layer.directions())
    return total


@dataclasses.dataclass(frozen=True)
class EnergyModel:
    """Energy per operation; the defaults are published figures for 45 nm at 0.9 V (Horowitz, ISSCC 2014).

    A 32-bit floating multiply and add, 3.7 + 0.9 pJ, and one 32-bit weight fetched for each from a 1 MB on-chip
    memory, half of the 100 pJ of a 64-bit access. State, activations and control are not counted, and nothing is
    reused between batch rows: a model of an event-driven chip serving one stream, not of a GPU.
    """

    mac: float = 4.6e-12
    weight_read: float = 50e-12

    def joules(self, macs: float) -> float:
        return macs * (self.mac + self.weight_read)

    @property
    def assumption(self) -> str:
        return (
            f"{self.mac * 1e12:g} pJ a 32-bit multiply-accumulate and {self.weight_read * 1e12:g} pJ for its weight "
            "from 1 MB on-chip memory (45 nm, Horowitz 2014); state and control not counted"
        )
