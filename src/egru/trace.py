"""Output traces: low-pass filtered events, the input of a readout."""

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
    r"""Filter events with ``tr_t = decay * tr_{t-1} + gain * y_t``; differentiable through the whole sequence.

    Args:
        y: Events of shape ``(T, B, H)`` or ``(T, H)``, or ``(B, T, H)`` with ``batch_first``.
        decay: Factor in [0, 1]; ``exp(-1/10)`` in the paper. A tensor broadcasts over units and may be trainable.
        gain: Factor on the events; 1 in the paper. EvNN's filter is ``decay=0.9, gain=0.1``.
        initial: Trace before the first step, ``(B, H)``. If None, zero.
        lengths: Number of steps per sequence, ``(B,)``. With ``last``, each sequence is read at its last step.
        last: Return only the trace at the last step, computed as one weighted sum.
        batch_first: Whether ``y`` has the shape ``(B, T, H)``.

    Returns:
        The trace at every step, with the shape of ``y``, or with ``last`` at the last step, ``(B, H)``.

    Raises:
        ValueError: If ``decay`` is outside [0, 1] or ``y`` is empty or has a wrong number of dimensions.

    Example:
        >>> layer, readout = egru.EGRU(3, 16), torch.nn.Linear(16, 10)
        >>> y, _ = layer(torch.randn(20, 2, 3))
        >>> readout(egru.exponential_trace(y, last=True)).shape
        torch.Size([2, 10])
    """
    if not isinstance(decay, Tensor) and not 0 <= decay <= 1:
        raise ValueError(f"exponential_trace: decay must be in [0, 1], got {decay!r}")
    batch_first = batch_first and y.dim() == 3
    if y.dim() not in (2, 3) or 0 in y.shape:
        raise ValueError(f"exponential_trace: y must be a non-empty (T, B, H) or (T, H) tensor, got {tuple(y.shape)}")
    if batch_first:
        y = y.transpose(0, 1)
    T = y.shape[0]
    a = (
        decay.to(y) if isinstance(decay, Tensor) else y.new_full((), decay)
    )  # created on the device: a copy would synchronise
    steps = torch.arange(T, device=y.device).reshape(-1, *[1] * (y.dim() - 1))
    if last:
        age = T - 1 - steps if lengths is None else lengths.to(y.device)[:, None] - 1 - steps
        weight = torch.where(age >= 0, a ** age.clamp_min(0).to(y.dtype), 0)
        out = gain * _weighted_sum(weight, y)
        return out if initial is None else out + a ** (age[0] + 1).to(y.dtype) * initial
    # Within a chunk: a triangular matrix of powers of the decay. Between chunks: the carried trace.
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


def _weighted_sum(weight: Tensor, y: Tensor) -> Tensor:
    """Return the sum of ``weight * y`` over the steps. On a CPU the products of a few steps stay in the cache."""
    if y.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return (weight * y).sum(0)
    total = y.new_zeros(y.shape[1:])
    for part, steps in zip(weight.split(_CHUNK), y.split(_CHUNK), strict=True):
        total += (part * steps).sum(0)
    return total
