"""A sequence classifier: recurrent layers, a summary of the last layer's output over time, and a linear readout."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egru.layers import EGRU, EventRNN, checks
from egru.layers.dropout import sequence_dropout
from egru.models.stack import RecurrentStack
from egru.trace import PAPER_DECAY, exponential_trace
from egru.types import READOUTS, Cell, Readout


class ClassifierState(NamedTuple):
    """State of a classifier between two parts of a sequence.

    Attributes:
        layers: State of every layer.
        summary: Summary of the outputs so far, ``(B, H)``.
        steps: Number of steps that the summary covers.
    """

    layers: tuple[Any, ...]
    summary: Tensor
    steps: int


class SequenceClassifier(RecurrentStack):
    r"""Classifier of sequences.

    Args:
        input_size: Number of features that the first layer reads.
        hidden_size: Number of units per layer.
        classes: Number of classes.
        num_layers: Number of recurrent layers. Default: 1.
        cell: Recurrent layer, one of :data:`egru.types.CELLS`. Default: ``"egru"``.
        readout: Input of the linear readout. ``"trace"`` (paper) is ``tr_t = decay * tr_{t-1} + gain * y_t`` at the
            last step, ``"mean"`` the mean output, ``"last"`` the last output. ``"every"`` reads the output of every
            step and returns scores ``(B, T, classes)``. Default: ``"trace"``.
        decay: Decay of the trace per step. Default: the paper's ``exp(-1/10)``.
        gain: Gain of the trace. Default: 1.
        normalise: Whether to apply batch normalisation to the summary. In training, a batch of one sequence has no
            variance; it is normalised by the running statistics and does not update them. Default: False.
        centre: Whether to subtract the buffer ``mean`` from every frame. The buffer starts at zero; set it to the mean
            training frame. This helps if most pixels are on most of the time. Default: False.
        input_dropout: Dropout probability of the input of the first layer, one mask per sequence. Default: 0.
        dropout: Dropout probability of the outputs of all layers except the last, one mask per sequence. Default: 0.
        output_dropout: Dropout probability of the output of the last layer, one mask per sequence. Default: 0.
        head: Module applied to every frame before the layers, ``(T * B, ...)`` to ``(T * B, input_size)``. If None,
            frames are flattened.
        options: Further arguments of every layer, such as ``threshold``, ``surrogate``, ``reset``, ``dropconnect`` or
            ``zoneout``.

    Inputs:
        - **x**: Sequences, ``(B, T, features)`` or ``(B, T, ...)``.
        - **state** (ClassifierState): State returned by an earlier call, to continue its sequences. If None, start
          from zeros.

    Returns:
        - **scores**: ``(B, classes)``, or ``(B, T, classes)`` with ``readout="every"``.
        - **state** (ClassifierState): State after the last step.

    Raises:
        TypeError: If an option is not supported or has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch, egru
        >>> model = egru.models.SequenceClassifier(input_size=1, hidden_size=64, classes=10)
        >>> scores, state = model(torch.randn(8, 100, 1))
        >>> scores.shape
        torch.Size([8, 10])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        classes: int,
        *,
        num_layers: int = 1,
        cell: Cell = "egru",
        readout: Readout = "trace",
        decay: float = PAPER_DECAY,
        gain: float = 1.0,
        normalise: bool = False,
        centre: bool = False,
        input_dropout: float = 0.0,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        head: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        for name, value in (("num_layers", num_layers), ("classes", classes)):
            checks.positive_int(owner, name, value)
        self.summary: Readout = checks.choice(owner, "readout", readout, READOUTS)
        self.decay = checks.probability(owner, "decay", decay)
        self.gain = checks.scale(owner, "gain", gain)
        self.input_dropout = checks.probability(owner, "input_dropout", input_dropout)
        if normalise and readout == "every":
            raise ValueError(f"{owner}: normalise=True requires one summary per sequence, got readout='every'")
        if centre and head is not None:
            raise ValueError(f"{owner}: centre=True is not supported with a head")
        self.head = head
        self.mean: Tensor | None
        self.register_buffer("mean", torch.zeros(input_size) if centre else None)
        self.input_size = input_size
        self._add_layers([input_size, *[hidden_size] * num_layers], cell, dropout, output_dropout, options)
        self.normalise = nn.BatchNorm1d(hidden_size) if normalise else None
        self.readout = nn.Linear(hidden_size, classes)
        nn.init.xavier_uniform_(self.readout.weight)

    def forward(self, x: Tensor, state: ClassifierState | None = None) -> tuple[Tensor, ClassifierState]:
        """Classify sequences; see the class for arguments and results."""
        if x.dim() < 3:
            shape = f"(batch, time, {self.input_size if self.head is None else '...'})"
            raise ValueError(f"{type(self).__name__}: input must have shape {shape}, got {tuple(x.shape)}")
        x = x.transpose(0, 1)
        T, B = x.shape[:2]
        x = x.flatten(2) if self.head is None else self.head(x.flatten(0, 1)).unflatten(0, (T, B))
        if self.mean is not None:
            x = x - self.mean
        x = sequence_dropout(x, self.input_dropout, "variational", self.training)
        _, y, layers = self._run_layers(x, None if state is None else state.layers)
        steps = T if state is None else T + state.steps
        if self.summary in ("last", "every"):
            summary = y[-1]
        else:
            decay, gain = (1.0, 1.0) if self.summary == "mean" else (self.decay, self.gain)
            initial = None if state is None else state.summary
            summary = exponential_trace(y, decay, gain=gain, initial=initial, last=True)
        state = ClassifierState(layers, summary, steps)
        if self.summary == "every":
            return self.readout(y).transpose(0, 1), state
        value = summary / steps if self.summary == "mean" else summary
        return self.readout(value if self.normalise is None else self._apply_norm(value, self.normalise)), state

    def _apply_norm(self, value: Tensor, norm: nn.BatchNorm1d) -> Tensor:
        if not norm.training or len(value) > 1:
            return norm(value)
        return nn.functional.batch_norm(
            value, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )

    @torch.no_grad()
    def streaming(self) -> dict[str, Any]:
        """Return the arguments of :class:`egru.EventEngine` that run this model step by step.

        At every step, the engine returns the scores of this model for the sequence so far. Gain and normalisation are
        folded into a copy of the readout. The mean frame is folded into the biases of a copy of the first layer, so the
        engine reads frames without subtracting it.

        Returns:
            Keyword arguments ``module``, ``readout`` and ``trace``.

        Raises:
            ValueError: If the engine does not support the head or the cell.

        Example:
            >>> import egru
            >>> model = egru.models.SequenceClassifier(1, 64, 10)
            >>> engine = egru.EventEngine(**model.streaming())
        """
        owner = type(self).__name__
        if self.head is not None:
            raise ValueError(f"{owner}: EventEngine does not run a head; pass the head's output to the engine instead")
        if not all(isinstance(layer, EGRU) for layer in self.layers):
            raise ValueError(f"{owner}: EventEngine requires cell='egru', got {type(self.layer0).__name__} layers")
        weight, bias = self.readout.weight.double(), self.readout.bias.double()
        if self.normalise is not None:
            norm = self.normalise
            mean, variance = norm.get_buffer("running_mean").double(), norm.get_buffer("running_var").double()
            slope = norm.weight.double() / (variance + norm.eps).sqrt()
            bias = bias + weight @ (norm.bias.double() - slope * mean)
            weight = weight * slope
        readout = copy.deepcopy(self.readout)
        readout.weight.copy_(weight * (self.gain if self.summary == "trace" else 1.0))
        readout.bias.copy_(bias)
        trace = {"trace": self.decay, "mean": "mean"}.get(self.summary)
        layers = self.layers
        if self.mean is not None:
            first = layers[0]
            assert isinstance(first, EventRNN)
            layers[0] = first.fold_input(torch.eye(len(self.mean)).to(self.mean), -self.mean)
        return {"module": nn.Sequential(*layers), "readout": readout, "trace": trace}
