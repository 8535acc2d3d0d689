"""Sequences to classes: recurrent layers, a summary of what the last one said, a linear readout."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egru.layers import EGRU, checks
from egru.layers.dropout import sequence_dropout
from egru.models.stack import RecurrentStack
from egru.trace import PAPER_DECAY, exponential_trace

READOUTS = ("trace", "mean", "last", "every")


class ClassifierState(NamedTuple):
    """What a classifier carries from one piece of a sequence to the next: layers, summary so far, steps it is over."""

    layers: tuple[Any, ...]
    summary: Tensor
    steps: int


class SequenceClassifier(RecurrentStack):
    r"""``scores, state = model(x, state)``: ``x`` of shape ``(B, T, features)``, or ``(B, T, ...)`` which is flattened.

    Args:
        input_size, hidden_size, classes: units of the input, of every layer, of the readout.
        num_layers: recurrent layers.
        cell: "egru", "elstm", "ernn", "gru", "lstm", "cornn" or "indrnn".
        readout: what the linear layer reads. "trace": ``tr_t = decay * tr_{t-1} + gain * y_t`` at the last step, as in
            the paper; "mean" of the outputs; "last" output; or "every" output, for scores ``(B, T, classes)``.
        decay, gain: of the trace.
        normalise: batch normalisation between summary and readout. In training, a single row, which has no variance, is
            normalised by the running statistics and leaves them as they are.
        centre: subtract the buffer ``mean`` from every frame. It starts as zeros: set it to the mean training frame.
            Pixels that are mostly on otherwise drown those that differ.
        input_dropout: on what the first layer reads, the head's features where there is a head; variational.
        dropout, output_dropout: on the outputs of all layers but the last, and of the last; variational.
        head: reads every frame, ``(T * B, ...)`` to ``(T * B, input_size)``, before the layers do.
        options: go to every layer: ``threshold``, ``surrogate``, ``reset``, ``dropconnect``, ``zoneout``, …
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        classes: int,
        *,
        num_layers: int = 1,
        cell: str = "egru",
        readout: str = "trace",
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
        me = type(self).__name__
        for name, value in (("num_layers", num_layers), ("classes", classes)):
            checks.positive_int(me, name, value)
        self.summary = checks.choice(me, "readout", readout, READOUTS)
        self.decay = checks.probability(me, "decay", decay)
        self.gain = checks.scale(me, "gain", gain)
        self.input_dropout = checks.probability(me, "input_dropout", input_dropout)
        if normalise and readout == "every":
            raise ValueError(f"{me}: normalise=True needs one summary a sequence; got readout='every'")
        if centre and head is not None:
            raise ValueError(f"{me}: centre=True is for layers that read the frames themselves; got a head")
        self.head = head
        self.mean: Tensor | None
        self.register_buffer("mean", torch.zeros(input_size) if centre else None)
        self.input_size = input_size
        self._add_layers([input_size, *[hidden_size] * num_layers], cell, dropout, output_dropout, options)
        self.normalise = nn.BatchNorm1d(hidden_size) if normalise else None
        self.readout = nn.Linear(hidden_size, classes)
        nn.init.xavier_uniform_(self.readout.weight)

    def forward(self, x: Tensor, state: ClassifierState | None = None) -> tuple[Tensor, ClassifierState]:
        if x.dim() < 3:
            me, shape = type(self).__name__, f"(batch, time, {self.input_size if self.head is None else '...'})"
            raise ValueError(f"{me}: input must have shape {shape}, got {tuple(x.shape)}")
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
            before = None if state is None else state.summary
            summary = exponential_trace(y, decay, gain=gain, initial=before, last=True)
        after = ClassifierState(layers, summary, steps)
        if self.summary == "every":
            return self.readout(y).transpose(0, 1), after
        value = summary / steps if self.summary == "mean" else summary
        return self.readout(value if self.normalise is None else self._normalised(value, self.normalise)), after

    def _normalised(self, value: Tensor, norm: nn.BatchNorm1d) -> Tensor:
        if not norm.training or len(value) > 1:
            return norm(value)
        return nn.functional.batch_norm(
            value, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )

    @torch.no_grad()
    def streaming(self) -> dict[str, Any]:
        """Arguments of :class:`egru.EventEngine` for this model: ``EventEngine(**model.streaming())``.

        At every step the engine gives the scores this model gives for the sequence up to there. Gain and normalisation
        are folded into a copy of the readout, the mean that is subtracted into the biases of a copy of the first layer:
        the engine reads the frames as they are, zeros and all.
        """
        me = type(self).__name__
        if self.summary == "mean":
            raise ValueError(f"{me}: the engine has no running mean; accepted readouts: trace, last, every")
        if self.head is not None:
            raise ValueError(f"{me}: the engine runs event layers only; run the head yourself and pass its output on")
        if not all(isinstance(layer, EGRU) for layer in self.layers):
            raise ValueError(f"{me}: the engine runs cell='egru' only, got {type(self.layer0).__name__}")
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
        trace = self.decay if self.summary == "trace" else None
        layers = self.layers
        if self.mean is not None:
            layers[0] = first = _biased(layers[0])
            weight, bias = (first.get_parameter(name) for name in ("weight_ih_l0", "bias_ih_l0"))
            bias -= (weight.double() @ self.mean.double()).to(bias.dtype)
        return {"module": nn.Sequential(*layers), "readout": readout, "trace": trace}


def _biased(layer: Any) -> EGRU:
    """A copy of a one-layer EGRU with biases, zero where it had none."""
    layer = copy.deepcopy(layer)
    if not layer.bias:
        layer.bias = True
        for name in ("bias_ih_l0", "bias_hh_l0"):
            layer.register_parameter(name, nn.Parameter(torch.zeros_like(layer.weight_ih_l0[:, 0])))
    return layer
