"""Output traces: low-pass filtered events, what a readout looks at."""

import math

import torch
from torch import Tensor

PAPER_DECAY = math.exp(-1 / 10)
_CHUNK = 64


def exponential_trace(
    y: Tensor,
    decay: float | Tensor = PAPER_DECAY,
    *,
    gain: float = 1.0,
    initial: Tensor | None = None,
    lengths: Tensor | None = None,
    last: bool = False,
    batch_first: bool = False,
) -> Tensor:
    r"""``tr_t = decay * tr_{t-1} + gain * y_t``, with its gradient through the whole sequence.

    Args:
        y: events, ``(T, B, H)`` or ``(T, H)``; ``(B, T, H)`` with ``batch_first``.
        decay: in [0, 1]; the paper's is ``exp(-1/10)``. A tensor may be trainable and broadcasts over units.
        gain: the paper's 1; EvNN's filter is ``decay=0.9, gain=0.1``.
        initial: trace before the first step, ``(B, H)``; zero by default.
        lengths: real steps of each row, ``(B,)``: ``last`` then reads each row at its own last step.
        last: return only the trace at the last step, ``(B, H)``: one weighted sum, the cheap way to classify.

    Returns:
        The trace at every step, shaped like ``y``, or at the last one.
    """
    if not isinstance(decay, Tensor) and not 0 <= decay <= 1:
        raise ValueError(f"exponential_trace: decay must lie in [0, 1], got {decay!r}")
    batch_first = batch_first and y.dim() == 3
    if y.dim() not in (2, 3) or 0 in y.shape:
        raise ValueError(f"exponential_trace: y must be a non-empty (T, B, H) or (T, H) tensor, got {tuple(y.shape)}")
    if batch_first:
        y = y.transpose(0, 1)
    T = y.shape[0]
    a = decay.to(y) if isinstance(decay, Tensor) else y.new_full((), decay)  # made there: a copy would be waited for
    steps = torch.arange(T, device=y.device).reshape(-1, *[1] * (y.dim() - 1))
    if last:
        age = T - 1 - steps if lengths is None else lengths.to(y.device)[:, None] - 1 - steps
        weight = torch.where(age >= 0, a ** age.clamp_min(0).to(y.dtype), 0)
        out = gain * (weight * y).sum(0)
        return out if initial is None else out + a ** (age[0] + 1).to(y.dtype) * initial
    # In chunks: within one, powers of the decay in a triangular matrix; between them, a carried trace.
    carry = torch.zeros_like(y[0]) if initial is None else initial
    chunks: list[Tensor] = []
    for chunk in y.split(_CHUNK):
        n = chunk.shape[0]
        age = torch.arange(n, device=y.device)[:, None] - torch.arange(n, device=y.device)
        powers = a.reshape(-1, 1, 1) ** age.clamp_min(0).to(y.dtype) * (age >= 0)  # (1 or H, n, n)
        mixed = torch.einsum("hts,s...h->t...h", powers.expand(y.shape[-1], n, n), chunk)
        carried = a ** (steps[:n] + 1).to(y.dtype) * carry
        chunks.append(gain * mixed + carried)
        carry = chunks[-1][-1]
    out = torch.cat(chunks)
    return out.transpose(0, 1) if batch_first else out
