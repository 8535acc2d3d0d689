"""The event-based GRU, as a layer and as a cell."""

from typing import Any

import torch
from torch import Tensor, nn

from egru._autograd import is_plain
from egru.events import EventState, Surrogate, check_events
from egru.kernels import begin_sequence
from egru.kernels.cpu.quick import run_quick
from egru.layers import checks
from egru.layers.dense import always_active, from_dense, is_always_active, to_dense, warn_differences
from egru.layers.kernel_layer import KernelEventRNN, autocast_precision
from egru.layers.stack import base_arguments
from egru.layers.structure import Direction
from egru.layers.threshold import Threshold
from egru.types import RESET_GATES, RESETS, Backend, DropoutMode, Events, Reset, ResetGate


class _EventGRU(KernelEventRNN):
    """The part that :class:`EGRU` and :class:`EGRUCell` share: options of the GRU."""

    gates = 3
    resets = RESETS
    reset_gate: ResetGate

    def _set_gru_options(self, reset_gate: ResetGate, backend: Backend, lean: bool) -> None:
        owner = type(self).__name__
        self.reset_gate = checks.choice(owner, "reset_gate", reset_gate, RESET_GATES)
        check_events(self.events, self.reset, reset_gate, owner)
        self._set_kernel_options(backend, lean)

    def begin(self, x: Tensor, ih: Tensor, hh: Tensor) -> object:
        if not x.is_cuda:
            return None
        per_unit = self.reset_scale.dim() and self.reset != "none"
        if per_unit or self.events != "positive" or (self.recurrent_clip and torch.is_grad_enabled()):
            return None  # kernels that can start early do not support these
        return begin_sequence(x, ih, hh, self.reset_gate, autocast_precision(x), self.backend)

    def _quick(self, x: Any, hx: Any, single: bool) -> tuple[Tensor, ...] | None:
        """Run all layers on the CPU with little overhead, or return None if the general route has to run them.

        Args:
            x: Input, ``(T, B, I)``, or ``(B, I)`` for a single step.
            hx: Initial state, or None for zeros.
            single: Whether this is one step of a cell.

        Returns:
            ``(y, c_last, y_last)``, or ``(c_last, y_last)`` for a single step.
        """
        if not (is_plain(x) and x.is_cpu) or torch.is_autocast_enabled("cpu"):
            return None
        if self._observers or self.zoneout or self.lean or self.recurrent_clip or (self.dropconnect and self.training):
            return None
        if self.bidirectional or self.backend not in ("auto", "cpu"):
            return None
        if type(self).run_direction is not KernelEventRNN.run_direction:
            return None  # a subclass runs its own equations
        if hx is None:
            c = y = self._buffer("_rest")
        elif type(hx) is EventState:
            c, y = hx
        else:
            return None
        scale = self._buffer("reset_scale")
        if scale.requires_grad:
            return None
        if self.num_layers == 1:
            return self._quick_layer(self._directions[0].suffix, x, c, y, scale, single)
        if self.dropout and self.training:
            return None
        states = [(c, y)] * self.num_layers
        if hx is not None:
            if not (is_plain(c) and is_plain(y) and c.dim() == y.dim() == 3 and len(c) == len(y) == self.num_layers):
                return None
            states = list(zip(c.unbind(), y.unbind(), strict=True))
        ends: list[tuple[Tensor, ...]] = []
        for direction, start in zip(self._directions, states, strict=True):
            result = self._quick_layer(direction.suffix, x, *start, scale, single)
            if result is None:
                return None
            x = result[0]
            ends.append(result[1:])
        return (x, *(torch.cat(half) for half in zip(*ends, strict=True)))

    def _quick_layer(
        self, suffix: str, x: Tensor, c: Tensor, y: Tensor, scale: Tensor, single: bool
    ) -> tuple[Tensor, ...] | None:
        tensors = (
            x,
            c,
            y,
            self._parameter("weight_ih" + suffix),
            self._parameter("weight_hh" + suffix),
            self._parameter("bias_ih" + suffix) if self.bias else None,
            self._parameter("bias_hh" + suffix) if self.bias else None,
            self.threshold_config.constrain(self._parameter("threshold" + suffix), self.hidden_size),
        )
        return run_quick(tensors, scale, (self.reset_gate, self.events, self.reset, self.surrogate), single)

    def _cell_options(self) -> dict[str, Any]:
        return {"reset_gate": self.reset_gate}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reset_gate={self.reset_gate!r}"


class EGRU(_EventGRU):
    r"""Event-based gated recurrent unit, with the calling convention of ``torch.nn.GRU``.

    A unit whose state ``c`` exceeds its trainable threshold ``theta`` emits the state as an event ``y`` and is cleared
    at the next step (paper, Eqs. 1 and 2)::

        u_t = sigmoid(x_t W_u + y_{t-1} V_u + b_u)            e_t = [c_t > theta]
        r_t = sigmoid(x_t W_r + y_{t-1} V_r + b_r)            y_t = c_t * e_t
        z_t = tanh(x_t W_z + (r_t * y_{t-1}) V_z + b_z)
        c_t = u_t * z_t + (1 - u_t) * c_{t-1} - y_{t-1}

    Units without an event output zero, and the backward pass skips units far from their thresholds.

    Parameters have the names, shapes and gate order of ``torch.nn.GRU``, plus ``threshold_l{k}[_reverse]``. The
    update-gate rows compute torch's gate, which is ``1 - u``. Threshold parameters are unconstrained;
    :meth:`thresholds` returns the thresholds. The state dict of a GRU loads unchanged and keeps the thresholds.

    Args:
        input_size (int): Number of input features ``I``.
        hidden_size (int): Number of units ``H`` per layer and direction.
        num_layers (int): Number of stacked layers. Default: 1.
        bias (bool): Whether the layers have ``bias_ih`` and ``bias_hh``. Default: True.
        batch_first (bool): If True, sequences are ``(B, T, features)`` instead of ``(T, B, features)``. Does not
            apply to the state. Default: False.
        dropout (float): Dropout probability between layers. Default: 0.
        bidirectional (bool): If True, every layer also runs backwards in time. Default: False.
        events (egru.types.Events): When a unit emits an event: ``"positive"`` (paper) if ``c > theta``, ``"signed"`` if
            ``|c| > theta``, ``"delta"`` if ``c`` differs by more than ``theta`` from the output, which otherwise keeps
            its last value; see :data:`egru.types.Events`. ``"delta"`` requires ``reset="none"`` and
            ``reset_gate="after"``. Default: ``"positive"``.
        reset (Reset): How a unit is cleared after an event: ``"output"`` (paper), ``"threshold"`` (EvNN), ``"hard"``
            or ``"none"``; see :data:`egru.types.Reset`. Over hundreds of steps, gradients may explode unless it is
            ``"none"``. Default: ``"output"``.
        reset_gate (ResetGate): Whether the reset gate is applied ``"before"`` the recurrent product (paper) or
            ``"after"`` it (torch, cuDNN, EvNN). Default: ``"before"``.
        threshold (Threshold): Parametrisation and initial values of the thresholds. If None, ``Threshold()``.
        surrogate (Surrogate): Gradient of the step function. If None, ``Surrogate()``, the paper's.
        reset_scale (float or Tensor): Factor of the amount that is cleared, at least 0. Stored as the buffer
            ``reset_scale``, so that it can be scheduled. The buffer may also hold one value per unit, with the
            directions concatenated; CUDA kernels do not support this, and plain torch runs instead, with a warning.
            Default: 1.
        dropconnect (float): Probability that a recurrent weight is set to zero in training, with one mask per call.
            Default: 0.
        zoneout (float): Probability that a unit keeps its previous state at a step of training. Evaluation uses the
            expected value. Default: 0.
        dropout_mode (DropoutMode): ``"variational"`` (paper) draws one dropout mask per sequence, ``"plain"`` (torch)
            one per step. Default: ``"variational"``.
        backend (Backend): Kernel that runs the layer. ``"auto"`` selects the fastest that supports the call; see
            :func:`egru.kernels.info`. Default: ``"auto"``.
        lean (bool): If True, recompute the gates in the backward pass instead of saving them. This saves memory, takes
            more time and gives the same results. Default: False.
        recurrent_clip (float): Bound on each element of the gradient that flows from a step to the previous state. If
            None, no bound. With a bound, gradients are not exact and training runs on the slow reference backend;
            inference does not change. Default: None.
        device (torch.device or str): Device of the parameters. If None, torch's default.
        dtype (torch.dtype): Floating dtype of the parameters. If None, torch's default.

    Inputs:
        - **input**: ``(T, B, I)``, ``(B, T, I)`` with ``batch_first``, ``(T, I)`` unbatched, or a ``PackedSequence``.
        - **hx** (EventState or Tensor): State from an earlier call, to continue its sequence. A tensor ``h`` stands for
          ``EventState(h, h)``: as in ``torch.nn.GRU``, the state is the output. If None, zeros.

    Returns:
        ``y, state``. ``y`` are the events of the last layer, arranged like the input, with ``num_directions * H``
        features. ``state`` is an :class:`EventState`: ``c`` and ``y`` after the last step, each of shape
        ``(num_layers * num_directions, B, H)``. ``state.y`` is the ``h_n`` of ``torch.nn.GRU``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch, egru
        >>> layer = egru.EGRU(input_size=4, hidden_size=8)
        >>> x = torch.randn(20, 3, 4)  # (time, batch, features)
        >>> y, state = layer(x)
        >>> y.shape, state.c.shape
        (torch.Size([20, 3, 8]), torch.Size([1, 3, 8]))
        >>> y, state = layer(x, state)  # continue the sequence
    """

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
        reset_gate: ResetGate = "before",
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
        self._set_gru_options(reset_gate, backend, lean)

    def _run_quick(self, input: Any, hx: Any) -> tuple[Tensor, EventState] | None:
        swap = self.batch_first and isinstance(input, Tensor) and input.dim() == 3
        result = self._quick(input.transpose(0, 1) if swap else input, hx, single=False)
        if result is None:
            return None
        y, c_last, y_last = result
        return (y.transpose(0, 1) if swap else y), EventState(c_last, y_last)

    @classmethod
    def from_gru(cls, gru: nn.GRU, **options: Any) -> "EGRU":
        """Build an event layer that computes the same function as a ``torch.nn.GRU``.

        Every unit emits its state at every step: there is no reset, and the thresholds are below every state. With
        ``events="signed"`` and ``"delta"`` they are 0, and the surrogate is bounded, so that gradients are the same as
        well. Dropout is drawn per step, as in torch. :func:`egru.compress.raise_thresholds` makes the layer sparse.

        Args:
            gru: Trained layer.
            options: Arguments of :class:`EGRU` that differ. If they change the function, a warning says that the
                layer has to be trained again.

        Returns:
            The event layer, with a copy of the weights and in the mode (training or evaluation) of ``gru``.

        Raises:
            TypeError: If ``gru`` is not a ``torch.nn.GRU``.
            ValueError: If ``gru`` has projections (``proj_size``).

        Example:
            >>> import torch, egru
            >>> gru = torch.nn.GRU(4, 8)
            >>> layer = egru.EGRU.from_gru(gru)
            >>> x = torch.randn(5, 1, 4)
            >>> torch.allclose(layer(x)[0], gru(x)[0], atol=1e-6)
            True
        """
        limit = {"reset": "none", "reset_gate": "after", **always_active(options.get("events", "positive"))}
        layer = from_dense(cls, gru, nn.GRU, limit, options)
        fits = {
            "reset": layer.reset == "none" or not layer._initial_reset_scale,
            "reset_gate": layer.reset_gate == "after",
            "threshold_config": is_always_active(layer, -1),  # states of a GRU are in [-1, 1]
            "zoneout": not layer.zoneout,
        }
        warn_differences(layer, nn.GRU, fits)
        return layer

    def to_gru(self) -> nn.GRU:
        """Return a ``torch.nn.GRU`` with a copy of these weights.

        The GRU emits its state at every step, so its outputs differ from those of this layer.
        """
        return to_dense(self, nn.GRU)


class EGRUCell(_EventGRU):
    """One step of :class:`EGRU`, with the calling convention of ``torch.nn.GRUCell``.

    Parameters have the names of ``torch.nn.GRUCell``, plus ``threshold``.

    Args:
        input_size (int): Number of input features ``I``.
        hidden_size (int): Number of units ``H``.
        bias (bool): Whether the cell has ``bias_ih`` and ``bias_hh``. Default: True.
        events, reset, reset_gate, threshold, surrogate, reset_scale, dropconnect, zoneout: As in :class:`EGRU`.
        backend, lean, recurrent_clip, device, dtype: As in :class:`EGRU`.

    Inputs:
        - **input**: ``(B, I)``, or ``(I,)`` unbatched.
        - **hx** (EventState or Tensor): State returned by the previous step, or a tensor as in :class:`EGRU`. If None,
          zeros.

    Returns:
        The new state, both halves ``(B, H)`` or ``(H,)``; ``state.y`` is the output of the step.

    Example:
        >>> import torch, egru
        >>> cell, state = egru.EGRUCell(4, 8), None
        >>> for x in torch.randn(20, 3, 4):
        ...     state = cell(x, state)
        >>> state.y.shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        events: Events = "positive",
        reset: Reset = "output",
        reset_gate: ResetGate = "before",
        threshold: Threshold | None = None,
        surrogate: Surrogate | None = None,
        reset_scale: float | Tensor = 1.0,
        dropconnect: float = 0.0,
        zoneout: float = 0.0,
        backend: Backend = "auto",
        lean: bool = False,
        recurrent_clip: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(**base_arguments(locals()))
        self._set_gru_options(reset_gate, backend, lean)

    def _build_directions(self) -> tuple[Direction, ...]:
        return (Direction("cell", 0, 0, False, self.input_size, ""),)

    def zero_state(self, batch: int | None = None) -> EventState:
        """Return the initial state, all zeros: both halves ``(batch, H)``, or ``(H,)`` if ``batch`` is None."""
        c, y = super().zero_state(batch)
        return EventState(c[0], y[0])

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, hx: EventState | Tensor | None = None
    ) -> EventState:
        """Run one step; see the class for arguments and result."""
        result = self._quick(input, hx, single=True)
        return self._run_step(input, hx) if result is None else EventState(*result)
