"""The event mechanism around an LSTM and an Elman cell."""

import torch
import torch.nn.functional as F
from torch import Tensor

from egru.events import EventState
from egru.functional import CellUpdate, elman_update, event_sequence, lstm_update
from egru.kernels.call import check_finite, check_result
from egru.layers.stack import EventRNN
from egru.layers.structure import Weights
from egru.types import RESETS


class _PlainEventRNN(EventRNN):
    """An event layer run by autograd through the plain torch loop; there is no kernel for these cells."""

    def _update(self, p: Tensor, y: Tensor, memory: Tensor, hh: Tensor, bias_hh: Tensor | None) -> CellUpdate:
        raise NotImplementedError

    def run_direction(
        self,
        x: Tensor,
        state: EventState,
        weights: Weights,
        keep: Tensor | None = None,
        lengths: Tensor | None = None,
        started: object = None,
    ) -> tuple[Tensor, Tensor, EventState]:
        watched = not torch.compiler.is_compiling()  # a compiled graph cannot stop halfway
        if watched:
            check_finite(x, *state, weights.theta)
        result = event_sequence(
            lambda p, y, memory: self._update(p, y, memory, weights.hh, weights.bias_hh),
            F.linear(x, weights.ih, weights.bias_ih).to(state.c.dtype),  # autocast rounds products, never the state
            state,
            weights.theta,
            reset=self.reset,
            surrogate=self.surrogate,
            reset_scale=weights.reset_scale,
            keep=keep,
            lengths=lengths,
            recurrent_clip=self.recurrent_clip or 0.0,
        )
        if watched:
            check_result(result.state.c)
        return result.y, result.c, result.state


class ELSTM(_PlainEventRNN):
    """Event-based LSTM: a unit whose memory cell ``c`` crosses the threshold emits ``o * tanh(c)`` and is cleared.

    Parameters as in ``torch.nn.LSTM`` (blocks i, f, g, o) plus thresholds; an LSTM's state dict loads unchanged. The
    state is ``EventState(c, y)``: torch's ``(h, c)`` with ``y`` for ``h``. With ``reset="none"`` and a threshold below
    every state it is ``torch.nn.LSTM``. Arguments as in :class:`egru.EGRU`.
    """

    gates = 4
    resets = RESETS
    emits_state = False

    def _update(self, p: Tensor, y: Tensor, memory: Tensor, hh: Tensor, bias_hh: Tensor | None) -> CellUpdate:
        return lstm_update(p, y, memory, hh, bias_hh)


class ERNN(_PlainEventRNN):
    """Event-based Elman network: ``c_t = tanh(x_t W + y_{t-1} V + b) - y_{t-1}``, emitted where it crosses theta.

    Parameters as in ``torch.nn.RNN`` plus thresholds. An Elman unit has no memory of its own, so there is nothing for
    the "hard" and "threshold" resets to clear: ``reset`` is "output" or "none". With ``"none"`` and a threshold below
    every state it is ``torch.nn.RNN``. Arguments as in :class:`egru.EGRU`.
    """

    gates = 1
    resets = ("output", "none")

    def _update(self, p: Tensor, y: Tensor, memory: Tensor, hh: Tensor, bias_hh: Tensor | None) -> CellUpdate:
        return elman_update(p, y, memory, hh, bias_hh)
