"""Dense recurrent baselines of the paper, with the calling convention of ``torch.nn.GRU``.

The GRU and LSTM baselines are in :mod:`egru.models.dense`.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egru.layers import checks


class CoRNNState(NamedTuple):
    """State of a :class:`CoRNN`.

    Attributes:
        y: Positions of the oscillators, ``(B, H)``.
        z: Velocities of the oscillators, ``(B, H)``.
    """

    y: Tensor
    z: Tensor


class CoRNN(nn.Module):
    r"""Coupled oscillatory RNN (Rusch and Mishra, ICLR 2021)::

        z_t = z_{t-1} + dt * (tanh(W [y_{t-1}, z_{t-1}] + V x_t + b) - gamma * y_{t-1} - epsilon * z_{t-1})
        y_t = y_{t-1} + dt * z_t

    The defaults are those of its authors for sequential MNIST.

    Args:
        input_size: Number of input features ``I``.
        hidden_size: Number of oscillators ``H``.
        dt: Time step. Default: 0.042.
        gamma: Stiffness of the oscillators. Default: 2.7.
        epsilon: Damping of the oscillators. Default: 4.7.
        batch_first: If True, sequences are ``(B, T, features)``. Default: False.
        device: Device of the parameters. If None, torch's default.
        dtype: Dtype of the parameters. If None, torch's default.

    Example:
        >>> import torch, egru
        >>> y, state = egru.models.CoRNN(3, 8)(torch.randn(20, 2, 3))
        >>> y.shape
        torch.Size([20, 2, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        dt: float = 0.042,
        gamma: float = 2.7,
        epsilon: float = 4.7,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = checks.positive_int("CoRNN", "input_size", input_size)
        self.hidden_size = checks.positive_int("CoRNN", "hidden_size", hidden_size)
        self.dt, self.gamma, self.epsilon, self.batch_first = dt, gamma, epsilon, batch_first
        self.weight_ih_l0 = nn.Parameter(torch.empty(hidden_size, input_size, device=device, dtype=dtype))
        self.weight_hh_l0 = nn.Parameter(torch.empty(hidden_size, 2 * hidden_size, device=device, dtype=dtype))
        self.bias_l0 = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters uniformly in ``±1/sqrt(I + 2H)``."""
        bound = 1 / math.sqrt(self.input_size + 2 * self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, state: CoRNNState | None = None) -> tuple[Tensor, CoRNNState]:
        """Run over a sequence.

        Args:
            input: ``(T, B, I)``, or ``(B, T, I)`` with ``batch_first``.
            state: State returned by an earlier call. If None, zeros.

        Returns:
            The positions ``y`` at every step and the last state.
        """
        checks.sequence_input("CoRNN", input, self.input_size, self.weight_ih_l0, (3,), "(time, batch, features)")
        x = input.transpose(0, 1) if self.batch_first else input
        if state is None:
            zeros = x.new_zeros(x.shape[1], self.hidden_size)
            state = CoRNNState(zeros, zeros)
        y, z = state
        ys: list[Tensor] = []
        weight = self.weight_hh_l0.T
        for p in F.linear(x, self.weight_ih_l0, self.bias_l0):
            force = torch.tanh(torch.addmm(p, torch.cat([y, z], -1), weight))
            z = torch.add((1 - self.dt * self.epsilon) * z, y, alpha=-self.dt * self.gamma).add(force, alpha=self.dt)
            y = y.add(z, alpha=self.dt)
            ys.append(y)
        out = torch.stack(ys)
        return (out.transpose(0, 1) if self.batch_first else out), CoRNNState(y, z)


class IndRNN(nn.Module):
    r"""Independently recurrent network (Li et al., CVPR 2018)::

        h_t = relu(W x_t + u * h_{t-1} + b)

    ``u`` is clamped to [-1, 1]. Its authors derive a bound from the length of their sequences, which a text does not
    have.

    Args:
        input_size: Number of input features ``I``.
        hidden_size: Number of units ``H`` per layer.
        num_layers: Number of layers. Default: 1.
        batch_first: If True, sequences are ``(B, T, features)``. Default: False.
        normalise: Whether to normalise ``W x_t`` over the units. A unit sums its input over about
            ``1 / (1 - u)`` steps, so without it the outputs of a deep stack grow with depth. The authors normalise over
            the batch instead, which requires running statistics in evaluation. Default: False.
        device: Device of the parameters. If None, torch's default.
        dtype: Dtype of the parameters. If None, torch's default.

    Example:
        >>> import torch, egru
        >>> y, state = egru.models.IndRNN(3, 8, num_layers=2)(torch.randn(20, 2, 3))
        >>> y.shape, state.shape
        (torch.Size([20, 2, 8]), torch.Size([2, 2, 8]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        batch_first: bool = False,
        normalise: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = checks.positive_int("IndRNN", "input_size", input_size)
        self.hidden_size = checks.positive_int("IndRNN", "hidden_size", hidden_size)
        self.num_layers = checks.positive_int("IndRNN", "num_layers", num_layers)
        self.batch_first, self.normalise = batch_first, normalise
        for layer in range(num_layers):
            features = input_size if layer == 0 else hidden_size
            weight = nn.Parameter(torch.empty(hidden_size, features, device=device, dtype=dtype))
            self.register_parameter(f"weight_ih_l{layer}", weight)
            for name in ("weight_hh", "bias"):
                vector = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
                self.register_parameter(f"{name}_l{layer}", vector)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise input weights by Kaiming's rule, ``u`` uniformly in [0, 1], and biases to zero."""
        for name, parameter in self.named_parameters():
            if name.startswith("weight_ih"):
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            elif name.startswith("weight_hh"):
                nn.init.uniform_(parameter, 0, 1)
            else:
                nn.init.zeros_(parameter)

    def forward(self, input: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run over a sequence.

        Args:
            input: ``(T, B, I)``, or ``(B, T, I)`` with ``batch_first``.
            state: State returned by an earlier call. If None, zeros.

        Returns:
            The output of the last layer and the last state, ``(num_layers, B, H)``.
        """
        like = self.get_parameter("weight_ih_l0")
        checks.sequence_input("IndRNN", input, self.input_size, like, (3,), "(time, batch, features)")
        x = input.transpose(0, 1) if self.batch_first else input
        last: list[Tensor] = []
        for layer in range(self.num_layers):
            h = x.new_zeros(x.shape[1], self.hidden_size) if state is None else state[layer]
            u = self.get_parameter(f"weight_hh_l{layer}").clamp(-1, 1)
            hs: list[Tensor] = []
            ps = F.linear(x, self.get_parameter(f"weight_ih_l{layer}"))
            if self.normalise:
                ps = F.layer_norm(ps, (self.hidden_size,))
            for p in ps + self.get_parameter(f"bias_l{layer}"):
                h = torch.relu(p + u * h)
                hs.append(h)
            x = torch.stack(hs)
            last.append(h)
        return (x.transpose(0, 1) if self.batch_first else x), torch.stack(last)


class DenseIndRNN(nn.Module):
    """Densely connected IndRNN: the word-level Penn Treebank model of Li et al. (2019).

    A dense layer is a wide IndRNN (``4 * growth`` units) followed by a narrow one (``growth`` units), whose output is
    concatenated to the layer's input. An IndRNN after each block halves the width; after the last block it maps to
    ``output_size``. All are normalised.

    Args:
        input_size: Number of input features.
        output_size: Number of output features.
        growth: Number of features that a dense layer adds. Default: 256.
        blocks: Number of dense layers per block. Default: ``(8, 6, 4)``.

    Example:
        >>> model = egru.models.DenseIndRNN(4, 3, growth=8, blocks=(2, 1))
        >>> output, state = model(torch.randn(20, 2, 4))
        >>> output.shape
        torch.Size([20, 2, 3])
    """

    def __init__(
        self, input_size: int, output_size: int, *, growth: int = 256, blocks: tuple[int, ...] = (8, 6, 4)
    ) -> None:
        super().__init__()
        self.dense, self.transitions = nn.ModuleList(), nn.ModuleList()
        layer = functools.partial(IndRNN, normalise=True)
        width = input_size
        for i, layers in enumerate(blocks):
            block = nn.ModuleList()
            for _ in range(layers):
                block.append(nn.ModuleList([layer(width, 4 * growth), layer(4 * growth, growth)]))
                width += growth
            self.dense.append(block)
            after = output_size if i == len(blocks) - 1 else width // 2
            self.transitions.append(layer(width, after))
            width = after

    def forward(self, input: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """Run over a sequence.

        Args:
            input: ``(T, B, input_size)``.
            state: State returned by an earlier call. If None, zeros.

        Returns:
            The output, ``(T, B, output_size)``, and the last state, a list with one entry per IndRNN in the order of
            execution.
        """
        last: list[Tensor] = []

        def run(layer: nn.Module, x: Tensor) -> Tensor:
            y, h = layer(x, None if state is None else state[len(last)])
            last.append(h)
            return y

        x = input
        for block, transition in zip(self.dense, self.transitions, strict=True):
            for wide, narrow in block:  # pyright: ignore[reportGeneralTypeIssues]
                x = torch.cat([x, run(narrow, run(wide, x))], -1)
            x = run(transition, x)
        return x, last
