"""The event-based LSTM."""

from typing import Any

import torch
from torch import Tensor, nn

from egru.events import Surrogate
from egru.layers import checks
from egru.layers.dense import always_active, from_dense, is_always_active, to_dense, warn_differences
from egru.layers.kernel_layer import KernelEventRNN
from egru.layers.stack import base_arguments
from egru.layers.threshold import BELOW_ALL_STATES, Threshold
from egru.types import COMPARES, RESETS, Backend, Compare, DropoutMode, Events, Reset


class ELSTM(KernelEventRNN):
    r"""Event-based LSTM.

    A unit whose memory cell ``c`` exceeds its threshold emits ``o * tanh(c)``, then clears ``c``::

        i, f, o = sigmoid(x_t W_* + y_{t-1} V_* + b_*)        e_t = [c_t > theta]
        g_t = tanh(x_t W_g + y_{t-1} V_g + b_g)               y_t = o_t * tanh(c_t) * e_t
        c_t = f_t * c_{t-1} + i_t * g_t - y_{t-1}

    With ``compare="output"`` the threshold is compared with what an event emits, ``e_t = [o_t * tanh(c_t) > theta]``.
    Outputs lie in [-1, 1], whereas the memory cell grows with the length of a sequence, so a threshold has the same
    meaning at every step and no event is small.

    Parameters have the names, shapes and gate order (i, f, g, o) of ``torch.nn.LSTM``, plus the thresholds
    ``threshold_l{k}``; the state dict of an LSTM loads unchanged. :meth:`from_lstm` builds a layer that computes the
    same function as a ``torch.nn.LSTM``.

    The compiled core runs the layer on CPUs. On NVIDIA GPUs it runs in fused steps: one matrix product and one
    element-wise kernel per step.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: As in ``torch.nn.LSTM``.
        events (egru.types.Events): As in :class:`egru.EGRU`. ``"delta"`` requires ``reset="none"`` and
            ``compare="output"``.
        reset, threshold, surrogate, reset_scale, dropconnect, zoneout, dropout_mode: As in :class:`egru.EGRU`.
        backend, lean, recurrent_clip, device, dtype: As in :class:`egru.EGRU`.
        compare (Compare): What is compared with the threshold: the memory cell ``c`` (``"cell"``), or the value of an
            event, ``o * tanh(c)`` (``"output"``). Resets clear ``c`` in both cases. Default: ``"cell"``.

    Returns:
        ``y, state``, as :class:`egru.EGRU` does. The state is ``EventState(c, y)``; ``y`` takes the place of torch's
        ``h``.

    Example:
        >>> import torch, egru
        >>> layer = egru.ELSTM(4, 8)
        >>> y, state = layer(torch.randn(20, 3, 4))
        >>> y.shape
        torch.Size([20, 3, 8])
    """

    gates = 4
    resets = RESETS
    emits_state = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        events: Events = "positive",
        reset: Reset = "output",
        compare: Compare = "cell",
        threshold: Threshold | None = None,
        surrogate: Surrogate | None = None,
        reset_scale: float | Tensor = 1.0,
        dropconnect: float = 0.0,
        zoneout: float = 0.0,
        dropout_mode: DropoutMode = "variational",
        backend: Backend = "auto",
        lean: bool = False,
        recurrent_clip: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(**base_arguments(locals()))
        self.compare: Compare = checks.choice(type(self).__name__, "compare", compare, COMPARES)
        self._set_kernel_options(backend, lean)
        if events == "delta" and compare != "output":
            raise ValueError(f"ELSTM: events='delta' requires compare='output', got compare={compare!r}")

    @property
    def emits_compared(self) -> bool:
        return self.compare == "output"

    def _cell_options(self) -> dict[str, Any]:
        return {"cell": "lstm", "compare": self.compare, "reset_gate": "after"}

    @classmethod
    def from_lstm(cls, lstm: nn.LSTM, **options: Any) -> "ELSTM":
        """Build an event layer that computes the same function as a ``torch.nn.LSTM``.

        Every unit emits its output at every step: there is no reset, and the thresholds are below every output
        (``compare="output"``). With ``events="signed"`` and ``"delta"`` they are 0, and the surrogate is bounded, so
        that gradients are the same as well. Dropout is drawn per step, as in torch. The state
        ``(h_n, c_n)`` of the LSTM is ``(state.y, state.c)``. :func:`egru.compress.raise_thresholds` makes the layer
        sparse.

        Args:
            lstm: Trained layer.
            options: Arguments of :class:`ELSTM` that differ. If they change the function, a warning says that the
                layer has to be trained again.

        Returns:
            The event layer, with a copy of the weights and in the mode (training or evaluation) of ``lstm``.

        Raises:
            TypeError: If ``lstm`` is not a ``torch.nn.LSTM``.
            ValueError: If ``lstm`` has projections (``proj_size``).

        Example:
            >>> import torch, egru
            >>> lstm = torch.nn.LSTM(4, 8)
            >>> layer = egru.ELSTM.from_lstm(lstm)
            >>> x = torch.randn(5, 1, 4)
            >>> torch.allclose(layer(x)[0], lstm(x)[0], atol=1e-6)
            True
        """
        limit = {"reset": "none", "compare": "output", **always_active(options.get("events", "positive"))}
        layer = from_dense(cls, lstm, nn.LSTM, limit, options)
        # Outputs are in [-1, 1]; a memory cell may become as small as minus the number of steps.
        bound = -1 if layer.compare == "output" else BELOW_ALL_STATES / 10
        fits = {
            "reset": layer.reset == "none" or not layer._initial_reset_scale,
            "threshold_config": is_always_active(layer, bound),
            "zoneout": not layer.zoneout,
        }
        warn_differences(layer, nn.LSTM, fits)
        return layer

    def to_lstm(self) -> nn.LSTM:
        """Return a ``torch.nn.LSTM`` with a copy of these weights.

        The LSTM emits its output at every step, so its outputs differ from those of this layer.
        """
        return to_dense(self, nn.LSTM)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, compare={self.compare!r}"
