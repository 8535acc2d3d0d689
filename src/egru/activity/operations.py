"""Counts of parameters and multiply-accumulate operations (MACs), and an energy estimate.

Following the paper, one step of a layer with ``g`` gates, ``I`` inputs of density ``d`` and ``H`` units of activity
sparsity ``alpha`` takes ``g*H*(d*I + (1-alpha)*H) + g*H`` MACs. A readout adds ``(1-alpha)*H*outputs``. The same holds
for ``events="delta"``, where receivers accumulate changes: ``d`` of a layer above it is its ``1-alpha``. Products with
weights that are zero do not count.
"""

import dataclasses
from collections.abc import Sequence

from torch import nn

from egru.layers import EGRU, EGRUCell, event_layers


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """Operation counts of one layer in one direction.

    Densities are fractions of non-zero entries.

    Args:
        input_size: Number of inputs ``I``.
        hidden_size: Number of units ``H``.
        gates: Number of gates: 3 for a GRU, 4 for an LSTM, 1 for an Elman network. Default: 3.
        recurrent_size: Length of a row of recurrent weights: ``2H`` for a CoRNN, ``proj_size`` for a projected LSTM, 1
            for an IndRNN. If None, ``H``.
        input_density: Density of the input. Default: 1.
        activity: Density of the output. Default: 1.
        gradient_density: Density of ``dy/dc``, which the backward pass cannot skip. Default: 1.
        input_gradient_density: Density of the gradient of the input; 0 if it is not needed. Default: 0.
        input_weight_density: Fraction of the products with non-zero inputs whose weight is not zero. Default: 1.
        recurrent_weight_density: The same for recurrent weights. Default: 1.

    Example:
        >>> from egru.activity import LayerCost
        >>> LayerCost(10, 20, activity=0.25).forward
        960.0
    """

    input_size: int
    hidden_size: int
    gates: int = 3
    recurrent_size: int | None = None
    input_density: float = 1.0
    activity: float = 1.0
    gradient_density: float = 1.0
    input_gradient_density: float = 0.0
    input_weight_density: float = 1.0
    recurrent_weight_density: float = 1.0

    @property
    def _fan_in(self) -> int:
        return self.hidden_size if self.recurrent_size is None else self.recurrent_size

    @property
    def forward(self) -> float:
        """Effective MACs of one forward step."""
        rows = self.gates * self.hidden_size
        inputs = self.input_density * self.input_weight_density * self.input_size
        return rows * (inputs + self.activity * self.recurrent_weight_density * self._fan_in) + rows

    @property
    def backward(self) -> float:
        """Effective MACs of one backward step: gradients of events, recurrent weights, input weights and input."""
        rows = self.gates * self.hidden_size
        recurrent = (self.gradient_density + self.activity) * self.recurrent_weight_density * self._fan_in
        inputs = (self.input_density + self.input_gradient_density) * self.input_weight_density * self.input_size
        return rows * (recurrent + inputs) + rows

    @property
    def dense(self) -> "LayerCost":
        """The cost of the same layer with nothing skipped."""
        needs_input_gradient = float(self.input_gradient_density > 0)
        return LayerCost(
            self.input_size,
            self.hidden_size,
            self.gates,
            self.recurrent_size,
            input_gradient_density=needs_input_gradient,
        )


def macs_per_step(layers: Sequence[LayerCost], outputs: int = 0) -> float:
    """Return the effective forward MACs per time step, as counted in the paper.

    Args:
        layers: Costs of the layers.
        outputs: Number of outputs of a linear readout that reads the events of the last layer. Default: 0.

    Returns:
        Multiply-accumulates per step.

    Example:
        >>> layer = egru.activity.LayerCost(input_size=1, hidden_size=128, activity=0.2)
        >>> round(egru.activity.macs_per_step([layer], outputs=10))
        10854
    """
    readout = layers[-1].activity * layers[-1].hidden_size * outputs if layers else 0.0
    return sum(layer.forward for layer in layers) + readout


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, as counted in the paper.

    Event layers have two biases per gate, like ``torch.nn.GRU``. Two biases that are only ever added count once; with
    ``reset_gate="after"`` both biases of the candidate count. Shared tensors count once. Biases of torch's layers are
    counted as they are.

    Args:
        model: Any module.

    Returns:
        The number of parameters.

    Example:
        >>> egru.activity.count_parameters(egru.EGRU(4, 8))
        320
    """
    total = sum(p.numel() for p in model.parameters())
    for _, layer in event_layers(model):
        if layer.bias:
            distinct = 1 if isinstance(layer, EGRU | EGRUCell) and layer.reset_gate == "after" else 0
            total -= (layer.gates - distinct) * layer.hidden_size * len(layer.directions())
    return total


@dataclasses.dataclass(frozen=True)
class EnergyModel:
    """Energy per operation of an event-driven chip that processes one sequence, for estimates.

    The defaults are published figures for 45 nm at 0.9 V (Horowitz, ISSCC 2014). State, activations and control are not
    counted. A GPU would reuse weights between sequences; here every operation reads its weight.

    Args:
        mac: Joules per 32-bit floating-point multiply-accumulate. Default: 3.7 + 0.9 pJ.
        weight_read: Joules per 32-bit weight read from a 1 MB on-chip memory. Default: 50 pJ, half of a 64-bit access.

    Example:
        >>> energy = egru.activity.EnergyModel()
        >>> f"{1e6 * energy.joules(1_000_000):.1f} µJ"
        '54.6 µJ'
        >>> monitor = egru.ActivityMonitor(egru.EGRU(4, 8), energy=energy)
    """

    mac: float = 4.6e-12
    weight_read: float = 50e-12

    def joules(self, macs: float) -> float:
        """Return the estimated energy of a number of MACs, each with its weight."""
        return macs * (self.mac + self.weight_read)

    @property
    def assumption(self) -> str:
        """The model in words, for reports."""
        return (
            f"{self.mac * 1e12:g} pJ per 32-bit multiply-accumulate and {self.weight_read * 1e12:g} pJ to read its "
            "weight from 1 MB of on-chip memory (45 nm, Horowitz 2014); state and control are not counted"
        )
