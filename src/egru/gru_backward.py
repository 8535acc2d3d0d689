"""The explicit backward pass of the event-based GRU, in plain torch."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from egru.events import EventState, Surrogate, compared, has_event
from egru.types import Events, Reset, ResetGate

if TYPE_CHECKING:
    from egru.functional import Sequence


class Gradients(NamedTuple):
    """Gradients of a sequence, and intermediate results for tests.

    Attributes:
        input: Gradient of the input, ``(T, B, I)``, or None if it was not requested.
        state: Gradients of the initial state, ``(B, H)`` each.
        weight_ih, weight_hh, bias, bias_hh, theta: Gradients of the parameters, in their shapes.
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
    forward: "Sequence",
    *,
    events: Events = "positive",
    reset: Reset = "output",
    reset_gate: ResetGate = "before",
    surrogate: Surrogate,
    reset_scale: Tensor | float = 1.0,
    keep: Tensor | None = None,
    lengths: Tensor | None = None,
    recurrent_clip: float = 0.0,
    input_gradient: bool = True,
) -> Gradients:
    """Compute the gradients of :func:`egru.functional.egru_sequence` by explicit back-propagation through time.

    With ``s`` the surrogate's slope and ``k = e + c*s`` (for the reset "output", "before" form)::

        dc_t += dy_t * k_t                       dtheta -= dy_t * c_t * s_t
        a_u = dc*(z - c_{t-1})*u*(1 - u)         a_z = dc*u*(1 - z^2)
        m = a_z V_z^T                            a_r = m*y_{t-1}*r*(1 - r)
        dc_{t-1} = dc*(1 - u)                    dy_{t-1} = r*m + a_u V_u^T + a_r V_r^T - dc

    The slopes of the other events are ``k = e + |c|*s``, with ``s`` at ``|c|`` ("signed"), and ``k = e + |d|*s``, with
    ``s`` at the magnitude of ``d = c - y_{t-1}`` ("delta"). "delta" adds ``dy_t * (1 - k_t)`` to ``dy_{t-1}``.

    This version is dense; kernels skip the products with zero. The result is the exact gradient of the surrogate unless
    ``recurrent_clip`` is set.

    Args:
        grad_y, grad_c: Gradients of ``forward.y`` and ``forward.c``; None for zero.
        grad_state: Gradients of the final carried state; None for zero.
        forward: Result of :func:`egru.functional.egru_sequence` for the same arguments.
        input_gradient: Whether to compute the gradient of ``input``.
        input, state, weight_ih, weight_hh, theta: As in :func:`egru.functional.egru_sequence`.
        events, reset, reset_gate, surrogate, reset_scale: As in :func:`egru.functional.egru_sequence`.
        keep, lengths, recurrent_clip: As in :func:`egru.functional.egru_sequence`.

    Returns:
        The gradients.

    Example:
        >>> layer, surrogate = egru.EGRU(4, 8), egru.Surrogate()
        >>> weights = layer.weight_ih_l0, layer.weight_hh_l0
        >>> x, theta = torch.randn(20, 2, 4), torch.full((8,), 0.1)
        >>> start = egru.EventState(torch.zeros(2, 8), torch.zeros(2, 8))
        >>> forward = egru.functional.egru_sequence(x, start, *weights, None, None, theta, surrogate=surrogate)
        >>> gradients = egru.functional.egru_backward(
        ...     torch.ones_like(forward.y), None, (None, None), x, start, *weights, theta, forward, surrogate=surrogate
        ... )
        >>> gradients.weight_hh.shape
        torch.Size([24, 8])
    """
    T, B, H = forward.y.shape
    c_seen, gates = forward.c, forward.gates
    u, r, z = gates[:3]
    rho = reset_scale
    y_prev = torch.cat([state.y[None], forward.y[:-1]])
    value = compared(c_seen, y_prev, events)
    # With two-sided events the magnitude is compared, and the chain rule multiplies by the sign.
    magnitude, sign = (value, torch.ones_like(value)) if events == "positive" else (value.abs(), value.sign())
    slope = surrogate.slope(magnitude, theta)
    e = has_event(value, theta, events).to(c_seen.dtype)
    k = surrogate.output_slope(magnitude, e, slope)
    carried = c_seen - rho * theta * sign * e if reset == "threshold" else c_seen
    c_prev = torch.cat([state.c[None], carried[:-1]])
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
        dc_seen = dy_t * k[t] + de * sign[t] * slope[t] + dc
        dtheta_t = -(dy_t * value[t] + de) * slope[t]
        if reset == "threshold":
            dc_seen = dc_seen - dc * rho * theta * slope[t]
            dtheta_t = dtheta_t - dc * rho * sign[t] * (e[t] - theta * slope[t])
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
        if events == "delta":
            dy_prev = dy_prev + dy_t * (1 - k[t])
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
