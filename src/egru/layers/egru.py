"""The event-based GRU, over sequences and as a cell."""

from typing import Any

import torch
from torch import Tensor, nn

from egru.events import EventState, Surrogate
from egru.kernels import Problem, begin_sequence, run_sequence
from egru.layers import checks
from egru.layers.stack import EventRNN
from egru.layers.structure import Direction, Weights
from egru.layers.threshold import Threshold
from egru.types import BACKENDS, RESET_GATES, RESETS


class _EventGRU(EventRNN):
    """What the layer and the cell share: the GRU's options, and one layer in one direction."""

    gates = 3
    resets = RESETS

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
        reset: str = "output",
        reset_gate: str = "before",
        threshold: Threshold | None = None,
        surrogate: Surrogate | None = None,
        reset_scale: float | Tensor = 1.0,
        dropconnect: float = 0.0,
        zoneout: float = 0.0,
        dropout_mode: str = "variational",
        backend: str = "auto",
        lean: bool = False,
        recurrent_clip: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            reset=reset,
            threshold=threshold,
            surrogate=surrogate,
            reset_scale=reset_scale,
            dropconnect=dropconnect,
            zoneout=zoneout,
            dropout_mode=dropout_mode,
            recurrent_clip=recurrent_clip,
            device=device,
            dtype=dtype,
        )
        self.reset_gate = checks.choice(type(self).__name__, "reset_gate", reset_gate, RESET_GATES)
        self.backend = checks.choice(type(self).__name__, "backend", backend, BACKENDS)
        self.lean = bool(lean)

    def begin(self, x: Tensor, ih: Tensor, hh: Tensor) -> object:
        per_unit = self.reset_scale.dim() and self.reset != "none"
        if per_unit or (self.recurrent_clip and torch.is_grad_enabled()):
            return None  # no kernel that starts early runs it
        return begin_sequence(x, ih, hh, self.reset_gate, _autocast_precision(x), self.backend)

    def run_direction(
        self,
        x: Tensor,
        state: EventState,
        weights: Weights,
        keep: Tensor | None = None,
        lengths: Tensor | None = None,
        started: object = None,
    ) -> tuple[Tensor, Tensor, EventState]:
        problem = Problem(
            x,
            *state,
            weights.ih,
            weights.hh,
            weights.bias_ih,
            weights.bias_hh,
            weights.theta,
            weights.reset_scale,
            keep,
            lengths,
            reset=self.reset,
            reset_gate=self.reset_gate,
            surrogate=self.surrogate,
            precision=_autocast_precision(x),
            lean=self.lean,
            recurrent_clip=self.recurrent_clip or 0.0,
            started=started,
        )
        return run_sequence(problem, self.backend)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reset_gate={self.reset_gate!r}, backend={self.backend!r}"


class EGRU(_EventGRU):
    r"""Event-based gated recurrent unit: ``torch.nn.GRU`` whose units speak only when they have something to say.

    A unit emits its state when that crosses a trainable threshold, and is cleared afterwards (paper, Eqs. 1 and 2)::

        u_t = sigmoid(x_t W_u + y_{t-1} V_u + b_u)            e_t = [c_t > theta]
        r_t = sigmoid(x_t W_r + y_{t-1} V_r + b_r)            y_t = c_t * e_t
        z_t = tanh(x_t W_z + (r_t * y_{t-1}) V_z + b_z)       c_t = u_t*z_t + (1 - u_t)*c_{t-1} - y_{t-1}

    Parameters carry ``torch.nn.GRU``'s names, shapes and gate order, plus ``threshold_l{k}[_reverse]`` (unconstrained;
    :meth:`thresholds` gives the values in force). A GRU's state dict loads unchanged and leaves thresholds alone.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as in ``torch.nn.GRU``.
        reset: how a unit is cleared after an event: "output" (paper), "threshold" (EvNN), "hard", "none". Over
            hundreds of steps "none" is the one whose gradients do not explode: another model, its gradient as exact.
        reset_gate: "before" the recurrent product (paper) or "after" it (torch, cuDNN, EvNN).
        threshold: parametrisation and start of the thresholds.
        surrogate: the backward pass of the step function; its ``bounded`` keeps gradients small at the price of
            exactness.
        reset_scale: multiplies the cleared amount; kept as the buffer ``reset_scale``, so that it can be scheduled. The
            buffer may also hold one number a unit, layers and directions one after the other (not in the CUDA kernels:
            plain torch runs it).
        dropconnect: probability that a recurrent weight is dropped in training, one mask per call.
        zoneout: probability that a unit keeps its old state at a step; the expected mix in evaluation.
        dropout_mode: "variational" (one mask per sequence, as in the paper) or "plain" (as in torch).
        backend: "auto" takes the fastest kernel that can run a call; see :func:`egru.kernels.info`.
        lean: save no gates for the backward pass and compute them again there: less memory, more time, same numbers.
        recurrent_clip: bound on every element of the gradient that goes from a step to the state before it; None: no
            bound. The gradient is then not exact. Trains on the reference backend, which is slow; evaluation is as
            fast as without.
    """

    @classmethod
    def from_gru(cls, gru: nn.GRU, **options: Any) -> "EGRU":
        """An event layer with the weights of a trained ``torch.nn.GRU`` and ``options`` as in the constructor.

        With ``reset="none"``, ``reset_gate="after"`` and a threshold below every state it computes the same function;
        raise the thresholds from there to make it sparse.
        """
        if not isinstance(gru, nn.GRU):
            raise TypeError(f"EGRU.from_gru: expected a torch.nn.GRU, got {type(gru).__name__}")
        weight = gru.get_parameter("weight_hh_l0")
        shape = {
            n: getattr(gru, n)
            for n in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
        }
        layer = cls(**{**shape, "device": weight.device, "dtype": weight.dtype, **options})
        layer.load_state_dict(gru.state_dict())
        return layer

    def to_gru(self) -> nn.GRU:
        """The ``torch.nn.GRU`` with these weights. It computes another function: it has no events."""
        weight = self._first_weight
        gru = nn.GRU(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            self.bias,
            self.batch_first,
            self.dropout,
            self.bidirectional,
            device=weight.device,
            dtype=weight.dtype,
        )
        gru.load_state_dict({name: self.get_parameter(name).detach() for name in gru.state_dict()})
        return gru


class EGRUCell(_EventGRU):
    """One step of :class:`EGRU`, with ``torch.nn.GRUCell``'s parameter names plus ``threshold``.

    ``state = cell(x, state)``; the output of the step is ``state.y``. Arguments as in :class:`EGRU`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        reset: str = "output",
        reset_gate: str = "before",
        threshold: Threshold | None = None,
        surrogate: Surrogate | None = None,
        reset_scale: float | Tensor = 1.0,
        dropconnect: float = 0.0,
        zoneout: float = 0.0,
        backend: str = "auto",
        lean: bool = False,
        recurrent_clip: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            bias=bias,
            reset=reset,
            reset_gate=reset_gate,
            threshold=threshold,
            surrogate=surrogate,
            reset_scale=reset_scale,
            dropconnect=dropconnect,
            zoneout=zoneout,
            backend=backend,
            lean=lean,
            recurrent_clip=recurrent_clip,
            device=device,
            dtype=dtype,
        )

    def _build_directions(self) -> tuple[Direction, ...]:
        return (Direction("cell", 0, 0, False, self.input_size, ""),)

    def zero_state(self, batch: int | None = None) -> EventState:
        c, y = super().zero_state(batch)
        return EventState(c[0], y[0])

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, state: EventState | None = None
    ) -> EventState:
        """One step on ``input`` of shape ``(B, I)`` or ``(I,)``; the state has shape ``(B, H)`` or ``(H,)``."""
        me, weight = type(self).__name__, self._first_weight
        checks.sequence_input(me, input, self.input_size, weight, (1, 2), "(batch, features) or (features,)")
        rows = input.shape[:-1]
        if state is None:
            state = self.zero_state(*rows)
        state = checks.event_state(me, state, (*rows, self.hidden_size), weight)
        if not rows:
            input, state = input[None], EventState(state.c[None], state.y[None])
        _, (c, y) = self._run(input[None], EventState(state.c[None], state.y[None]), None)
        return EventState(c[0], y[0]) if rows else EventState(c[0, 0], y[0, 0])


_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _autocast_precision(x: Tensor) -> str:
    """The name of the type autocast asks products to be rounded to, or ""."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return ""
    dtype = torch.get_autocast_dtype(device)
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")
