r"""Event-based recurrence in plain torch: one step and one sequence; :mod:`egru.gru_backward` has the backward pass.

Every kernel is tested against this module, in float64. Names follow the paper (``c``, ``y``, ``u``, ``r``, ``z``,
``theta``)::

    u_t = sigmoid(x_t W_u + y_{t-1} V_u + b_u)            e_t = [c_t > theta]
    r_t = sigmoid(x_t W_r + y_{t-1} V_r + b_r)            y_t = c_t * e_t
    z_t = tanh(x_t W_z + (r_t * y_{t-1}) V_z + b_z)       c_t = u_t*z_t + (1 - u_t)*c_{t-1} - y_{t-1}

These are Eqs. 1 and 2 of the paper; :data:`egru.types.Events` and :data:`egru.types.Reset` list the variants. Weights
follow ``torch.nn.GRU``: ``weight_ih`` has shape ``(3H, I)`` with the blocks r, z, n. The update gate of the paper is
``u = 1 - z_torch``, and torch's ``n`` is the paper's ``z``. Shapes: ``T`` steps, ``B`` batch rows, ``I`` inputs, ``H``
units.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from egru._autograd import bounded_gradient
from egru.cells import CellUpdate, elman_update, gru_update, lstm_update
from egru.events import EventState, Surrogate, check_events, emit
from egru.gru_backward import Gradients, egru_backward
from egru.types import COMPARES, RESET_GATES, RESETS, Compare, Events, Reset, ResetGate

__all__ = [
    "CellUpdate",
    "Gradients",
    "Sequence",
    "Step",
    "egru_backward",
    "egru_sequence",
    "egru_step",
    "elman_update",
    "elstm_sequence",
    "event_sequence",
    "event_step",
    "gru_update",
    "lstm_update",
]


class Step(NamedTuple):
    """Result of one step.

    Attributes:
        state: Carried state after the step.
        e: Events, 0 or 1, ``(B, H)``.
        c_seen: Value that was compared with the threshold, ``(B, H)``.
        gates: Activations of the cell, each ``(B, H)``.
    """

    state: EventState
    e: Tensor
    c_seen: Tensor
    gates: tuple[Tensor, ...]


class Sequence(NamedTuple):
    """Result of a sequence.

    Attributes:
        y: Outputs, ``(T, B, H)``; zero on padded steps.
        c: State, or output of a cell with ``compare="output"``, that was compared with the threshold, ``(T, B, H)``;
            zero on padded steps. With ``events="delta"`` the previous output is subtracted first.
        state: Carried state after the last step of each sequence.
        gates: Activations of the cell, each ``(T, B, H)``.
    """

    y: Tensor
    c: Tensor
    state: EventState
    gates: tuple[Tensor, ...]


def event_step(
    update: Callable[[Tensor, Tensor, Tensor], CellUpdate],
    p: Tensor,
    state: EventState,
    e: Tensor | None,
    theta: Tensor,
    *,
    events: Events = "positive",
    reset: Reset = "output",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
) -> Step:
    """Run one step of a cell inside the event mechanism (paper, Eq. 2, and the other resets).

    Args:
        update: The cell, a function of ``(p, y, memory)``.
        p: Projected input of the step, ``(B, gates * H)``.
        state: Carried state and output of the previous step.
        e: Events of the previous step as differentiable 0 and 1. None at the start of a sequence, where they are
            derived from ``state.y`` without a gradient.
        theta: Thresholds, ``(H,)``.
        events: When a unit emits an event, and what the output is.
        reset: How a unit is cleared after an event.
        surrogate: Gradient of the step function.
        reset_scale: Factor on the cleared amount.
        keep: Zoneout: the share of the previous state that is kept, a 0/1 mask in training and the probability in
            evaluation. It applies to the state after the reset, before it is compared with the threshold.

    Returns:
        The state after the step, the events, and what was compared with the thresholds.

    Example:
        >>> def update(p, y, memory):  # a leaky integrator of its input
        ...     return egru.functional.CellUpdate(0.9 * memory + p, output_gate=None, gates=())
        >>> start = egru.EventState(torch.zeros(1, 2), torch.zeros(1, 2))
        >>> p, theta = torch.tensor([[0.3, 0.7]]), torch.tensor([0.5, 0.5])
        >>> step = egru.functional.event_step(update, p, start, None, theta, surrogate=egru.Surrogate())
        >>> step.state.y
        tensor([[0.0000, 0.7000]])
    """
    if reset not in RESETS:
        raise ValueError(f"reset must be one of {', '.join(RESETS)}; got {reset!r}")
    check_events(events, reset)
    c_prev, y_prev = state
    if e is None:
        e = (y_prev != 0).to(y_prev.dtype).detach()
    memory = c_prev * (1 - reset_scale * e) if reset == "hard" else c_prev
    proposal = update(p, y_prev, memory)
    c = proposal.c
    if reset == "output":
        c = c - reset_scale * y_prev
    if keep is not None:
        c = keep * c_prev + (1 - keep) * c
    value = c if proposal.output_gate is None else proposal.output_gate * torch.tanh(c)
    seen = value if proposal.compare_output else c
    if events == "delta":
        y, e = emit(value, seen - y_prev, theta, surrogate, signed=True, hold=y_prev)
    else:
        y, e = emit(value, seen, theta, surrogate, signed=events == "signed")
    carried = c
    if reset == "threshold":
        carried = c - reset_scale * theta * (e * seen.sign() if events == "signed" else e)
    return Step(EventState(carried, y), e, seen, proposal.gates)


def event_sequence(
    update: Callable[[Tensor, Tensor, Tensor], CellUpdate],
    p: Tensor,
    state: EventState,
    theta: Tensor,
    *,
    events: Events = "positive",
    reset: Reset = "output",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
) -> Sequence:
    """Run :func:`event_step` over a sequence, differentiable by autograd.

    Args:
        update, theta, events, reset, surrogate, reset_scale: As in :func:`event_step`.
        p: Projected inputs, ``(T, B, gates * H)``.
        state: Initial state.
        keep: Zoneout, broadcastable to ``(T, B, H)``.
        lengths: Number of steps per sequence, ``(B,)``. A shorter sequence keeps its state after its last step.
        recurrent_clip: Bound on each element of the gradient that a step passes to the previous state; 0 for none.
            Gradients that enter at a step are not clipped.

    Returns:
        Outputs, states and the carried state.

    Example:
        >>> def update(p, y, memory):  # a leaky integrator of its input
        ...     return egru.functional.CellUpdate(0.9 * memory + p, output_gate=None, gates=())
        >>> start = egru.EventState(torch.zeros(2, 8), torch.zeros(2, 8))
        >>> result = egru.functional.event_sequence(
        ...     update, torch.rand(20, 2, 8), start, torch.ones(8), surrogate=egru.Surrogate()
        ... )
        >>> result.y.shape
        torch.Size([20, 2, 8])
    """
    T = p.shape[0]
    if keep is not None:
        keep = keep.expand(T, *state.c.shape)
    e: Tensor | None = None
    ys: list[Tensor] = []
    cs: list[Tensor] = []
    gates: list[tuple[Tensor, ...]] = []
    for t in range(T):
        previous = state
        if recurrent_clip:
            previous = EventState(*(bounded_gradient(x, recurrent_clip) for x in state))
            e = None if e is None else bounded_gradient(e, recurrent_clip)
        step = event_step(
            update,
            p[t],
            previous,
            e,
            theta,
            events=events,
            reset=reset,
            surrogate=surrogate,
            reset_scale=reset_scale,
            keep=None if keep is None else keep[t],
        )
        gates.append(step.gates)
        if lengths is None:
            state, e = step.state, step.e
            ys.append(state.y)
            cs.append(step.c_seen)
            continue
        real = (lengths > t)[:, None]
        ys.append(torch.where(real, step.state.y, 0))
        cs.append(torch.where(real, step.c_seen, 0))
        state = EventState(torch.where(real, step.state.c, state.c), torch.where(real, step.state.y, state.y))
        e = step.e  # events of finished rows are not read again
    return Sequence(torch.stack(ys), torch.stack(cs), state, tuple(torch.stack(g) for g in zip(*gates, strict=True)))


def egru_step(
    x: Tensor,
    state: EventState,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    theta: Tensor,
    *,
    events: Events = "positive",
    reset: Reset = "output",
    reset_gate: ResetGate = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
) -> EventState:
    """Run one step of the event-based GRU. Differentiable by autograd through the surrogate.

    Args:
        x: Input, ``(B, I)``.
        state: State before the step; ``c`` and ``y`` are ``(B, H)``.
        weight_ih, weight_hh, bias_ih, bias_hh, theta: As in :func:`egru_sequence`.
        events, reset, surrogate, reset_scale, keep: As in :func:`event_step`.
        reset_gate: As in :func:`gru_update`.

    Returns:
        The state after the step; ``state.y`` is the output.

    Example:
        >>> layer = egru.EGRU(4, 8)
        >>> weights = layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0
        >>> state, theta = egru.EventState(torch.zeros(2, 8), torch.zeros(2, 8)), torch.full((8,), 0.1)
        >>> for x in torch.randn(20, 2, 4):
        ...     state = egru.functional.egru_step(x, state, *weights, theta, surrogate=egru.Surrogate())
        >>> state.y.shape
        torch.Size([2, 8])
    """
    check_events(events, reset, reset_gate)
    return event_step(
        lambda p, y, memory: gru_update(p, y, memory, weight_hh, bias_hh, reset_gate),
        F.linear(x, weight_ih, bias_ih),
        state,
        None,
        theta,
        events=events,
        reset=reset,
        surrogate=surrogate,
        reset_scale=reset_scale,
        keep=keep,
    ).state


def egru_sequence(
    input: Tensor,
    state: EventState,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    theta: Tensor,
    *,
    events: Events = "positive",
    reset: Reset = "output",
    reset_gate: ResetGate = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
) -> Sequence:
    """Run the event-based GRU over a sequence. Differentiable by autograd through the surrogate.

    Args:
        input: Inputs, ``(T, B, I)``.
        state: Initial state; ``c`` and ``y`` are ``(B, H)``.
        weight_ih: Input weights, ``(3H, I)``.
        weight_hh: Recurrent weights, ``(3H, H)``.
        bias_ih: Input biases, ``(3H,)``, or None.
        bias_hh: Recurrent biases, ``(3H,)``, or None.
        theta: Thresholds, ``(H,)``.
        events, reset, surrogate, reset_scale: As in :func:`event_step`.
        reset_gate: As in :func:`gru_update`.
        keep, lengths, recurrent_clip: As in :func:`event_sequence`.

    Returns:
        Outputs, states and the carried state. The gates are those of :func:`gru_update`.

    Raises:
        ValueError: If ``events``, ``reset`` or ``reset_gate`` is unknown, or if they do not fit each other.

    Example:
        >>> layer = egru.EGRU(4, 8)
        >>> weights = layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0
        >>> x, start = torch.randn(20, 2, 4), egru.EventState(torch.zeros(2, 8), torch.zeros(2, 8))
        >>> result = egru.functional.egru_sequence(
        ...     x, start, *weights, layer.thresholds()["l0"], surrogate=egru.Surrogate()
        ... )
        >>> torch.testing.assert_close(result.y, layer(x)[0])
    """
    if reset_gate not in RESET_GATES:
        raise ValueError(f"reset_gate must be one of {', '.join(RESET_GATES)}; got {reset_gate!r}")
    check_events(events, reset, reset_gate)
    return event_sequence(
        lambda p, y, memory: gru_update(p, y, memory, weight_hh, bias_hh, reset_gate),
        F.linear(input, weight_ih, bias_ih),
        state,
        theta,
        events=events,
        reset=reset,
        surrogate=surrogate,
        reset_scale=reset_scale,
        keep=keep,
        lengths=lengths,
        recurrent_clip=recurrent_clip,
    )


def elstm_sequence(
    input: Tensor,
    state: EventState,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    theta: Tensor,
    *,
    events: Events = "positive",
    compare: Compare = "cell",
    reset: Reset = "output",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
) -> Sequence:
    """Run the event-based LSTM over a sequence. Autograd differentiates the steps.

    Args:
        input: Inputs, ``(T, B, I)``.
        state: Initial state; ``c`` and ``y`` are ``(B, H)``.
        weight_ih: Input weights, ``(4H, I)``, in the blocks i, f, g, o of ``torch.nn.LSTM``.
        weight_hh: Recurrent weights, ``(4H, H)``.
        bias_ih: Input biases, ``(4H,)``, or None.
        bias_hh: Recurrent biases, ``(4H,)``, or None.
        theta: Thresholds, ``(H,)``.
        compare: As in :func:`lstm_update`.
        events, reset, surrogate, reset_scale: As in :func:`event_step`.
        keep, lengths, recurrent_clip: As in :func:`event_sequence`.

    Returns:
        Outputs, states and the carried state.

    Raises:
        ValueError: If ``events``, ``compare`` or ``reset`` is unknown, or if they do not fit each other.

    Example:
        >>> layer = egru.ELSTM(4, 8)
        >>> weights = layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0
        >>> x, start = torch.randn(20, 2, 4), egru.EventState(torch.zeros(2, 8), torch.zeros(2, 8))
        >>> result = egru.functional.elstm_sequence(
        ...     x, start, *weights, layer.thresholds()["l0"], surrogate=egru.Surrogate()
        ... )
        >>> torch.testing.assert_close(result.y, layer(x)[0])
    """
    if compare not in COMPARES:
        raise ValueError(f"compare must be one of {', '.join(COMPARES)}; got {compare!r}")
    if events == "delta" and compare != "output":
        raise ValueError(f"events='delta' requires compare='output', got compare={compare!r}")
    return event_sequence(
        lambda p, y, memory: lstm_update(p, y, memory, weight_hh, bias_hh, compare),
        F.linear(input, weight_ih, bias_ih),
        state,
        theta,
        events=events,
        reset=reset,
        surrogate=surrogate,
        reset_scale=reset_scale,
        keep=keep,
        lengths=lengths,
        recurrent_clip=recurrent_clip,
    )
