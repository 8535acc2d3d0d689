r"""Event-based recurrence in plain torch: one step, one sequence, and the explicit backward pass.

Every kernel is tested against this module, in float64. Names follow the paper (``c``, ``y``, ``u``, ``r``, ``z``,
``theta``)::

    u_t = sigmoid(x_t W_u + y_{t-1} V_u + b_u)            e_t = [c_t > theta]
    r_t = sigmoid(x_t W_r + y_{t-1} V_r + b_r)            y_t = c_t * e_t
    z_t = tanh(x_t W_z + (r_t * y_{t-1}) V_z + b_z)       c_t = u_t*z_t + (1 - u_t)*c_{t-1} - y_{t-1}

These are Eqs. 1 and 2 of the paper; :data:`egru.types.Reset` lists the other resets. Weights follow ``torch.nn.GRU``:
``weight_ih`` has shape ``(3H, I)`` with the blocks r, z, n. The update gate of the paper is ``u = 1 - z_torch``, and
torch's ``n`` is the paper's ``z``. Shapes: ``T`` steps, ``B`` batch rows, ``I`` inputs, ``H`` units.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from egru._autograd import bounded_gradient
from egru.cells import CellUpdate, elman_update, gru_update, lstm_update
from egru.events import EventState, Surrogate, emit
from egru.types import RESET_GATES, RESETS, Reset, ResetGate

__all__ = [
    "CellUpdate",
    "Gradients",
    "Sequence",
    "Step",
    "egru_backward",
    "egru_sequence",
    "egru_step",
    "elman_update",
    "event_sequence",
    "event_step",
    "gru_update",
    "lstm_update",
]


class Step(NamedTuple):
    """Result of one step. ``e`` is 0 or 1; ``c_seen`` is what was compared with the threshold."""

    state: EventState
    e: Tensor
    c_seen: Tensor
    gates: tuple[Tensor, ...]


class Sequence(NamedTuple):
    """Result of a sequence.

    Attributes:
        y: Emitted values, ``(T, B, H)``; zero on padded steps.
        c: State, or output of a cell with ``compare="output"``, that was compared with the threshold, ``(T, B, H)``;
            zero on padded steps.
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
    reset: Reset = "output",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
) -> Step:
    """Run one step of a cell inside the event mechanism (paper, Eq. 2, and the other resets).

    Args:
        update: The cell, a function of ``(p, y, memory)``.
        p: Projected input of the step, ``(B, gates * H)``.
        state: Carried state and events of the previous step.
        e: Events of the previous step as differentiable 0 and 1. None at the start of a sequence, where they are
            derived from ``state.y`` without a gradient.
        theta: Thresholds, ``(H,)``.
        reset: How a unit is cleared after an event.
        surrogate: Gradient of the step function.
        reset_scale: Factor on the cleared amount.
        keep: Zoneout: the share of the previous state that is kept, a 0/1 mask in training and the probability in
            evaluation. It applies to the state after the reset, before it is compared with the threshold.
    """
    if reset not in RESETS:
        raise ValueError(f"reset must be one of {', '.join(RESETS)}; got {reset!r}")
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
    y, e = emit(value, seen, theta, surrogate)
    carried = c - reset_scale * theta * e if reset == "threshold" else c
    return Step(EventState(carried, y), e, seen, proposal.gates)


def event_sequence(
    update: Callable[[Tensor, Tensor, Tensor], CellUpdate],
    p: Tensor,
    state: EventState,
    theta: Tensor,
    *,
    reset: Reset = "output",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
) -> Sequence:
    """Run :func:`event_step` over a sequence, differentiable by autograd.

    Args:
        update, theta, reset, surrogate, reset_scale: As in :func:`event_step`.
        p: Projected inputs, ``(T, B, gates * H)``.
        state: Initial state.
        keep: Zoneout, broadcastable to ``(T, B, H)``.
        lengths: Number of steps per sequence, ``(B,)``. A shorter sequence keeps its state after its last step.
        recurrent_clip: Bound on each element of the gradient that a step passes to the previous state; 0 for none.
            Gradients that enter at a step are not clipped.
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
    reset: Reset = "output",
    reset_gate: ResetGate = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
) -> EventState:
    """Run one step of the event-based GRU on ``x`` of shape ``(B, I)``.

    Arguments as in :class:`egru.kernels.Problem`. Differentiable by autograd through the surrogate.
    """
    return event_step(
        lambda p, y, memory: gru_update(p, y, memory, weight_hh, bias_hh, reset_gate),
        F.linear(x, weight_ih, bias_ih),
        state,
        None,
        theta,
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
    reset: Reset = "output",
    reset_gate: ResetGate = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
) -> Sequence:
    """Run the event-based GRU over ``input`` of shape ``(T, B, I)``.

    Arguments as in :class:`egru.kernels.Problem`. Differentiable by autograd through the surrogate. The gates of the
    result are those of :func:`gru_update`.

    Raises:
        ValueError: If ``reset`` or ``reset_gate`` is unknown.
    """
    if reset_gate not in RESET_GATES:
        raise ValueError(f"reset_gate must be one of {', '.join(RESET_GATES)}; got {reset_gate!r}")
    return event_sequence(
        lambda p, y, memory: gru_update(p, y, memory, weight_hh, bias_hh, reset_gate),
        F.linear(input, weight_ih, bias_ih),
        state,
        theta,
        reset=reset,
        surrogate=surrogate,
        reset_scale=reset_scale,
        keep=keep,
        lengths=lengths,
        recurrent_clip=recurrent_clip,
    )


# ---- the explicit backward pass of the event-based GRU ---------------------------------------------------------------


class Gradients(NamedTuple):
    """Gradients of a sequence, and intermediate results for tests.

    Attributes:
        input, state, weight_ih, weight_hh, bias, bias_hh, theta: Gradients of the arguments.
        a: Gradients of the pre-activations with respect to the input product, ``(T, B, 3H)``, in torch's block order.
        y_total: Gradients of ``y_t``, summed over all paths.
        k: Slope ``dy/dc``.
    """

    input: Tensor | None
    state: EventState
    weight_ih: Tensor
    weight_hh: Tensor
    bias: Tensor
    bias_hh: Tensor
    theta: Tensor
    a: Tensor
    y_total: Tensor
    k: Tensor


def egru_backward(
    grad_y: Tensor | None,
    grad_c: Tensor | None,
    grad_state: EventState | tuple[Tensor | None, Tensor | None],
    input: Tensor,
    state: EventState,
    weight_ih: Tensor,
    weight_hh: Tensor,
    theta: Tensor,
    forward: Sequence,
    *,
    reset: Reset = "output",
    reset_gate: ResetGate = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
    input_gradient: bool = True,
) -> Gradients:
    """Compute the gradients of :func:`egru_sequence` by explicit back-propagation through time.

    With ``s`` the surrogate's slope and ``k = e + c*s`` (for the reset "output", "before" form)::

        dc_t += dy_t * k_t                       dtheta -= dy_t * c_t * s_t
        a_u = dc*(z - c_{t-1})*u*(1 - u)         a_z = dc*u*(1 - z^2)
        m = a_z V_z^T                            a_r = m*y_{t-1}*r*(1 - r)
        dc_{t-1} = dc*(1 - u)                    dy_{t-1} = r*m + a_u V_u^T + a_r V_r^T - dc

    This version is dense; kernels skip the products with zero. The result is the exact gradient of the surrogate unless
    ``recurrent_clip`` is set.

    Args:
        grad_y, grad_c: Gradients of ``forward.y`` and ``forward.c``; None for zero.
        grad_state: Gradients of the final carried state; None for zero.
        forward: Result of :func:`egru_sequence` for the same arguments.
        input_gradient: Whether to compute the gradient of ``input``.

    The other arguments are those of :func:`egru_sequence`.
    """
    T, B, H = forward.y.shape
    c_seen, gates = forward.c, forward.gates
    u, r, z = gates[:3]
    rho = reset_scale
    slope = surrogate.slope(c_seen, theta)
    e = (c_seen > theta).to(c_seen.dtype)
    k = surrogate.output_slope(c_seen, e, slope)
    carried = c_seen - rho * theta * e if reset == "threshold" else c_seen
    c_prev = torch.cat([state.c[None], carried[:-1]])
    y_prev = torch.cat([state.y[None], forward.y[:-1]])
    e_prev = torch.cat([(state.y != 0).to(e.dtype)[None], e[:-1]])
    memory = c_prev * (1 - rho * e_prev) if reset == "hard" else c_prev
    if keep is not None:
        keep = keep.expand(T, B, H)
    V_r, V_u, V_z = weight_hh.split(H)

    zeros = torch.zeros_like(state.c)
    dc, dy = (zeros if grad is None else grad for grad in grad_state)
    de = zeros
    dtheta = torch.zeros_like(forward.c[0])
    a = torch.zeros(T, B, 3 * H, dtype=c_seen.dtype, device=c_seen.device)
    y_total = torch.zeros_like(c_seen)
    for t in reversed(range(T)):
        dy_t = dy if grad_y is None else dy + grad_y[t]
        dc_seen = dy_t * k[t] + de * slope[t] + dc
        dtheta_t = -(dy_t * c_seen[t] + de) * slope[t]
        if reset == "threshold":
            dc_seen = dc_seen - dc * rho * theta * slope[t]
            dtheta_t = dtheta_t - dc * rho * (e[t] - theta * slope[t])
        if grad_c is not None:
            dc_seen = dc_seen + grad_c[t]
        dc_new = dc_seen if keep is None else (1 - keep[t]) * dc_seen
        a_u = dc_new * (z[t] - memory[t]) * u[t] * (1 - u[t])
        a_z = dc_new * u[t] * (1 - z[t] ** 2)
        dmemory = dc_new * (1 - u[t])
        if reset == "hard":
            dc_prev = dmemory * (1 - rho * e_prev[t])
            de_prev = -rho * dmemory * c_prev[t]
        else:
            dc_prev, de_prev = dmemory, zeros
        if keep is not None:
            dc_prev = dc_prev + keep[t] * dc_seen
        if reset_gate == "after":
            q = gates[3]
            a_r = a_z * q[t] * r[t] * (1 - r[t])
            dy_prev = (r[t] * a_z) @ V_z
        else:
            m = a_z @ V_z
            a_r = m * y_prev[t] * r[t] * (1 - r[t])
            dy_prev = r[t] * m
        dy_prev = dy_prev + a_r @ V_r - a_u @ V_u
        if reset == "output":
            dy_prev = dy_prev - rho * dc_new
        if recurrent_clip:
            dc_prev, dy_prev, de_prev = (g.clamp(-recurrent_clip, recurrent_clip) for g in (dc_prev, dy_prev, de_prev))
        a_t = torch.cat([a_r, -a_u, a_z], -1)
        if lengths is None:
            dc, dy, de = dc_prev, dy_prev, de_prev
        else:
            real = (lengths > t)[:, None]
            a_t, dtheta_t, dy_t = (torch.where(real, g, 0) for g in (a_t, dtheta_t, dy_t))
            dc, dy = torch.where(real, dc_prev, dc), torch.where(real, dy_prev, dy)
            de = torch.where(real, de_prev, de)
        a[t], y_total[t] = a_t, dy_t
        dtheta = dtheta + dtheta_t

    # V multiplies y_{t-1}, or r * y_{t-1} for V_z in the "before" form. In the "after" form r scales the gradient of q.
    a_hh, source_z = a, y_prev
    if reset_gate == "after":
        a_hh = torch.cat([a[..., : 2 * H], r * a[..., 2 * H :]], -1)
    else:
        source_z = r * y_prev
    grad_V_ru = a_hh[..., : 2 * H].flatten(0, 1).T @ y_prev.flatten(0, 1)
    grad_V_z = a_hh[..., 2 * H :].flatten(0, 1).T @ source_z.flatten(0, 1)
    return Gradients(
        input=a @ weight_ih if input_gradient else None,
        state=EventState(dc, dy),
        weight_ih=a.flatten(0, 1).T @ input.flatten(0, 1),
        weight_hh=torch.cat([grad_V_ru, grad_V_z]),
        bias=a.sum((0, 1)),
        bias_hh=a_hh.sum((0, 1)),
        theta=dtheta.sum(0),
        a=a,
        y_total=y_total,
        k=k,
    )
