r"""The mathematics in plain torch: one step, one sequence, and the explicit backward pass.

This file is the reference: every kernel is tested against it, in float64, intermediate by intermediate. Names follow
the paper (``c``, ``y``, ``u``, ``r``, ``z``, ``theta``); weights follow ``torch.nn.GRU`` (``weight_ih`` of shape
``(3H, I)`` in blocks r, z, n). torch's ``z`` keeps the old state, so the paper's update gate is ``u = 1 - z_torch``,
and torch's ``n`` is the paper's ``z``. Shapes: ``T`` steps, ``B`` batch rows, ``I`` inputs, ``H`` units.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from egru.events import EventState, Surrogate, emit
from egru.types import RESET_GATES, RESETS


class CellUpdate(NamedTuple):
    """What a cell proposes before the event mechanism: a new state, its output gate (LSTM), its gates for backward."""

    c: Tensor
    output_gate: Tensor | None
    gates: tuple[Tensor, ...]


class Step(NamedTuple):
    """One step: the carried state, the events as 0/1, the state the threshold saw, and the cell's gates."""

    state: EventState
    e: Tensor
    c_seen: Tensor
    gates: tuple[Tensor, ...]


class Sequence(NamedTuple):
    """A whole sequence. ``y`` and ``c`` (the state the threshold saw) are ``(T, B, H)``, zero on padded steps."""

    y: Tensor
    c: Tensor
    state: EventState
    gates: tuple[Tensor, ...]


# ---- cells: (projected input, y_{t-1}, memory) -> proposed state -----------------------------------------------------


def gru_update(
    p: Tensor, y: Tensor, memory: Tensor, weight_hh: Tensor, bias_hh: Tensor | None, reset_gate: str = "before"
) -> CellUpdate:
    """``u*z + (1-u)*memory`` with the gates of the paper's Eq. 1; ``p`` holds ``x W`` and the input bias.

    ``"before"``: ``z = tanh(p_z + (r*y) V_z)``, the paper. ``"after"``: ``z = tanh(p_z + r*(y V_z + b))``, torch and
    cuDNN. The gates are ``(u, r, z, q)``, with ``q = y V_z + b`` in the "after" form and None otherwise.
    """
    H = y.shape[-1]
    p_r, p_u, p_z = p.split(H, -1)
    if reset_gate == "after":
        v_r, v_u, q = F.linear(y, weight_hh, bias_hh).split(H, -1)
        u, r = torch.sigmoid(-(p_u + v_u)), torch.sigmoid(p_r + v_r)
        z = torch.tanh(p_z + r * q)
    else:
        q = None
        bias_ru, bias_z = (None, None) if bias_hh is None else bias_hh.split([2 * H, H])
        v_r, v_u = F.linear(y, weight_hh[: 2 * H], bias_ru).split(H, -1)
        u, r = torch.sigmoid(-(p_u + v_u)), torch.sigmoid(p_r + v_r)
        z = torch.tanh(p_z + F.linear(r * y, weight_hh[2 * H :], bias_z))
    gates = (u, r, z) if q is None else (u, r, z, q)
    return CellUpdate(u * z + (1 - u) * memory, None, gates)


def lstm_update(p: Tensor, y: Tensor, memory: Tensor, weight_hh: Tensor, bias_hh: Tensor | None) -> CellUpdate:
    """``f*memory + i*g``; what an event emits is ``o*tanh(c)``. Blocks i, f, g, o as in ``torch.nn.LSTM``."""
    i, f, g, o = (p + F.linear(y, weight_hh, bias_hh)).chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    return CellUpdate(f * memory + i * g, o, ())  # autograd keeps what it needs


def elman_update(p: Tensor, y: Tensor, memory: Tensor, weight_hh: Tensor, bias_hh: Tensor | None) -> CellUpdate:
    """``tanh(p + y V + b)``. An Elman unit has no memory of its own: it sees the past through events alone."""
    return CellUpdate(torch.tanh(p + F.linear(y, weight_hh, bias_hh)), None, ())


# ---- the event mechanism around any cell -----------------------------------------------------------------------------


def event_step(
    update: Callable[[Tensor, Tensor, Tensor], CellUpdate],
    p: Tensor,
    state: EventState,
    e: Tensor | None,
    theta: Tensor,
    *,
    reset: str = "output",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
) -> Step:
    """One step of any cell inside the event mechanism (paper, Eq. 2, and the other three resets).

    ``e`` holds the events of the previous step, differentiable; None at the start of a call, where they are read off
    ``state.y`` as data. ``keep`` is zoneout: the share of ``c_{t-1}`` kept instead of the update, a 0/1 mask in
    training, the probability itself in evaluation. It mixes what the threshold sees, clearing included.
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
    y, e = emit(value, c, theta, surrogate)
    carried = c - reset_scale * theta * e if reset == "threshold" else c
    return Step(EventState(carried, y), e, c, proposal.gates)


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.clamp(-ctx.bound, ctx.bound), None


def bounded_gradient(x: Tensor, bound: float) -> Tensor:
    """``x``, whose gradient is clamped element-wise to ``[-bound, bound]`` on its way back."""
    return _Bounded.apply(x, bound)  # pyright: ignore[reportReturnType]


def event_sequence(
    update: Callable[[Tensor, Tensor, Tensor], CellUpdate],
    p: Tensor,
    state: EventState,
    theta: Tensor,
    *,
    reset: str = "output",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
) -> Sequence:
    """Run :func:`event_step` over ``p`` of shape ``(T, B, gates*H)``.

    ``keep`` broadcasts to ``(T, B, H)``. Rows shorter than T (``lengths``, one per batch row) keep their state from
    their last real step on, and show zeros in ``y`` and ``c`` afterwards. ``recurrent_clip``, where it is not 0, bounds
    every element of what a step sends back to the state it started from; gradients that enter at a step do so whole.
    """
    T = p.shape[0]
    if keep is not None:
        keep = keep.expand(T, *state.c.shape)
    e: Tensor | None = None
    ys: list[Tensor] = []
    cs: list[Tensor] = []
    gates: list[tuple[Tensor, ...]] = []
    for t in range(T):
        before = state
        if recurrent_clip:
            before = EventState(*(bounded_gradient(half, recurrent_clip) for half in state))
            e = None if e is None else bounded_gradient(e, recurrent_clip)
        step = event_step(
            update,
            p[t],
            before,
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
        e = step.e  # a finished row never steps again, so its stale events are never read
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
    reset: str = "output",
    reset_gate: str = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
) -> EventState:
    """One step of the event-based GRU on ``x`` of shape ``(B, I)``; differentiable."""
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
    reset: str = "output",
    reset_gate: str = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
) -> Sequence:
    """The event-based GRU over ``input`` of shape ``(T, B, I)``; differentiable by autograd through the surrogate.

    The gates of the result are ``(u, r, z)``, and ``q`` in the "after" form: what :func:`egru_backward` needs.
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


# ---- the explicit backward of the event-based GRU --------------------------------------------------------------------


class Gradients(NamedTuple):
    """Gradients of a sequence, and the intermediates a kernel is compared on.

    ``a`` holds the gradients of the three pre-activations, ``(T, B, 3H)`` in torch's block order, as the input
    product sees them; ``y_total`` those of ``y_t``, all paths together; ``k`` the slope ``dy/dc``.
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
    reset: str = "output",
    reset_gate: str = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
    input_gradient: bool = True,
) -> Gradients:
    """Back-propagation through time, written out: exact for the surrogate, but for ``recurrent_clip``.

    ``grad_y`` and ``grad_c`` are the gradients of ``forward.y`` and ``forward.c``, ``grad_state`` those of the final
    carried state; None stands for zero. Dense on purpose: kernels skip what this computes and multiplies by zero.
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
            dc_before = dmemory * (1 - rho * e_prev[t])
            de_before = -rho * dmemory * c_prev[t]
        else:
            dc_before, de_before = dmemory, zeros
        if keep is not None:
            dc_before = dc_before + keep[t] * dc_seen
        if reset_gate == "after":
            q = gates[3]
            a_r = a_z * q[t] * r[t] * (1 - r[t])
            dy_before = (r[t] * a_z) @ V_z
        else:
            m = a_z @ V_z
            a_r = m * y_prev[t] * r[t] * (1 - r[t])
            dy_before = r[t] * m
        dy_before = dy_before + a_r @ V_r - a_u @ V_u
        if reset == "output":
            dy_before = dy_before - rho * dc_new
        if recurrent_clip:
            dc_before, dy_before, de_before = (
                g.clamp(-recurrent_clip, recurrent_clip) for g in (dc_before, dy_before, de_before)
            )
        a_t = torch.cat([a_r, -a_u, a_z], -1)
        if lengths is None:
            dc, dy, de = dc_before, dy_before, de_before
        else:
            real = (lengths > t)[:, None]
            a_t, dtheta_t, dy_t = (torch.where(real, g, 0) for g in (a_t, dtheta_t, dy_t))
            dc, dy = torch.where(real, dc_before, dc), torch.where(real, dy_before, dy)
            de = torch.where(real, de_before, de)
        a[t], y_total[t] = a_t, dy_t
        dtheta = dtheta + dtheta_t

    # What multiplies V: y_{t-1}, or r * y_{t-1} in front of V_z in the "before" form; r scales its gradient in "after".
    a_hh, source_z = a, y_prev
    if reset_gate == "after":
        a_hh = torch.cat([a[..., : 2 * H], r * a[..., 2 * H :]], -1)
    else:
        source_z = r * y_prev
    weight_hh_grad = torch.cat(
        [
            a_hh[..., : 2 * H].flatten(0, 1).T @ y_prev.flatten(0, 1),
            a_hh[..., 2 * H :].flatten(0, 1).T @ source_z.flatten(0, 1),
        ]
    )
    return Gradients(
        input=a @ weight_ih if input_gradient else None,
        state=EventState(dc, dy),
        weight_ih=a.flatten(0, 1).T @ input.flatten(0, 1),
        weight_hh=weight_hh_grad,
        bias=a.sum((0, 1)),
        bias_hh=a_hh.sum((0, 1)),
        theta=dtheta.sum(0),
        a=a,
        y_total=y_total,
        k=k,
    )
