"""The event-based Elman network, and the base class of layers without kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from egru._autograd import in_transform
from egru.events import EventState
from egru.functional import CellUpdate, elman_update, event_sequence
from egru.kernels.finite import check_finite, check_result, check_thresholds
from egru.kernels.registry import warn_plain_torch
from egru.layers.stack import EventRNN
from egru.layers.structure import Weights

NO_KERNEL = "no kernel supports this cell"


class AutogradEventRNN(EventRNN):
    """An event layer that runs as a loop of torch operations, differentiated by autograd."""

    def _update(self, p: Tensor, y: Tensor, memory: Tensor, hh: Tensor, bias_hh: Tensor | None) -> CellUpdate:
        """Compute the new state before events are emitted; ``p`` is the input product of the step."""
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
        if not torch.compiler.is_compiling():
            warn_plain_torch(type(self).__name__, NO_KERNEL)
        check_values = not (torch.compiler.is_compiling() or in_transform())  # neither can read values
        if check_values:
            arguments = {"input": x, "state.c": state.c, "state.y": state.y, "the threshold": weights.theta}
            biases = {"bias_ih": weights.bias_ih, "bias_hh": weights.bias_hh}
            check_finite({**arguments, "weight_ih": weights.ih, "weight_hh": weights.hh, **biases})
            check_thresholds(weights.theta, self.events)
        result = event_sequence(
            lambda p, y, memory: self._update(p, y, memory, weights.hh, weights.bias_hh),
            F.linear(x, weights.ih, weights.bias_ih).to(state.c.dtype),  # autocast rounds products, never the state
            state,
            weights.theta,
            events=self.events,
            reset=self.reset,
            surrogate=self.surrogate,
            reset_scale=weights.reset_scale,
            keep=keep,
            lengths=lengths,
            recurrent_clip=self.recurrent_clip or 0.0,
        )
        if check_values:
            check_result(result.state.c)
        return result.y, result.c, result.state


class ERNN(AutogradEventRNN):
    r"""Event-based Elman network.

    A unit whose state ``c`` exceeds its threshold emits it::

        c_t = tanh(x_t W + y_{t-1} V + b) - y_{t-1}           e_t = [c_t > theta]
                                                              y_t = c_t * e_t

    Parameters have the names and shapes of ``torch.nn.RNN``, plus the thresholds ``threshold_l{k}``; the state dict of
    an RNN loads unchanged. With ``reset="none"`` and thresholds below every state, the layer computes the same function
    as ``torch.nn.RNN``. There is no compiled kernel for this cell.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: As in ``torch.nn.RNN``.
        reset: ``"output"`` or ``"none"``. The other resets clear a memory that is carried to the next step, and an
            Elman unit has none.
        events, threshold, surrogate, reset_scale, dropconnect, zoneout: As in :class:`egru.EGRU`.
        dropout_mode, recurrent_clip, device, dtype: As in :class:`egru.EGRU`.

    Returns:
        ``y, state``, as :class:`egru.EGRU` does.

    Example:
        >>> import torch, egru
        >>> layer = egru.ERNN(4, 8, reset="none")
        >>> y, state = layer(torch.randn(20, 3, 4))
        >>> y.shape
        torch.Size([20, 3, 8])
    """

    gates = 1
    resets = ("output", "none")

    def _update(self, p: Tensor, y: Tensor, memory: Tensor, hh: Tensor, bias_hh: Tensor | None) -> CellUpdate:
        return elman_update(p, y, memory, hh, bias_hh)
